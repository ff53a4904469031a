"""One capture while it is recorded: micro-batches appended in place, and what went wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trajreplay.capture.copies import Block, Copier, Rows
from trajreplay.capture.told import Ledger, Origins, Scalars
from trajreplay.capture.values import bytes_of, frozen, thawed
from trajreplay.capture.witness import Witness
from trajreplay.schema.errors import CaptureError, listed, named
from trajreplay.schema.records import SampleRecord
from trajreplay.schema.tables import EXPERT_LISTS, GRADIENTS, ROLLOUTS, length_column

if TYPE_CHECKING:
    from trajreplay.writer import CaptureBuilder

MICRO_BATCH_ID = "mb-{:04d}"
# Columns that have not as many values as the response.
_APART = {
    *EXPERT_LISTS,
    *(one.name for one in ROLLOUTS.columns if length_column(one.name) == "total_length"),
}


@dataclass(slots=True, eq=False)
class Pending:
    """What one rank has recorded of a rollout or step that is not ended yet.

    Args:
        rollout_id: The rollout.
        step_id: The optimizer step within it; None for the rollout itself.
        options: Other arguments of `Lake.capture`.
        copier: Makes the copies.
        held: Whether it waits in the ring until something asks for it.
        routing: What is said of all routes, as arguments of a capture's `routes`.

    Attributes:
        scalars: What its stages came to.
        origins: Where its columns come from.
        ledger: What became of its samples, and of others.
    """

    rollout_id: int
    step_id: int | None
    options: Mapping[str, Any]
    copier: Copier
    held: bool = False
    routing: Mapping[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    scalars: Scalars = field(default_factory=Scalars)
    origins: Origins = field(default_factory=Origins)
    ledger: Ledger = field(default_factory=Ledger)
    _samples: list[SampleRecord] = field(default_factory=list)
    _micro_batches: list[str | None] = field(default_factory=list)
    # Values of list columns by name, the masks among them, by the row that is their first.
    _blocks: dict[int, dict[str, Rows]] = field(default_factory=dict)
    _record_bytes: int = 0
    # Of each micro-batch the row that is its first, and how many it has.
    _batches: dict[int, tuple[int, int]] = field(default_factory=dict)
    _losses: set[tuple[int, str]] = field(default_factory=set)
    _witnesses: dict[int, Witness] = field(default_factory=dict)

    def __str__(self) -> str:
        step = "" if self.step_id is None else f" step {self.step_id}"
        return f"rollout {self.rollout_id}{step}"

    @property
    def held_bytes(self) -> int:
        """Memory that its copies and records take."""
        return self.copier.held_bytes + self._record_bytes

    @property
    def sources(self) -> set[int]:
        """Rollouts that its samples come from."""
        given = {one.source_rollout_id for one in self._samples}
        return {self.rollout_id if one is None else one for one in given}

    def append(
        self,
        samples: Sequence[SampleRecord],
        columns: Mapping[str, Any],
        origins: Mapping[str, Mapping[str, Any]] | None = None,
        micro_batch_id: str | None = None,
    ) -> None:
        """Append samples and columns of theirs.

        Args:
            samples: One record per sample.
            columns: Values of list columns, in a form that `Copier.block` knows, and choices of
                experts in one that `Copier.routes` does; `loss_mask` among them is taken instead
                of those of the records.
            origins: By column of log-probs, its `source`, `temperature` and `weight_version`.
            micro_batch_id: The micro-batch that they are; that of each record if omitted.

        Raises:
            CaptureError: A column does not fit the samples.
        """
        samples = frozen(samples)
        at, lengths = len(self._samples), [one.response_length for one in samples]
        if columns.get("loss_mask") is None:
            columns = {**columns, "loss_mask": [one.loss_mask for one in samples]}
        copied = self._copied(samples, lengths, columns)
        self._samples += samples
        self._micro_batches += [micro_batch_id] * len(samples)
        self._record_bytes += bytes_of(samples)
        self._keep(at, copied)
        if origins:
            self.origins.note(origins)

    def _keep(self, at: int, copied: Mapping[str, Rows]) -> None:
        if at < len(self._samples):  # a micro-batch without rows has none to begin at
            self._blocks.setdefault(at, {}).update(copied)

    def micro_batch(
        self,
        index: int | None,
        stage: str,
        samples: Sequence[SampleRecord],
        columns: Mapping[str, Any],
        origins: Mapping[str, Mapping[str, Any]] | None,
        scalars: Mapping[str, Any],
        meaning: Mapping[str, Any],
    ) -> None:
        """Append one micro-batch with the scalars of a loss; once, however often it is seen.

        Raises:
            CaptureError: It has no index, or is another one than was seen under it.
        """
        if index is None:
            raise CaptureError(
                f"{self}: a micro-batch of {len(samples)} samples has no index",
                hint="Number the micro-batches of a step; a repeated pass keeps its number.",
            )
        name = MICRO_BATCH_ID.format(index)
        if index not in self._batches:
            at = len(self._samples)
            self.append(samples, columns, origins, name)
            self._batches[index] = at, len(samples)
        else:
            at, count = self._batches[index]
            ids = [one.sample_id for one in samples]
            seen = [one.sample_id for one in self._samples[at : at + count]]
            if seen != ids:
                raise CaptureError(
                    f"{self}: micro-batch {index} has the samples {listed(map(named, ids), 3)}, "
                    f"and had {listed(map(named, seen), 3)}",
                    hint="Number the micro-batches of a step from 0, each once.",
                )
            if (index, stage) in self._losses:
                return
            self._complete(at, samples, columns)
            self.origins.note(origins or {})
        self._losses.add((index, stage))
        if scalars:
            usual = {"scope": "micro_batch", "reduction": "mean"}
            self.scalars.note(stage, scalars, {**usual, **meaning, "micro_batch_id": name})

    def watch(self, index: int, log_probs: Any, failed: Callable[[Exception], None]) -> None:
        """Record what is propagated back to the log-probs of a micro-batch, once it is.

        Args:
            index: The micro-batch, recorded before.
            log_probs: Its log-probs; a forward pass without a graph is repeated with one, or not.
            failed: Is told what goes wrong with a gradient.
        """
        if index not in self._witnesses:
            at, count = self._batches[index]
            lengths = [one.response_length for one in self._samples[at : at + count]]
            witness = Witness(self.copier, log_probs, lengths, failed)
            if witness.in_graph:
                self._witnesses[index] = witness

    def fail(self, reason: str) -> None:
        """Give it up: nothing more is recorded of it, and no gradient is looked at any more."""
        self.problems.append(reason)
        for witness in self._witnesses.values():
            witness.remove()

    def settle(self) -> int:
        """Take what was propagated back until now; what comes later is not looked at.

        Returns:
            How many micro-batches had log-probs in no graph; 0 of a capture that is given up.
        """
        if self.problems:
            return 0
        blind = len(self._batches) - len(self._witnesses)
        for index, witness in self._witnesses.items():
            block = witness.ended()
            blind += not witness.in_graph
            if witness.in_graph:
                self._keep(self._batches[index][0], {GRADIENTS: block})
        return blind

    def _complete(
        self, at: int, samples: Sequence[SampleRecord], columns: Mapping[str, Any]
    ) -> None:
        """Add columns to a micro-batch that the other loss has brought."""
        known = self._blocks.get(at, {})
        missing = {name: values for name, values in columns.items() if name not in known}
        lengths = [one.response_length for one in samples]
        if samples:
            self._keep(at, self._copied(samples, lengths, missing))

    def _copied(
        self, samples: Sequence[SampleRecord], lengths: list[int], columns: Mapping[str, Any]
    ) -> dict[str, Block]:
        lists = {name: values for name, values in columns.items() if values is not None}
        apart = {}
        for name in lists.keys() & _APART:
            values = lists.pop(name)
            if name in EXPERT_LISTS:
                apart[name] = self.copier.routes(name, values, len(samples))
            else:
                apart[name] = self.copier.block(name, values, [one.total_length for one in samples])
        return self.copier.blocks(lists, lengths) | apart

    def write(self, capture: CaptureBuilder) -> None:
        """Hand everything over to a builder.

        Raises:
            TrajReplayError: It cannot be represented.
        """
        self.copier.wait()
        columns: dict[str, dict[int, Rows]] = {}
        for at, blocks in self._blocks.items():
            for name, block in blocks.items():
                columns.setdefault(name, {})[at] = block
        masks = self._rows(columns.pop("loss_mask", {}))
        rows = zip(thawed(self._samples), masks, self._micro_batches, strict=True)
        capture.samples(
            [
                replace(one, loss_mask=mask, micro_batch_id=name or one.micro_batch_id)
                for one, mask, name in rows
            ]
        )
        for name, placed in columns.items():
            if name in EXPERT_LISTS:
                capture.routes(name, self._rows(placed), **self.routing)
            else:
                capture.tensor(name, self._rows(placed), **self.origins.of(name))
        self.scalars.write(capture)

    def _rows(self, blocks: Mapping[int, Rows]) -> list[Any]:
        """One value a sample; None of a micro-batch that had no such column."""
        found: list[Any] = [None] * len(self._samples)
        for at, block in blocks.items():
            rows = block.rows()
            found[at : at + len(rows)] = rows
        return found
