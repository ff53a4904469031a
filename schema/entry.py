"""The manifest entry of one capture: what is in it, and its signed form on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from trajreplay.schema.canonical import dump_signed, load_signed, read_float
from trajreplay.schema.contracts import StageContract
from trajreplay.schema.errors import DatasetError, SchemaError
from trajreplay.schema.identity import CaptureKey, ParallelCoordinates, ResumePoint
from trajreplay.schema.layout import key_of_entry
from trajreplay.schema.policy import Tolerance
from trajreplay.schema.settings import Settings
from trajreplay.schema.tables import FORMAT_VERSION

SCOPES = ("sample", "micro_batch", "rank", "global")
REDUCTIONS = ("sum", "mean", "weighted-mean")


@dataclass(frozen=True)
class ColumnSeal:
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
class DataFile:
    """Where the rows of a capture lie.

    Args:
        table: The table they belong to.
        path: File, relative to the lake.
        bytes: Size of the whole file.
        first_row_group: First row group that holds rows of the capture.
        row_groups: Rows of each of those row groups.
        first_row: First row of the capture inside the first of them.
        rows: Rows of the capture.
        columns: Seals of the columns that the file has; the others are all null.
    """

    table: str
    path: str
    bytes: int
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
class Entry:
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
    outputs: tuple[Output, ...] = ()
    tokens: int = 0
    reason: str = ""

    @cached_property
    def settings(self) -> Settings:
        """The arithmetic in force.

        Raises:
            SchemaError: It holds fields that this version does not know.
        """
        return Settings.from_json(self.settings_tree)

    def file(self, table: str) -> DataFile | None:
        """The file with this capture's rows of a table."""
        return next((one for one in self.files if one.table == table), None)

    @property
    def rows(self) -> int:
        """Rows of its data file, 0 without one."""
        return self.files[0].rows if self.files else 0

    def same_content(self, other: Entry) -> bool:
        """Whether a retry: digests, outputs, settings and ranks count, paths and times do not."""
        return self._content() == other._content()

    def _content(self) -> bytes:
        tree = _to_json(self)
        del tree["created_us"], tree["producer"]
        for one in tree["files"]:
            for name in ("path", "bytes", "first_row_group", "row_groups", "first_row"):
                del one[name]
        return dump_signed(tree)


def dump_entry(entry: Entry) -> bytes:
    """The entry as the bytes of its file."""
    return dump_signed(_to_json(entry))


def load_entry(data: bytes, path: str) -> Entry:
    """Read the bytes of an entry's file.

    Raises:
        DatasetError: Damaged, of a newer format, with a field of another type, or not the entry
            that its path names.
    """
    tree = load_signed(data, path)
    version = tree.get("format")
    if type(version) is not int or version > FORMAT_VERSION:
        raise DatasetError(
            f"{path}: format {version!r}, expected at most {FORMAT_VERSION}",
            hint="Upgrade trajreplay to read this lake.",
            path=path,
        )
    key = key_of_entry(path)
    try:
        entry = _from_json(tree, key)
    except (KeyError, TypeError, ValueError, SchemaError) as error:
        found = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
        raise DatasetError(f"{path}: not a manifest entry: {found}", path=path) from error
    if tree["key"] != list(key):
        raise DatasetError(
            f"{path}: holds the entry of {tree['key']!r}, expected {list(key)!r}",
            hint="The file was renamed or copied; restore the manifest from a copy of the lake.",
            path=path,
        )
    return entry


def _to_json(entry: Entry) -> dict[str, Any]:
    tree = {name: value for name, value in vars(entry).items() if name != "settings"}
    tree["format"] = FORMAT_VERSION
    tree["key"] = list(entry.key)
    tree["parallel"] = dict(vars(entry.parallel))
    tree["resumed_from"] = entry.resumed_from and list(entry.resumed_from)
    tree["contracts"] = {name: one.to_json() for name, one in entry.contracts.items()}
    tree["tolerances"] = {name: [one.atol, one.rtol] for name, one in entry.tolerances.items()}
    tree["origins"] = {name: vars(one) for name, one in entry.origins.items()}
    tree["files"] = [
        vars(one) | {"columns": {name: vars(seal) for name, seal in one.columns.items()}}
        for one in entry.files
    ]
    tree["outputs"] = [vars(one) for one in entry.outputs]
    return tree


def _from_json(tree: dict[str, Any], key: CaptureKey) -> Entry:
    resumed = tree["resumed_from"]
    return Entry(
        key=key,
        expected_ranks=tuple(_whole(rank) for rank in _list(tree["expected_ranks"])),
        status=_one_of(tree["status"], ("complete", "dropped")),
        owner=_typed(tree["owner"], bool),
        cohort_size=_optional(tree["cohort_size"], _whole),
        created_us=_whole(tree["created_us"]),
        producer=_typed(tree["producer"], dict),
        parallel=ParallelCoordinates(**_typed(tree["parallel"], dict)),
        resumed_from=None if resumed is None else ResumePoint(*map(_whole, _list(resumed))),
        settings_tree=_typed(tree["settings_tree"], dict),
        contracts={
            name: StageContract(name, **_typed(one, dict))
            for name, one in _typed(tree["contracts"], dict).items()
        },
        tolerances={
            name: Tolerance(*map(read_float, _list(one)))
            for name, one in _typed(tree["tolerances"], dict).items()
        },
        origins={
            name: LogProbOrigin(
                _typed(one["source"], str),
                _optional(one["temperature"], read_float),
                _optional(one["weight_version"], _whole),
            )
            for name, one in _typed(tree["origins"], dict).items()
        },
        sources=tuple((_whole(one[0]), _whole(one[1])) for one in _list(tree["sources"])),
        redaction=_typed(tree["redaction"], dict),
        files=tuple(_file(one) for one in _list(tree["files"])),
        outputs=tuple(_output(one) for one in _list(tree["outputs"])),
        tokens=_whole(tree["tokens"]),
        reason=_typed(tree["reason"], str),
    )


def _file(tree: Any) -> DataFile:
    return DataFile(
        table=_typed(tree["table"], str),
        path=_typed(tree["path"], str),
        bytes=_whole(tree["bytes"]),
        first_row_group=_whole(tree["first_row_group"]),
        row_groups=tuple(_whole(rows) for rows in _list(tree["row_groups"])),
        first_row=_whole(tree["first_row"]),
        rows=_whole(tree["rows"]),
        columns={name: _seal(one) for name, one in _typed(tree["columns"], dict).items()},
    )


def _seal(tree: Any) -> ColumnSeal:
    return ColumnSeal(
        digest=_typed(tree["digest"], str),
        values=_whole(tree["values"]),
        nulls=_whole(tree["nulls"]),
        non_finite=_optional(tree["non_finite"], _whole),
        source_dtype=_optional(tree["source_dtype"], _text),
    )


def _output(tree: Any) -> Output:
    values = tree["values"]
    return Output(
        stage=_typed(tree["stage"], str),
        field=_typed(tree["field"], str),
        value=_optional(tree["value"], read_float),
        values=None if values is None else tuple(read_float(one) for one in _list(values)),
        scope=_optional(tree["scope"], lambda one: _one_of(one, SCOPES)),
        reduction=_optional(tree["reduction"], lambda one: _one_of(one, REDUCTIONS)),
        micro_batch_id=_optional(tree["micro_batch_id"], _text),
        numerator=_optional(tree["numerator"], read_float),
        denominator=_optional(tree["denominator"], read_float),
        scale=read_float(tree["scale"]),
    )


_Value = TypeVar("_Value")


def _typed(value: Any, kind: type[_Value]) -> _Value:
    if type(value) is not kind:
        raise ValueError(f"{value!r} is of type {type(value).__name__}, expected {kind.__name__}")
    return value


def _text(value: Any) -> str:
    return _typed(value, str)


def _list(value: Any) -> list[Any]:
    return _typed(value, list)


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no non-negative integer")
    return value


def _one_of(value: Any, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{value!r}, expected one of {', '.join(allowed)}")
    return str(value)


def _optional(value: Any, read: Callable[[Any], _Value]) -> _Value | None:
    return None if value is None else read(value)
