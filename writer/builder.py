"""The capture block: samples, tensors and expected scalars of one rank, committed on leaving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np

from trajreplay.schema.contracts import StageContract
from trajreplay.schema.entry import Entry, LogProbOrigin, Output
from trajreplay.schema.errors import CaptureError, DatasetError, listed
from trajreplay.schema.identity import (
    DROPPED,
    Kind,
    ParallelCoordinates,
    ProducerInfo,
    ResumePoint,
    make_key,
)
from trajreplay.schema.lists import Int64s
from trajreplay.schema.policy import Redaction, Tolerance
from trajreplay.schema.recompute import RecomputeConfig
from trajreplay.schema.records import SampleRecord
from trajreplay.schema.settings import Settings
from trajreplay.schema.shards import row_places, shard_lengths
from trajreplay.schema.store import Store
from trajreplay.schema.tables import SAMPLE_TABLES
from trajreplay.writer.attempts import reserve_attempt
from trajreplay.writer.commit import (
    Prepared,
    TableRows,
    commit_entry,
    commit_rows,
    prepare_rows,
    sweep_once,
)
from trajreplay.writer.draft import make_draft, make_origin
from trajreplay.writer.encode import ListColumn, encode_column, tensor_column
from trajreplay.writer.outputs import PerField, make_outputs, wrong_counts
from trajreplay.writer.ragged import wrong_lengths
from trajreplay.writer.record_checks import check_records
from trajreplay.writer.routes import CapturedRoutes
from trajreplay.writer.samples import SampleColumns, encode_samples


class CaptureBuilder:
    """One rank's capture of a rollout or a step; made by `Lake.capture`, which see.

    Nothing is visible in the lake until the block is left. Leaving it commits; an exception in
    it, or one that the commit raises, leaves nothing visible.

    Attributes:
        key: The capture's key.
        entry: The committed entry, once the block is left.
    """

    def __init__(
        self,
        store: Store,
        *,
        run_id: str,
        rollout_id: int,
        step_id: int | None,
        rank: int,
        expected_ranks: Sequence[int],
        settings: Settings | RecomputeConfig,
        attempt: int = 0,
        producer: ProducerInfo | None = None,
        stages: Sequence[str | StageContract] = (),
        redaction: Mapping[str, str] | None = None,
        resumed_from: ResumePoint | tuple[int, int] | None = None,
        parallel: ParallelCoordinates | None = None,
        owner: bool | None = None,
        cohort_size: int | None = None,
        tolerances: Mapping[str, Tolerance] | None = None,
    ) -> None:
        kind: Kind = "rollout" if step_id is None else "step"
        self.key = make_key(run_id, attempt, kind, rollout_id, step_id, rank)
        self.entry: Entry | None = None
        self._store = store
        self._table = SAMPLE_TABLES[kind]
        self._short_form = isinstance(settings, RecomputeConfig)
        self._redaction = Redaction(redaction)
        self._redaction.check_key()
        self._resumed_from = None if resumed_from is None else ResumePoint(*resumed_from)
        self._draft = make_draft(
            self.key,
            expected_ranks,
            settings,
            producer=producer or ProducerInfo(),
            parallel=parallel or ParallelCoordinates(),
            stages=stages,
            redaction=self._redaction,
            owner=owner,
            cohort_size=cohort_size,
            tolerances=tolerances or {},
        )
        self._samples: SampleColumns | None = None
        self._tensors: dict[str, ListColumn] = {}
        self._routes = CapturedRoutes(self.key)
        self._origins: dict[str, LogProbOrigin] = {}
        self._outputs: dict[tuple[str, ...], Output] = {}
        self._dropped: str | None = None
        self._checked = False  # nothing was handed over since it was found to be whole

    def __enter__(self) -> Self:
        self._reserve()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            return
        try:
            self.entry = self._commit()
        except OSError as reason:
            raise CaptureError(
                f"capture of {self.key}: {self._store} cannot be written: {reason}",
                hint="Nothing was committed. Make room, or make the folder writable, and retry.",
            ) from reason

    def samples(self, records: Sequence[SampleRecord], *, reward_dtype: str = "float32") -> None:
        """Hand over the samples of this rank, once; their order is the order of all tensors.

        Args:
            records: One per sample; none for a rank without rows.
            reward_dtype: dtype in which the trainer computed the rewards.

        Raises:
            CaptureError: Called twice, or with records that no row can represent.
        """
        if self._samples is not None:
            raise CaptureError(
                f"capture of {self.key}: samples() was called before",
                hint="Hand over all samples of the capture at once.",
            )
        self._checked = False
        self._samples = encode_samples(
            check_records(records),
            self.key,
            self._table,
            self._redaction,
            reward_dtype,
            tuple(self._draft.settings.reward.weights),
        )

    def tensor(
        self,
        name: str,
        values: Any,
        *,
        source: str | None = None,
        temperature: float | None = None,
        weight_version: int | None = None,
    ) -> None:
        """Hand over one column of per-token values.

        They are copied: what the trainer does to its tensor afterwards is not recorded.

        Args:
            name: A list column of the table, such as `log_probs`.
            values: One per sample (None for a sample without), or all samples packed, which needs
                `samples` before. torch on any device, numpy, Arrow, or lists of numbers. bfloat16
                and float16 keep their bits. Python numbers take the column's type.
            source: For log-probs, where they come from: sampler, trainer, detached, interpolated
                or `copy:<column>`.
            temperature: For log-probs, what the logits were divided by.
            weight_version: For log-probs, the weights that computed them, where one version did.

        Raises:
            CaptureError: No such column, given before, or values that it cannot hold exactly.
        """
        column = tensor_column(self._table, name)
        if values is None:
            return
        if name in self._tensors:
            raise CaptureError(f"capture of {self.key}: {name} was given before", column=name)
        lengths = None if self._samples is None else self._samples.lengths(name)
        encoded = encode_column(column, values, lengths, self._held(name))
        if (source, temperature, weight_version) != (None, None, None):
            self._origins[name] = make_origin(name, source, temperature, weight_version)
        self._tensors[name] = encoded
        self._checked = False

    def routes(
        self,
        name: str,
        values: Any,
        *,
        num_experts: int | None = None,
        layer_numbers: Sequence[int] | None = None,
    ) -> None:
        """Hand over the experts that a mixture of experts chose for every token.

        They are copied, and stored as int16 with the dtype that they had beside them.

        Args:
            name: Whose choices: `rollout_experts` of the sampler, `old_experts` of the trainer
                where it made `old_log_probs`, `experts` where it made `log_probs`.
            values: One (tokens, layers, top_k) array of integers per sample (None for a sample
                without), tokens being those of prompt and response, or one less: the last predicts
                nothing. Or all samples packed, which needs `samples` before. -1 throughout is a
                token without a route.
            num_experts: Experts of a layer, where known.
            layer_numbers: The number of each layer in the model, where it is not its place among
                those recorded.

        Raises:
            CaptureError: Given before, of other layers or choices than those of another name, or
                of no such form.
        """
        if values is not None:
            self._checked = False
            total = None if self._samples is None else self._samples.total_length
            self._routes.add(
                name, values, total, num_experts=num_experts, layer_numbers=layer_numbers
            )

    def expected(
        self,
        stage: str,
        *,
        scope: str | None = None,
        reduction: str | None = None,
        scale: float = 1.0,
        numerator: PerField = None,
        denominator: PerField = None,
        micro_batch_id: str | None = None,
        **fields: Any,
    ) -> None:
        """Hand over scalars that the trainer computed, for the replay to compare.

        Args:
            stage: The stage that they are results of, such as `loss.policy`.
            scope: What they were taken over: sample, micro_batch, rank or global. At scope sample
                each is a sequence, one value per row.
            reduction: sum, mean or weighted-mean over the samples of the scope. With settings in
                the short form an unstated meaning is: scope rank, reduction sum. With full
                settings an unstated one is shown and not compared.
            scale: Factor already inside the values, such as 1 / accumulation steps.
            numerator: Where known, a number, or one for each field.
            denominator: Likewise; a mean divides by it, else by the number of samples in scope.
            micro_batch_id: At scope micro_batch, which.
            fields: The scalars by name.

        Raises:
            SchemaError: There is no such stage.
            CaptureError: The meaning contradicts itself, or a scalar was given before.
        """
        if self._short_form:
            scope = scope or ("rank" if micro_batch_id is None else "micro_batch")
            reduction = reduction or "sum"
        elif scope == "sample":
            reduction = reduction or "sum"
        for one in make_outputs(
            stage,
            fields,
            scope=scope,
            reduction=reduction,
            scale=scale,
            numerator=numerator,
            denominator=denominator,
            micro_batch_id=micro_batch_id,
        ):
            key = (one.stage, one.field, str(one.scope), str(one.micro_batch_id))
            if key in self._outputs:
                raise CaptureError(
                    f"capture of {self.key}: {one.stage}.{one.field} at scope {one.scope} was "
                    "given before"
                )
            self._outputs[key] = one
        self._checked = False

    def check(self) -> None:
        """Refuse already what leaving the block would refuse of what was handed over so far.

        Raises:
            CaptureError: Tensors have no samples, or rows of another length than theirs.
        """
        if self._checked:
            return
        if self._samples is None and (self._tensors or self._routes):
            raise CaptureError(
                f"capture of {self.key}: tensors were handed over and samples() was not called",
                hint="Nothing was committed. Call samples() with one record per sample.",
            )
        if problems := self._ragged():
            raise CaptureError(
                f"capture of {self.key}: {len(problems)} ragged rows:\n  {listed(problems)}",
                hint="Nothing was committed. Cut each tensor to its sample's response.",
                problems=problems,
            )
        self._checked = True

    def prepare(self) -> Prepared:
        """What leaving the block would commit, for several captures to be committed together.

        Raises:
            CaptureError: As of `check`; or the attempt is recorded otherwise.
        """
        self._reserve()
        return self._prepared()

    def drop(self, reason: str) -> None:
        """Commit, instead of the data, that this capture was given up, and why."""
        self._dropped = reason

    def _held(self, name: str) -> Int64s | None:
        """Values that each row has of a column of which this rank holds a shard, if it may."""
        samples, place = self._samples, self._draft.parallel
        if samples is None or (place.context_size == 1 and not samples.sharded):
            return None
        layout = self._draft.settings.layout
        try:
            places = row_places(layout, place, samples.total_length, **samples.placing())
        except DatasetError as error:
            raise CaptureError(error.message, hint=error.hint) from None
        return shard_lengths(name, layout, places, samples.total_length, samples.response_length)

    def _ragged(self) -> list[str]:
        samples = self._samples
        ids = [] if samples is None else samples.sample_ids
        problems = []
        for name, column in self._tensors.items():
            expected = np.zeros(0, np.int64) if samples is None else samples.lengths(name)
            held = self._held(name)
            if held is None or wrong_lengths(column, held, ids):
                problems += wrong_lengths(column, expected, ids)
        total = np.zeros(0, np.int64) if samples is None else samples.total_length
        problems += self._routes.problems(total, ids)
        return problems + wrong_counts(self._outputs.values(), len(ids))

    def _reserve(self) -> None:
        """Record the attempt, or join it."""
        sweep_once(self._store)
        key = self.key
        record = reserve_attempt(self._store, key.run_id, key.attempt, self._resumed_from)
        self._draft = replace(self._draft, resumed_from=record.resumed_from)

    def _commit(self) -> Entry:
        if self._dropped is not None:
            key = self.key._replace(part=DROPPED)
            dropped = replace(self._draft, key=key, status="dropped", reason=self._dropped)
            return commit_entry(self._store, dropped)
        return commit_rows(self._store, self._prepared())

    def _prepared(self) -> Prepared:
        self.check()
        entry = replace(self._draft, origins=self._origins, outputs=tuple(self._outputs.values()))
        samples = self._samples
        if samples is None or not samples.rows:
            return Prepared(entry)
        entry = replace(entry, sources=samples.sources, tokens=int(samples.response_length.sum()))
        columns = samples.columns(self.key, self._table) | {
            name: one for name, one in self._tensors.items() if not one.all_null
        }
        source_dtypes = {name: one.source_dtype for name, one in self._tensors.items()}
        source_dtypes |= samples.source_dtypes
        tables = [TableRows(self._table, columns, samples.rows, source_dtypes)]
        tables += self._routes.rows(samples.sample_ids)
        return prepare_rows(entry, *tables)
