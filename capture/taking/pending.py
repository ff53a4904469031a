"""One capture while it is recorded: micro-batches appended in place, and what went wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from trajreplay.capture.taking.blocks import Copied, Rows
from trajreplay.capture.taking.copies import Copier
from trajreplay.capture.taking.told import Ledger, Origins, Scalars
from trajreplay.capture.taking.values import Taken, taken
from trajreplay.capture.taking.witness import Witness
from trajreplay.schema.errors import CaptureError, listed, named
from trajreplay.schema.records import SampleRecord
from trajreplay.schema.tables import EXPERT_LISTS, GRADIENTS, ROLLOUTS, length_column

if TYPE_CHECKING:
    from trajreplay.writer import CaptureBuilder

# Columns that have not as many values as the response.
_APART = {
    *EXPERT_LISTS,
    *(one.name for one in ROLLOUTS.columns if length_column(one.name) == "total_length"),
}


def micro_batch_id(index: int) -> str:
    """The id of a micro-batch with this number."""
    return f"mb-{index:04d}"


@dataclass(slots=True, eq=False)
class Part:
    """What one call appended: some samples, and columns of theirs.

    Args:
        samples: Their records.
        columns: Their columns, and those that another loss brought.
        index: The micro-batch that they are; None where each record says that.
        stages: The losses that told of it.
        witness: Looks at the gradients of its log-probs.
    """

    samples: Taken
    columns: list[Copied]
    index: int | None
    stages: list[str] = field(default_factory=list)
    witness: Witness | None = None

    def __contains__(self, name: object) -> bool:
        return any(name in one for one in self.columns)

    def blocks(self) -> dict[str, Rows]:
        """Its columns, each for itself; of no samples there are none."""
        found: dict[str, Rows] = {}
        if self.samples.records:
            for one in self.columns:
                found |= one.blocks()
            if self.witness is not None and self.witness.in_graph:
                found[GRADIENTS] = self.witness.seen()
        return found


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
        problems: Why it is given up, if it is.
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
    _parts: list[Part] = field(default_factory=list)
    _batches: dict[int, Part] = field(default_factory=dict)
    _record_bytes: int = 0

    def __str__(self) -> str:
        step = "" if self.step_id is None else f" step {self.step_id}"
        return f"rollout {self.rollout_id}{step}"

    @property
    def held_bytes(self) -> int:
        """Memory that its copies and records take."""
        return self.copier.held_bytes + self._record_bytes

    @property
    def samples(self) -> int:
        """How many samples were recorded of it."""
        return sum(len(part.samples.records) for part in self._parts)

    @property
    def sources(self) -> set[int]:
        """Rollouts that its samples come from."""
        given = {one.source_rollout_id for part in self._parts for one in part.samples.records}
        return {self.rollout_id if one is None else one for one in given}

    def append(
        self,
        samples: Sequence[SampleRecord],
        columns: Mapping[str, Any],
        origins: Mapping[str, Mapping[str, Any]] | None = None,
        index: int | None = None,
    ) -> Part:
        """Append samples and columns of theirs.

        Args:
            samples: One record per sample.
            columns: Values of list columns, in a form that `Copier.block` knows, and choices of
                experts in one that `Copier.routes` does; `loss_mask` among them is taken instead
                of those of the records.
            origins: By column of log-probs, its `source`, `temperature` and `weight_version`.
            index: The micro-batch that they are; that of each record if omitted.

        Raises:
            CaptureError: A column does not fit the samples.
        """
        held = taken(samples)
        part = Part(held, [self._copied(held, columns)], index)
        if "loss_mask" not in part:
            masks = {"loss_mask": [one.loss_mask for one in held.records]}
            part.columns.append(self._copied(held, masks))
        self._parts.append(part)
        self._record_bytes += held.size_bytes
        if origins:
            self.origins.note(origins)
        return part

    def micro_batch(
        self,
        index: int | None,
        stage: str,
        samples: Sequence[SampleRecord],
        columns: Mapping[str, Any],
        origins: Mapping[str, Mapping[str, Any]] | None,
        scalars: Mapping[str, Any] | None,
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
        if (part := self._batches.get(index)) is None:
            part = self._batches[index] = self.append(samples, columns, origins, index)
        else:
            self._check_same(part, samples)
            if stage in part.stages:
                return
            missing = {name: values for name, values in columns.items() if name not in part}
            if samples:
                part.columns.append(self._copied(part.samples, missing))
            self.origins.note(origins or {})
        part.stages.append(stage)
        if scalars:
            self.scalars.note(stage, scalars, {**meaning, "micro_batch_id": micro_batch_id(index)})

    def _check_same(self, part: Part, samples: Sequence[SampleRecord]) -> None:
        ids = [one.sample_id for one in samples]
        seen = [one.sample_id for one in part.samples.records]
        if seen != ids:
            raise CaptureError(
                f"{self}: micro-batch {part.index} has the samples "
                f"{listed(map(named, ids), 3)}, and had {listed(map(named, seen), 3)}",
                hint="Number the micro-batches of a step from 0, each once.",
            )

    def watch(self, index: int, log_probs: Any, failed: Callable[[Exception], None]) -> None:
        """Record what is propagated back to the log-probs of a micro-batch, once it is.

        Args:
            index: The micro-batch, recorded before.
            log_probs: Its log-probs; a forward pass without a graph is repeated with one, or not.
            failed: Is told what goes wrong with a gradient.
        """
        part = self._batches[index]
        if part.witness is None:
            witness = Witness(self.copier, log_probs, part.samples.lengths, failed)
            if witness.in_graph:
                part.witness = witness

    def fail(self, reason: str) -> None:
        """Give it up: nothing more is recorded of it, and no gradient is looked at any more."""
        self.problems.append(reason)
        for part in self._parts:
            if part.witness is not None:
                part.witness.remove()

    def settle(self) -> int:
        """Take what was propagated back until now; what comes later is not looked at.

        Returns:
            How many micro-batches had log-probs in no graph; 0 of a capture that is given up.
        """
        if self.problems:
            return 0
        blind = 0
        for part in self._batches.values():
            if part.witness is not None:
                part.witness.end()
            blind += part.witness is None or not part.witness.in_graph
        return blind

    def _copied(self, samples: Taken, columns: Mapping[str, Any]) -> Copied:
        """Copies of what is given; None is not."""
        if _APART.isdisjoint(columns):
            return self.copier.columns(columns, samples.lengths)
        apart = {}
        for name in columns.keys() & _APART:
            values = columns[name]
            if values is None:
                continue
            if name in EXPERT_LISTS:
                apart[name] = self.copier.routes(name, values, len(samples.records))
            else:
                lengths = [one.total_length for one in samples.records]
                apart[name] = self.copier.block(name, values, lengths)
        lists = {name: values for name, values in columns.items() if name not in _APART}
        copied = self.copier.columns(lists, samples.lengths)
        return copied._replace(apart={**copied.apart, **apart})

    def write(self, capture: CaptureBuilder) -> None:
        """Hand everything over to a builder.

        Raises:
            TrajReplayError: It cannot be represented.
        """
        self.copier.wait()
        records: list[SampleRecord] = []
        batches: list[str | None] = []
        columns: dict[str, dict[int, Rows]] = {}
        for part in self._parts:
            for name, block in part.blocks().items():
                columns.setdefault(name, {})[len(records)] = block
            read = part.samples.read()
            records += read
            batch = None if part.index is None else micro_batch_id(part.index)
            batches += [batch or one.micro_batch_id for one in read]
        masks = _rows(columns.pop("loss_mask", {}), len(records))
        rows = zip(records, masks, batches, strict=True)
        capture.samples(
            [replace(one, loss_mask=mask, micro_batch_id=batch) for one, mask, batch in rows]
        )
        for name, placed in columns.items():
            if name in EXPERT_LISTS:
                capture.routes(name, _rows(placed, len(records)), **self.routing)
            else:
                capture.tensor(name, _rows(placed, len(records)), **self.origins.of(name))
        self.scalars.write(capture)


def _rows(blocks: Mapping[int, Rows], samples: int) -> list[Any]:
    """One value a sample; None of a micro-batch that had no such column.

    Args:
        blocks: Values by the sample that is their first.
        samples: How many there are.
    """
    found: list[Any] = [None] * samples
    for at, block in blocks.items():
        rows = block.rows()
        found[at : at + len(rows)] = rows
    return found
