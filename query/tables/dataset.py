"""The tables of a lake as Arrow datasets that resolve a filter on the manifest before any file."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from trajreplay.query.files.key_columns import key_values
from trajreplay.query.files.scanning import scan
from trajreplay.query.tables.entry_rows import EntryRows, checksum_rows, manifest_rows, output_rows
from trajreplay.query.tables.pruning import PushedFilter, rows_that_may_match
from trajreplay.query.tables.samples import SAMPLES, SamplesTable
from trajreplay.query.tables.visible import Visible, consuming
from trajreplay.schema.columns import Table
from trajreplay.schema.entry import Entry
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import KINDS, CaptureKey
from trajreplay.schema.tables import STEPS, TABLES

_KINDS = {"rollouts": ("rollout",), "steps": ("step",), "routes": ("rollout", "step")}
_FROM_ENTRIES: dict[str, EntryRows] = {
    "outputs": output_rows,
    "manifest": manifest_rows,
    "checksums": checksum_rows,
}
_ENTRIES_A_BATCH = 256


class LakeTable(ds.InMemoryDataset):  # type: ignore[misc]
    """One table of a lake.

    DuckDB asks an Arrow dataset for `scanner(columns=..., filter=...)` and takes its batches as
    filtered. This one holds no rows and no list of files.
    """

    def __init__(self, table: Table, visible: Visible) -> None:
        super().__init__(table.arrow.empty_table())
        self.table = table
        self.visible = visible

    def scanner(
        self,
        columns: list[str] | None = None,
        filter: pc.Expression | None = None,  # noqa: A002 - the name that DuckDB gives it
        **_: Any,
    ) -> _Scan:
        """What one scan of DuckDB reads."""
        self.visible.scanned.add(self.table.name)
        names = list(self.table.names) if columns is None else list(columns)
        return _Scan(self.table, self.visible, names, filter)


def lake_tables(visible: Visible) -> dict[str, ds.InMemoryDataset]:
    """All tables by name."""
    tables = {name: LakeTable(table, visible) for name, table in TABLES.items()}
    return tables | {SAMPLES.name: SamplesTable(visible)}


class _Scan:
    """The rows of some captures, one capture after another."""

    def __init__(
        self, table: Table, visible: Visible, columns: list[str], expression: pc.Expression | None
    ) -> None:
        self.table = table
        self.visible = visible
        self.columns = columns
        self.pushed = None if expression is None else PushedFilter(expression)
        fields = frozenset() if self.pushed is None else self.pushed.fields()
        known = frozenset(CaptureKey._fields) & frozenset(table.names)
        self.exact = fields is not None and fields <= known  # the keys decide the whole filter
        read = frozenset(table.names) if fields is None else fields
        self.needed = columns if self.exact else [*columns, *sorted(read - frozenset(columns))]
        self.known = known

    def to_reader(self) -> pa.RecordBatchReader:
        """The rows as DuckDB takes them."""
        schema = pa.schema([self.table[name].field for name in self.columns])
        return pa.RecordBatchReader.from_batches(schema, self._batches())

    def _batches(self) -> Iterator[pa.RecordBatch]:
        rows_of = _FROM_ENTRIES.get(self.table.name)
        try:
            entries = self._entries()
            found = self._from_files(entries) if rows_of is None else self._built(rows_of, entries)
            for batch in found:
                kept = batch if self.exact or self.pushed is None else self._filtered(batch)
                yield from kept.select(self.columns).to_batches()
        except Exception as error:
            self.visible.errors.append(error)  # DuckDB passes on the text of an error only
            raise

    def _keys(self) -> list[CaptureKey]:
        table, keys = self.visible.catalog.key_table, self.visible.catalog.keys
        if self.pushed is not None:
            if self.exact:
                table = table.filter(self.pushed.expression)
            else:
                table = rows_that_may_match(table, self.pushed.on_keys(self.known))
        kinds = _KINDS.get(self.table.name, KINDS)
        found = (keys[index] for index in table.column("index").to_pylist())
        return [key for key in found if key.kind in kinds]

    def _entries(self) -> Iterable[Entry]:
        if self.table.name == "manifest":
            keys = (key for key in self._keys() if self.visible.lists(key))
            return map(self.visible.catalog.entry, keys)
        entries = self.visible.entries(self._keys())
        return consuming(self.pushed, entries) if self.table is STEPS else entries

    def _filtered(self, batch: pa.Table) -> pa.Table:
        assert self.pushed is not None
        return batch.filter(self.pushed.expression)

    def _from_files(self, entries: Iterable[Entry]) -> Iterator[pa.Table]:
        store, table = self.visible.catalog.store, self.table
        stored = [name for name in self.needed if name not in self.known and name != "row"]
        if not stored:
            for entry in entries:
                if (file := entry.file(table.name)) is not None and file.rows:
                    yield self._completed(entry, {}, file.rows, 0)
            return
        filled = (one for one in entries if (file := one.file(table.name)) and file.rows)
        for entry, batches in scan(store, filled, table, stored):
            start = 0
            try:
                for batch in batches:
                    found = dict(zip(stored, batch.columns, strict=True))
                    yield self._completed(entry, found, batch.num_rows, start)
                    start += batch.num_rows
            except DatasetError as error:
                if not self.visible.tolerant:
                    raise
                self.visible.damaged[entry.key] = error

    def _completed(
        self, entry: Entry, found: dict[str, pa.Array], rows: int, start: int
    ) -> pa.Table:
        """The wanted columns: keys as the manifest has them, the others as they were read."""
        schema = pa.schema([self.table[name].field for name in self.needed])
        arrays = [
            found[field.name]
            if field.name in found
            else key_values(entry.key, field.name, rows, start).cast(field.type)
            for field in schema
        ]
        return pa.Table.from_arrays(arrays, schema=schema)

    def _built(self, rows_of: EntryRows, entries: Iterable[Entry]) -> Iterator[pa.Table]:
        schema = pa.schema([self.table[name].field for name in self.needed])
        rows: list[dict[str, Any]] = []
        for count, entry in enumerate(entries, 1):
            rows += rows_of(self.visible.catalog.store, entry, self.needed)
            if count % _ENTRIES_A_BATCH == 0:
                yield pa.Table.from_pylist(rows, schema=schema)
                rows = []
        yield pa.Table.from_pylist(rows, schema=schema)
