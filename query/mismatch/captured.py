"""The pair's columns of selected captures, a bounded piece at a time, as DuckDB takes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.compute as pc

from trajreplay.query.files.scanning import scan
from trajreplay.query.manifest.capture_sets import CaptureSet
from trajreplay.query.manifest.catalog import Catalog
from trajreplay.query.mismatch.consumed import Consumed, columns_of, together
from trajreplay.query.mismatch.keys import RowKey, Step, bucket, step_of
from trajreplay.query.mismatch.pair import Origins, Pair
from trajreplay.query.mismatch.shards import Rows, identified, is_cut, needed, placed, put_together
from trajreplay.query.mismatch.versions import holds_spans, spanned, version_of
from trajreplay.query.selecting.row_masks import Mask, SelectedSet
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
            cut = is_cut(selected.captures.owners)
            rows = self._rows(selected, cut)
            for one in put_together(list(rows), self.pair.columns) if cut else rows:
                yield self._piece(one)

    def _rows(self, selected: SelectedSet, cut: bool) -> Iterator[Rows]:
        """The selected rows of each capture, with what they take from rollouts.

        Args:
            selected: The captures and rows.
            cut: Whether rows may be shards: then all rows of a capture come at once, for where one
                was cut may depend on the others.
        """
        captures = selected.captures
        table = SAMPLE_TABLES[captures.kind]
        entries = [one for one in captures.owners if one.key.rank in selected.rows and one.rows]
        for entry, batches in self._scanned(captures, entries, table, cut):
            mask: Mask = selected.rows[entry.key.rank]
            start = 0
            pieces = [list(batches)] if cut else ([batch] for batch in batches)
            for piece in pieces:
                rows = pa.Table.from_batches(piece)
                found = {name: rows[name].combine_chunks() for name in rows.column_names}
                if cut:
                    found = identified(entry, found)
                    found |= placed(entry, found)
                if mask is not None:
                    kept = mask.slice(start, len(rows))
                    found = {name: one.filter(kept) for name, one in found.items()}
                start += len(rows)
                yield Rows(entry, self._completed(captures, entry, found))

    def _scanned(
        self, captures: CaptureSet, entries: Sequence[Entry], table: Table, cut: bool
    ) -> Iterator[tuple[Entry, Iterator[pa.RecordBatch]]]:
        """The captures with the columns that the pair needs of them."""
        # The length says where lists end, which is what takes longest to decode.
        names = [*self.pair.columns, "loss_mask", "response_length"]
        if self.with_versions or any(
            version_of(one.origins.get(self.pair.trainer)) is not None
            for one in (*entries, *self._consumed.sources(captures))
        ):
            names.append("weight_versions")
        lacking = captures.kind == "step" and not all(
            set(names) <= set(columns_of(one)) for one in entries
        )
        if cut or lacking:
            names = list(dict.fromkeys([*names, *needed(table)]))
        yield from scan(self.catalog.store, entries, table, names)

    def _completed(
        self, captures: CaptureSet, entry: Entry, found: dict[str, pa.Array]
    ) -> dict[str, pa.Array]:
        """Columns of a capture with what it lacks, and by which weights the trainer's are."""
        count = len(found["loss_mask"])
        if "weight_versions" not in found:
            found["weight_versions"] = pa.nulls(count, SPANS)
        filled = (*self.pair.columns, "weight_versions")
        given = self._consumed.fill(captures, entry, found, filled)
        for column in self.pair.columns:
            for giver in given[column].used:
                self.origins.add(column, giver)
        for both in together(*(given[column] for column in self.pair.columns)):
            of_both = zip(both, self.pair.columns, strict=True)
            self.origins.compare(*(giver.origins.get(column) for giver, column in of_both))
        trained, sampled = (
            given[name].told(
                [version_of(one.origins.get(name)) for one in given[name].entries], count
            )
            for name in self.pair.columns
        )
        if trained.null_count and not self.origins.trainer_unversioned:
            holders = (entry, *self._consumed.sources(captures))
            self.origins.trainer_unversioned = sampled.null_count < count or any(
                map(holds_spans, holders)
            )
        spans = spanned(found["weight_versions"], sampled)
        return found | {"version": trained, "weight_versions": spans}

    def _piece(self, rows: Rows) -> pa.Table:
        entry, found = rows
        complete = pc.and_(*(pc.is_valid(found[column]) for column in self.pair.columns))
        count = len(complete)
        lacking = count - (complete.true_count or 0)
        if lacking and (of := _with_valid_tokens(found["loss_mask"], pc.invert(complete))):
            self.without[step_of(entry)] += of
        lengths = pc.list_value_length(found["loss_mask"])
        for column in self.pair.columns:
            if pc.any(pc.not_equal(pc.list_value_length(found[column]), lengths)).as_py():
                raise DatasetError(
                    f"capture of {entry.key}: {column} and loss_mask of a sample differ in length",
                    hint="Values of a part of a response are compared where the settings say how "
                    "sequences were cut: layout.context.",
                )
        piece = pa.table(
            [
                pa.nulls(count, pa.int32()),
                self._keys(entry, lengths),
                found[self.pair.trainer],
                found[self.pair.sampler],
                found["loss_mask"],
                found["weight_versions"],
                found["version"],
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


def _with_valid_tokens(masks: pa.Array, chosen: pa.Array) -> int:
    """How many of the chosen lists of a mask have an element that is not 0."""
    masks = masks.filter(chosen)
    parents = pc.list_parent_indices(masks).filter(pc.not_equal(pc.list_flatten(masks), 0))
    return int(pc.count_distinct(parents).as_py())


def _numbered(tables: Sequence[pa.Table]) -> pa.Table:
    found = pa.concat_tables(tables)
    return found.set_column(0, PIECE.field(0), pa.array(range(len(found)), pa.int32()))
