"""The table `samples`: what was generated joined to what consumed it, without joining a lake.

It is the full outer join of steps and rollouts on run, source attempt, source rollout and sample
id. A step's manifest entry lists the rollouts that it consumed from, so that a filter on the step
reads its captures and theirs, and a filter on the rollout those that consumed from it. Of a sample
that context-parallel ranks cut into shards, a shard is joined to the same shard; where the rollout
was cut otherwise, its lists of numbers stay null, for they are of other tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import count
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from trajreplay.query.files.key_columns import key_values
from trajreplay.query.files.reading import read_columns
from trajreplay.query.files.row_identity import IDENTITY, SHARD, Shard, names_of, shards_of
from trajreplay.query.manifest.catalog import Cohort, cohort_of
from trajreplay.query.tables.pruning import PushedFilter, rows_that_may_match
from trajreplay.query.tables.visible import Visible, consuming
from trajreplay.schema.columns import Column, Table
from trajreplay.schema.entry import Entry
from trajreplay.schema.tables import RESPONSE_LISTS, ROLLOUTS, STEPS

_OF_STEP = ("attempt", "rollout_id", "step_id", "rank", "row")
_OF_ROLLOUT = {
    "source_attempt": "attempt",
    "source_rollout_id": "rollout_id",
    "source_rank": "rank",
    "source_row": "row",
}
_SHARED = tuple(
    column.name for column in STEPS.columns if column.name in ROLLOUTS and column.role != "key"
)
_KEPT = 32


def _nullable(column: Column, name: str = "") -> Column:
    return Column(name or column.name, column.type, column.doc, column.role, column.unit, True)


SAMPLES = Table(
    "samples",
    ("run_id", "source_attempt", "source_rollout_id", "sample_id", *_OF_STEP),
    (
        STEPS["run_id"],
        *(_nullable(STEPS[name]) for name in _OF_STEP),
        STEPS["source_attempt"],
        STEPS["source_rollout_id"],
        _nullable(ROLLOUTS["rank"], "source_rank"),
        _nullable(ROLLOUTS["row"], "source_row"),
        STEPS["sample_id"],
        *(_nullable(STEPS[name]) for name in _SHARED if name != "sample_id"),
    ),
    "One sample as generated and, once for each step that did, as consumed.",
)


class SamplesTable(ds.InMemoryDataset):  # type: ignore[misc]
    """The table `samples`, as `dataset.LakeTable` is the others."""

    def __init__(self, visible: Visible) -> None:
        super().__init__(SAMPLES.arrow.empty_table())
        self.visible = visible

    def scanner(
        self,
        columns: list[str] | None = None,
        filter: pc.Expression | None = None,  # noqa: A002 - the name that DuckDB gives it
        **_: Any,
    ) -> _SamplesScan:
        """What one scan of DuckDB reads."""
        self.visible.scanned.add(SAMPLES.name)
        names = list(SAMPLES.names) if columns is None else list(columns)
        return _SamplesScan(self.visible, names, filter)


class _SamplesScan:
    def __init__(
        self, visible: Visible, columns: list[str], expression: pc.Expression | None
    ) -> None:
        self.visible = visible
        self.columns = columns
        self.pushed = None if expression is None else PushedFilter(expression)
        fields = frozenset[str]() if self.pushed is None else self.pushed.fields()
        read = frozenset(SAMPLES.names) if fields is None else fields
        self.needed = [*columns, *sorted(read - frozenset(columns))]
        self.shared = [name for name in self.needed if name in _SHARED and name != "sample_id"]
        self._generated = lru_cache(maxsize=_KEPT)(self._read_generated)
        self._consumed = lru_cache(maxsize=_KEPT)(self._read_consumed)

    def to_reader(self) -> pa.RecordBatchReader:
        """The rows as DuckDB takes them."""
        schema = pa.schema([SAMPLES[name].field for name in self.columns])
        return pa.RecordBatchReader.from_batches(schema, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        try:
            for rows in (*self._of_steps(), *self._never_consumed()):
                kept = rows if self.pushed is None else rows.filter(self.pushed.expression)
                yield from kept.select(self.columns).to_batches()
        except Exception as error:
            self.visible.errors.append(error)  # DuckDB passes on the text of an error only
            raise

    def _matching(self, kind: str, known: pa.Table) -> list[int]:
        """Places in the catalog of the captures of a kind whose keys a filter allows."""
        if self.pushed is not None:
            known = rows_that_may_match(known, self.pushed.on_keys(known.column_names))
        keys = self.visible.catalog.keys
        found: Iterable[int] = dict.fromkeys(known.column("index").to_pylist())
        return [index for index in found if keys[index].kind == kind]

    def _of_steps(self) -> Iterator[pa.Table]:
        """Every consumed sample, with what its rollout has in the place of nulls."""
        catalog = self.visible.catalog
        table = catalog.key_table.drop_columns(["kind", "part"])
        keys = [catalog.keys[index] for index in self._matching("step", table)]
        for entry in consuming(self.pushed, self.visible.entries(keys)):
            file = entry.file("steps")
            if file is None or not file.rows:
                continue
            names = list(dict.fromkeys([*IDENTITY, *SHARD, *self.shared]))
            rows = read_columns(catalog.store, entry, STEPS, names)
            found = {name: rows[name].combine_chunks() for name in names}
            for name, values in self._looked_up(entry, found).items():
                found[name] = pc.coalesce(found[name], values) if name in found else values
            for name in ("run_id", *_OF_STEP):
                found[name] = key_values(entry.key, name, file.rows)
            yield self._table(found, file.rows)

    def _looked_up(self, entry: Entry, found: dict[str, pa.Array]) -> dict[str, pa.Array]:
        """What the rollouts of a step's samples hold of them, in the order of the step."""
        wanted = [name for name in self.shared if found[name].null_count]
        wanted += [name for name in ("source_rank", "source_row") if name in self.needed]
        if not wanted:
            return {}
        columns = tuple(dict.fromkeys([*IDENTITY, *SHARD, *wanted]))
        sources = [Cohort(entry.key.run_id, *source, None) for source in sorted(entry.sources)]
        generated = [self._generated(source, columns) for source in sources]
        there = pa.concat_tables([table for table, _ in generated])
        shards = [shard for _, of_table in generated for shard in of_table]
        named = dict(zip(zip(names_of(there), shards, strict=True), count(), strict=False))
        whole = dict(zip(names_of(there), count(), strict=False))
        mine = list(zip(names_of(found), shards_of(entry, found), strict=True))
        same = pa.array([named.get(one) for one in mine], pa.int64())
        any_shard = pa.array([whole.get(name) for name, _ in mine], pa.int64())
        places = {
            name: same if name in RESPONSE_LISTS else pc.coalesce(same, any_shard)
            for name in wanted
        }
        return {name: there[name].take(at).combine_chunks() for name, at in places.items()}

    def _read_generated(
        self, rollout: Cohort, columns: tuple[str, ...]
    ) -> tuple[pa.Table, list[Shard]]:
        """The samples of a rollout, if it is visible, under the names of this table."""
        schema = pa.schema([SAMPLES[name].field for name in columns])
        keys = self.visible.catalog.by_cohort.get(rollout, ())
        pieces, shards = [schema.empty_table()], list[Shard]()
        for entry in self.visible.entries(keys):
            rows = self._of_rollout(entry, columns)
            pieces.append(rows)
            shards += shards_of(entry, rows)
        return pa.concat_tables(pieces), shards

    def _of_rollout(self, entry: Entry, columns: Sequence[str]) -> pa.Table:
        stored = [name for name in columns if name in _SHARED]
        rows = read_columns(self.visible.catalog.store, entry, ROLLOUTS, stored)
        found = {name: rows[name] for name in stored} | {
            name: key_values(entry.key, _OF_ROLLOUT[name], rows.num_rows)
            for name in columns
            if name in _OF_ROLLOUT
        }
        schema = pa.schema([SAMPLES[name].field for name in columns])
        return pa.Table.from_arrays(
            [found[field.name].cast(field.type) for field in schema], schema=schema
        )

    def _never_consumed(self) -> Iterator[pa.Table]:
        """Every sample that no visible step consumed."""
        catalog = self.visible.catalog
        known = pa.table(
            {"index": catalog.key_table["index"], "run_id": catalog.key_table["run_id"]}
            | {name: catalog.key_table[key] for name, key in _OF_ROLLOUT.items() if key != "row"}
            | {name: pa.nulls(len(catalog.keys), SAMPLES[name].type) for name in _OF_STEP}
        )
        keys = [catalog.keys[index] for index in self._matching("rollout", known)]
        columns = [name for name in self.needed if name not in ("run_id", *_OF_STEP)]
        columns = list(dict.fromkeys(["sample_id", *columns]))
        for entry in self.visible.entries(keys):
            if entry.rows:
                rows = self._of_rollout(entry, columns)
                consumed = self._consumed(cohort_of(entry.key))
                left = rows.filter(pc.invert(pc.is_in(rows["sample_id"], value_set=consumed)))
                found = {name: left[name] for name in columns}
                found["run_id"] = key_values(entry.key, "run_id", left.num_rows)
                yield self._table(found, left.num_rows)

    def _read_consumed(self, rollout: Cohort) -> pa.Array:
        """Ids of a rollout's samples that some visible step consumed."""
        found: list[pa.Array] = []
        catalog = self.visible.catalog
        for entry in self.visible.entries(catalog.consumers.get(rollout, ())):
            rows = read_columns(catalog.store, entry, STEPS, IDENTITY)
            mine = pc.and_(
                pc.equal(rows["source_attempt"], rollout.attempt),
                pc.equal(rows["source_rollout_id"], rollout.rollout_id),
            )
            found += rows["sample_id"].filter(mine).chunks
        return pa.chunked_array(found, pa.string()).combine_chunks()

    def _table(self, found: dict[str, pa.Array], rows: int) -> pa.Table:
        schema = pa.schema([SAMPLES[name].field for name in self.needed])
        arrays = [
            found[field.name].cast(field.type)
            if field.name in found
            else pa.nulls(rows, field.type)
            for field in schema
        ]
        return pa.Table.from_arrays(arrays, schema=schema)
