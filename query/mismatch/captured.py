"""The pair's columns of selected captures, a bounded piece at a time, as DuckDB takes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from trajreplay.query.capture_sets import CaptureSet
from trajreplay.query.catalog import Catalog
from trajreplay.query.mismatch.consumed import IDENTITY, Consumed, columns_of
from trajreplay.query.mismatch.pair import Origins, Pair
from trajreplay.query.row_masks import Mask, SelectedSet
from trajreplay.query.scanning import scan
from trajreplay.schema.columns import Table, list_of
from trajreplay.schema.entry import Entry
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.tables import SAMPLE_TABLES, SPANS

PIECE_TOKENS = 1 << 23
PIECE_ROWS = 1 << 13  # so few that DuckDB takes the sums of a sample in one thread, in order
_NUMBERS = list_of(pa.float32())
PIECE = pa.schema(
    [
        ("row", pa.int32()),
        ("key", pa.int32()),
        ("trainer", _NUMBERS),
        ("sampler", _NUMBERS),
        ("mask", list_of(pa.uint8())),
        ("spans", SPANS),
        ("version", pa.int64()),
    ]
)


Step = tuple[str, int, int, int | None]  # run, attempt, rollout and step; None at rollout level


@dataclass(frozen=True)
class RowKey:
    """What the samples of one capture have in common: where their values are counted."""

    run_id: str
    attempt: int
    rollout_id: int
    step_id: int | None
    rank: int
    length: int | None = None

    @property
    def step(self) -> Step:
        """The step, or at rollout level the rollout, over which means are taken."""
        return self.run_id, self.attempt, self.rollout_id, self.step_id


@dataclass
class Reading:
    """What is read of the captures of one run, and what was seen on the way.

    Args:
        catalog: The lake.
        pair: The columns.
        by_length: Whether samples are told apart by their length, in powers of two.
        with_versions: Whether weight versions are needed whatever the trainer's is.
        without: By step, how many samples with a valid token lack one of the columns.
    """

    catalog: Catalog
    pair: Pair
    by_length: bool = False
    with_versions: bool = False
    keys: list[RowKey] = field(default_factory=list)
    without: Counter[Step] = field(default_factory=Counter)
    _places: dict[RowKey, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.origins = Origins(self.pair)
        self._consumed = Consumed(self.catalog)

    def level(self, sets: Sequence[CaptureSet]) -> str:
        """Whether the pair is taken from steps, as consumed, or from rollouts.

        Steps, if the captures of any of them hold both columns, themselves or with the rollouts
        that they consumed from.
        """
        for captures in sets:
            if captures.kind == "step":
                held = {name for entry in captures.owners for name in columns_of(entry)}
                if not set(self.pair.columns) <= held:
                    held |= {
                        name for one in self._consumed.sources(captures) for name in columns_of(one)
                    }
                if set(self.pair.columns) <= held:
                    return "step"
        return "rollout"

    def pieces(self, chosen: Iterator[SelectedSet]) -> Iterator[pa.Table]:
        """The rows of selected capture sets, with the columns of PIECE.

        Raises:
            DatasetError: A file is not what its entry says, the lists of a sample differ in
                length, or a column is a copy of the other.
        """
        waiting: list[pa.Table] = []
        tokens = rows = 0
        for found in self._of_sets(chosen):
            for start in range(0, found.num_rows, PIECE_ROWS):
                part = found.slice(start, PIECE_ROWS)
                size = pc.sum(pc.list_value_length(part["mask"])).as_py() or 0
                if waiting and (tokens + size > PIECE_TOKENS or rows + len(part) > PIECE_ROWS):
                    yield _numbered(waiting)
                    waiting, tokens, rows = [], 0, 0
                waiting.append(part)
                tokens, rows = tokens + size, rows + len(part)
        if waiting:
            yield _numbered(waiting)

    def _of_sets(self, chosen: Iterator[SelectedSet]) -> Iterator[pa.Table]:
        for selected in chosen:
            captures = selected.captures
            table = SAMPLE_TABLES[captures.kind]
            entries = [one for one in captures.owners if one.key.rank in selected.rows and one.rows]
            for entry, batches in self._scanned(captures, entries, table):
                mask: Mask = selected.rows[entry.key.rank]
                start = 0
                for batch in batches:
                    rows = pa.Table.from_batches([batch])
                    kept = None if mask is None else mask.slice(start, len(rows))
                    start += len(rows)
                    yield self._piece(captures, entry, rows if kept is None else rows.filter(kept))

    def _scanned(
        self, captures: CaptureSet, entries: Sequence[Entry], table: Table
    ) -> Iterator[tuple[Entry, Iterator[pa.RecordBatch]]]:
        """The captures with the columns that the pair needs of them."""
        # The length says where lists end, which is what takes longest to decode.
        names = [*self.pair.columns, "loss_mask", "response_length"]
        if self.with_versions or any(
            (origin := one.origins.get(self.pair.trainer)) and origin.weight_version is not None
            for one in (*entries, *self._consumed.sources(captures))
        ):
            names.append("weight_versions")
        if captures.kind == "step":
            held = [set(columns_of(one)) for one in entries]
            if not all(set(names) <= one for one in held):
                names += IDENTITY
        yield from scan(self.catalog.store, entries, table, names)

    def _piece(self, captures: CaptureSet, entry: Entry, rows: pa.Table) -> pa.Table:
        found = {name: rows[name].combine_chunks() for name in rows.column_names}
        if "weight_versions" not in found:
            found["weight_versions"] = pa.nulls(len(rows), SPANS)
        if captures.kind == "step" and "sample_id" in found:
            self._consumed.fill(captures, found, (*self.pair.columns, "weight_versions"))
        trainer, sampler = (
            [
                origin
                for giver in self._consumed.givers(captures, entry, column)
                if (origin := self.origins.add(column, giver))
            ]
            for column in self.pair.columns
        )
        self.origins.compare(trainer, sampler)
        version = trainer[0].weight_version if trainer else None
        complete = pc.and_(*(pc.is_valid(found[column]) for column in self.pair.columns))
        lacking = len(rows) - (complete.true_count or 0)
        if lacking and (count := _with_valid_tokens(found["loss_mask"], pc.invert(complete))):
            self.without[step_of(entry)] += count
        lengths = pc.list_value_length(found["loss_mask"])
        for column in self.pair.columns:
            if pc.any(pc.not_equal(pc.list_value_length(found[column]), lengths)).as_py():
                raise DatasetError(
                    f"capture of {entry.key}: {column} and loss_mask of a sample differ in length",
                    hint="Shards of a context-parallel rank are compared where the mask is that "
                    "of the shard; capture it beside them.",
                )
        piece = pa.table(
            [
                pa.nulls(len(rows), pa.int32()),
                self._keys(entry, lengths),
                found[self.pair.trainer],
                found[self.pair.sampler],
                found["loss_mask"],
                found["weight_versions"],
                pa.repeat(pa.scalar(version, pa.int64()), len(rows)),
            ],
            schema=PIECE,
        )
        return piece.filter(complete) if lacking else piece

    def _keys(self, entry: Entry, lengths: pa.Array) -> pa.Array:
        common = (*step_of(entry), entry.key.rank)
        if not self.by_length:
            return pa.repeat(pa.scalar(self._place(RowKey(*common)), pa.int32()), len(lengths))
        places = [self._place(RowKey(*common, bucket(one))) for one in lengths.to_pylist()]
        return pa.array(places, pa.int32())

    def _place(self, key: RowKey) -> int:
        if key not in self._places:
            self._places[key] = len(self.keys)
            self.keys.append(key)
        return self._places[key]


def bucket(count: int) -> int:
    """The bucket of a length or position: the largest power of two that it reaches, 0 below 256.

    >>> [bucket(one) for one in (0, 255, 256, 511, 512)]
    [0, 0, 256, 256, 512]
    """
    return 0 if count < 256 else 1 << (count.bit_length() - 1)


def step_of(entry: Entry) -> Step:
    """The step, or at rollout level the rollout, that a capture is of."""
    key = entry.key
    assert key.rollout_id is not None
    return key.run_id, key.attempt, key.rollout_id, key.step_id


def _with_valid_tokens(masks: pa.Array, chosen: pa.Array) -> int:
    """How many of the chosen lists of a mask have an element that is not 0."""
    masks = masks.filter(chosen)
    parents = pc.list_parent_indices(masks).filter(pc.not_equal(pc.list_flatten(masks), 0))
    return int(pc.count_distinct(parents).as_py())


def _numbered(tables: Sequence[pa.Table]) -> pa.Table:
    found = pa.concat_tables(tables)
    return found.set_column(0, PIECE.field(0), pa.array(range(len(found)), pa.int32()))
