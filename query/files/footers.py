"""What the footer of a data file says it holds, against what its entry and its table say."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import pyarrow as pa
import pyarrow.parquet as pq

from trajreplay.schema.digest import canonical_type
from trajreplay.schema.entry import DataFile
from trajreplay.schema.errors import DatasetError, SchemaError
from trajreplay.schema.tables import TABLES

_TRUST_HINT = "Restore the file from a copy of the lake. What else is affected: trajreplay validate"
_TEXT = pa.dictionary(pa.int32(), pa.string())


class Footer:
    """The metadata of an open data file, its names, types and row groups checked.

    Args:
        file: The file, as the entry has it.
        parquet: The file, opened.
        as_dictionaries: Columns of text that come out of it as dictionaries.

    Attributes:
        as_declared: Whether its schema is the declared one to the last name and nullability.

    Raises:
        DatasetError: It is not the footer of this file, or of no file of its table.
    """

    def __init__(
        self, file: DataFile, parquet: pq.ParquetFile, as_dictionaries: tuple[str, ...]
    ) -> None:
        self.file = file
        self.metadata = parquet.metadata
        found = parquet.schema_arrow
        names = tuple(found.names)
        if file.columns.keys() != set(names) or len(names) != len(file.columns):
            odd = sorted(file.columns.keys() ^ set(names)) or sorted(names)
            raise broken(file, f"does not have the columns that its entry lists: {', '.join(odd)}")
        self.as_declared = found.equals(_declared_schema(file.table, names, as_dictionaries))
        if not self.as_declared:
            self._check_types(found)
        self._leaves = _leaves_of(file.table, names)
        first = file.first_row_group
        self._range = range(first, first + len(file.row_groups))
        there = self.metadata.num_row_groups
        if self._range.stop > there:
            raise broken(file, f"has {there} row groups, expected {self._range.stop} or more")
        self._groups = [self.metadata.row_group(index) for index in self._range]
        self._check_rows()
        self._chunks: dict[str, list[pq.ColumnChunkMetaData]] = {}
        self._counted: set[str] = set()

    def _check_types(self, found: pa.Schema) -> None:
        """Say what is wrong, if something is: only names of list children may differ."""
        file, table = self.file, TABLES[self.file.table]
        unknown = [name for name in found.names if name not in table]
        if unknown:
            raise broken(file, f"has the column {unknown[0]!r}, which no {table.name} row has")
        for one in found:
            declared = table[one.name].type
            if _type_text(one.type) != canonical_type(declared):
                raise broken(
                    file, f"column {one.name} is of type {one.type}, expected {declared}", one.name
                )

    def _check_rows(self) -> None:
        file, rows = self.file, tuple([group.num_rows for group in self._groups])
        if rows != file.row_groups or file.first_row + file.rows > sum(rows):
            raise broken(
                file, f"has row groups of {list(rows)} rows, expected {list(file.row_groups)}"
            )

    @property
    def names(self) -> tuple[str, ...]:
        """The columns of the file, in its order."""
        return tuple(self._leaves)

    def chunks(self, name: str) -> list[pq.ColumnChunkMetaData]:
        """The chunks of a column in the row groups of the capture, one for each of its leaves."""
        if name not in self._chunks:
            leaves = self._leaves[name]
            self._chunks[name] = [one.column(leaf) for one in self._groups for leaf in leaves]
        return self._chunks[name]

    def chunks_in(self, name: str, groups: range) -> list[pq.ColumnChunkMetaData]:
        """Those of some of the row groups."""
        if groups == self._range:
            return self.chunks(name)
        leaves = len(self._leaves[name])
        first = (groups.start - self._range.start) * leaves
        return self.chunks(name)[first : first + len(groups) * leaves]

    def check_count(self, name: str) -> None:
        """Hold how many values a column claims against how many its entry says.

        Raises:
            DatasetError: They are others, so that it would take other memory than was reckoned.
        """
        if name in self._counted:
            return
        self._counted.add(name)
        file, low, high = self.file, self.file.rows, self.file.rows
        if TABLES[file.table][name].is_list:
            # A row without values, null or an empty list, counts as one in a footer.
            expected = file.columns[name].values
            low, high = max(expected, low), expected + high
        counts = [chunk.num_values for chunk in self.chunks(name)]
        if len(counts) > 1:
            counts = [sum(mine) for mine in _by_leaf(counts, len(self._leaves[name]))]
        shared = file.rows != sum(file.row_groups)
        for found in counts:
            if found < low or (found > high and not shared):
                raise broken(
                    file, f"column {name} has {found} values in its footer, expected {low}", name
                )


def check_chunks(parquet: pq.ParquetFile, groups: Iterable[int]) -> None:
    """Let pyarrow look at what a footer says of each column before anybody asks the footer for it.

    What it cannot make sense of, such as a codec that there is not, or counts of other levels than
    the schema's, is an error of its reader, and ends the process if it is asked of the metadata. No
    page is read: a batch of no rows needs none.

    Raises:
        OSError: It cannot make sense of a column, or one lies outside of the file.
    """
    for group in groups:
        for _ in parquet.reader.iter_batches(0, row_groups=[group], use_threads=False):
            break


def _by_leaf(counts: list[int], leaves: int) -> list[list[int]]:
    return [counts[leaf::leaves] for leaf in range(leaves)]


@cache
def _declared_schema(
    table_name: str, names: tuple[str, ...], as_dictionaries: tuple[str, ...]
) -> pa.Schema | None:
    table = TABLES[table_name]
    if any(name not in table for name in names):
        return pa.schema([])
    columns = [table[name] for name in names]
    return pa.schema(
        [
            one.field.with_type(_TEXT) if one.name in as_dictionaries else one.field
            for one in columns
        ]
    )


def _type_text(column_type: pa.DataType) -> str:
    try:
        return canonical_type(column_type)
    except SchemaError:
        return "another"


@cache
def _leaves_of(table_name: str, names: tuple[str, ...]) -> dict[str, range]:
    """The Parquet columns of each column: a struct has one for each of its fields."""
    leaves: dict[str, range] = {}
    start = 0
    for name in names:
        column_type = TABLES[table_name][name].type
        inner = column_type.value_type if pa.types.is_list(column_type) else column_type
        stop = start + (inner.num_fields if pa.types.is_struct(inner) else 1)
        leaves[name] = range(start, stop)
        start = stop
    return leaves


def broken(file: DataFile, found: str, column: str | None = None) -> DatasetError:
    """The error of a data file that is not what its entry says."""
    return DatasetError(f"{file.path} {found}", hint=_TRUST_HINT, path=file.path, column=column)
