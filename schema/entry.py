"""The manifest entry of one capture: what is in it. Its form on disk is in `entry_codec`."""

from __future__ import annotations

import marshal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from trajreplay.schema.canonical import PLAIN_MARSHAL
from trajreplay.schema.contracts import StageContract
from trajreplay.schema.identity import CaptureKey, ParallelCoordinates, ResumePoint
from trajreplay.schema.policy import Tolerance
from trajreplay.schema.settings import Settings
from trajreplay.schema.tables import ROW_TABLES

SCOPES = ("sample", "micro_batch", "rank", "global")
REDUCTIONS = ("sum", "mean", "weighted-mean")


class Deferred:
    """An object some of whose fields are decoded when one of them is first asked for.

    Ten thousand entries are opened for their keys and paths; few are asked for the rest. Until
    then the rest is kept as bytes: as objects it would slow down every garbage collection.
    """

    def __getattr__(self, name: str) -> Any:
        if name in type(self).__dataclass_fields__ and "_rest" in self.__dict__:  # type: ignore[attr-defined]
            rest: Callable[[], Mapping[str, Any]] = self.__dict__["_rest"]
            self.__dict__.update(rest())
            del self.__dict__["_rest"]
            return self.__dict__[name]
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


class ColumnSeal(NamedTuple):
    """What a data file must hold in one column: its digest and its counts.

    Args:
        digest: Logical digest.
        values: Elements of all rows of a list column; rows, null ones too, of any other.
        nulls: Rows without a value or list.
        non_finite: NaN and infinite values; None where the values are no floats.
        source_dtype: dtype that the producer held the values in.
    """

    digest: str
    values: int
    nulls: int = 0
    non_finite: int | None = None
    source_dtype: str | None = None


@dataclass(frozen=True)
class DataFile(Deferred):
    """Where the rows of a capture lie.

    Args:
        table: The table they belong to.
        path: File, relative to the lake.
        bytes: Size of the whole file.
        footer: Digest of the end of the file, from its metadata on; as `footer_digest` makes it.
        digest: Digest of all bytes of the file.
        first_row_group: First row group that holds rows of the capture.
        row_groups: Rows of each of those row groups.
        first_row: First row of the capture inside the first of them.
        rows: Rows of the capture.
        columns: Seals of the columns that the file has; the others are all null.
    """

    table: str
    path: str
    bytes: int
    footer: str
    digest: str
    first_row_group: int
    row_groups: tuple[int, ...]
    first_row: int
    rows: int
    columns: Mapping[str, ColumnSeal]


@dataclass(frozen=True)
class Output:
    """One recorded scalar, or at scope sample one value per row; what it means is stated.

    Args:
        stage: Stage that computed it.
        field: Name of the scalar.
        value: The scalar; None at scope sample.
        values: At scope sample, one per row.
        scope: sample, micro_batch, rank or global; None if unstated.
        reduction: sum, mean or weighted-mean over the samples of the scope; None if unstated.
        micro_batch_id: At scope micro_batch.
        numerator, denominator: Where recorded; a mean divides by `denominator` if given, else by
            the number of samples in scope.
        scale: Factor already inside the value, such as 1 / accumulation steps.
    """

    stage: str
    field: str
    value: float | None = None
    values: tuple[float, ...] | None = None
    scope: str | None = None
    reduction: str | None = None
    micro_batch_id: str | None = None
    numerator: float | None = None
    denominator: float | None = None
    scale: float = 1.0


@dataclass(frozen=True)
class LogProbOrigin:
    """Where a column of log-probabilities came from.

    Args:
        source: sampler, trainer, detached, interpolated, or `copy:<column>`.
        temperature: Temperature that the logits were divided by.
        weight_version: Weights that computed them, where one version did.
    """

    source: str
    temperature: float | None = None
    weight_version: int | None = None


@dataclass(frozen=True)
class Entry(Deferred):
    """One committed capture.

    Args:
        key: Which one.
        expected_ranks: Ranks of its capture set, ascending.
        status: complete, or dropped for a capture that was given up.
        owner: False for a parallel copy of another rank.
        cohort_size: Samples of the cohort over all ranks, where known.
        created_us: When it was committed, microseconds since 1970.
        producer: The program that captured, as `ProducerInfo.to_json` has it.
        parallel: Where the rank stands in each parallel dimension.
        resumed_from: What the attempt was resumed from.
        settings_tree: The arithmetic in force, resolved; read it as `settings`.
        contracts: Declared stages by name.
        tolerances: The producer's own tolerances by field.
        origins: Where columns of log-probs came from, by column.
        sources: At step level, the distinct (attempt, rollout) that its samples came from.
        redaction: Rules by text field.
        files: Its data files: none without rows.
        outputs: Recorded scalars.
        tokens: Response tokens of all rows.
        reason: Why it was given up.
    """

    key: CaptureKey
    expected_ranks: tuple[int, ...]
    status: str = "complete"
    owner: bool = True
    cohort_size: int | None = None
    created_us: int = 0
    producer: Mapping[str, Any] = field(default_factory=dict)
    parallel: ParallelCoordinates = field(default_factory=ParallelCoordinates)
    resumed_from: ResumePoint | None = None
    settings_tree: Mapping[str, Any] = field(default_factory=dict)
    contracts: Mapping[str, StageContract] = field(default_factory=dict)
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    origins: Mapping[str, LogProbOrigin] = field(default_factory=dict)
    sources: tuple[tuple[int, int], ...] = ()
    redaction: Mapping[str, str] = field(default_factory=dict)
    files: tuple[DataFile, ...] = ()
    outputs: tuple[Output, ...] = field(default_factory=tuple)
    tokens: int = 0
    reason: str = ""

    @cached_property
    def settings(self) -> Settings:
        """The arithmetic in force.

        Raises:
            SchemaError: It holds fields that this version does not know.
        """
        return _settings(marshal.dumps(dict(self.settings_tree), PLAIN_MARSHAL))

    def file(self, table: str) -> DataFile | None:
        """The file with this capture's rows of a table."""
        return next((one for one in self.files if one.table == table), None)

    @property
    def rows(self) -> int:
        """Samples, or events, that it has; 0 without a file of them."""
        file = self.file(ROW_TABLES[self.key.kind].name)
        return 0 if file is None else file.rows


@lru_cache(maxsize=256)
def _settings(tree: bytes) -> Settings:
    """Entries share them, since a run has the same ones in all of its captures."""
    return Settings.from_json(marshal.loads(tree))
