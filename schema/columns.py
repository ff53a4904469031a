"""Columns and tables as declarations; types, views, checks and documents are derived from them."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import pyarrow as pa

_TEXT_GUESS_BYTES = 64
Role = Literal["key", "identity", "provenance", "input", "output", "text", "meta"]


@dataclass(frozen=True)
class Column:
    """One declared column.

    Args:
        name: Its name everywhere: Parquet, SQL, reports.
        type: Arrow type. Tensors are lists on the sample's row.
        doc: One sentence.
        role: What it is for: key, identity, provenance, stage input, recorded output, text.
        unit: Unit of the values, empty where dimensionless.
        nullable: Whether a row may lack it.
    """

    name: str
    type: pa.DataType
    doc: str
    role: Role
    unit: str = ""
    nullable: bool = False

    @cached_property
    def is_list(self) -> bool:
        """Whether a row holds a list of values."""
        return bool(pa.types.is_list(self.type))

    @cached_property
    def is_floating(self) -> bool:
        """Whether the values, at whatever depth, are floating-point numbers."""
        inner = self.type.value_type if self.is_list else self.type
        return bool(pa.types.is_floating(inner))

    @cached_property
    def is_float_list(self) -> bool:
        """Whether a row holds a list of float32, as tensors of floats are stored."""
        return bool(self.is_list and self.type.value_type == pa.float32())

    @cached_property
    def is_text(self) -> bool:
        """Whether the values are strings."""
        return bool(pa.types.is_string(self.type))

    @cached_property
    def value_bytes(self) -> int:
        """What one value takes in memory; of text, whose length nothing tells, a guess."""
        return _value_bytes(self.type)

    @cached_property
    def field(self) -> pa.Field:
        """The Arrow field, with nullability; list elements are never null."""
        return pa.field(self.name, self.type, nullable=self.nullable)


@dataclass(frozen=True)
class Table:
    """One declared table: its name, the columns that identify a row, and all columns in order."""

    name: str
    key: tuple[str, ...]
    columns: tuple[Column, ...]
    doc: str
    _by_name: dict[str, Column] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {column.name: column for column in self.columns})

    def __contains__(self, name: object) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> Column:
        return self._by_name[name]

    @property
    def names(self) -> tuple[str, ...]:
        """Column names in declared order."""
        return tuple(self._by_name)

    @cached_property
    def texts(self) -> frozenset[str]:
        """Names of the columns of text."""
        return frozenset(column.name for column in self.columns if column.is_text)

    @cached_property
    def arrow(self) -> pa.Schema:
        """The Arrow schema to which every reader and writer casts."""
        return pa.schema([column.field for column in self.columns])

    def having(self, *roles: Role) -> tuple[Column, ...]:
        """Columns with one of these roles, in declared order."""
        found = self._having.get(roles)
        if found is None:
            found = tuple(column for column in self.columns if column.role in roles)
            self._having[roles] = found
        return found

    @cached_property
    def _having(self) -> dict[tuple[Role, ...], tuple[Column, ...]]:
        return {}


def _value_bytes(column_type: pa.DataType) -> int:
    if pa.types.is_list(column_type):
        return _value_bytes(column_type.value_type)
    if pa.types.is_struct(column_type):
        return sum(_value_bytes(field.type) for field in column_type)
    text = pa.types.is_string(column_type)
    return _TEXT_GUESS_BYTES if text else -(-int(column_type.bit_width) // 8)


def list_of(value_type: pa.DataType) -> pa.ListType:
    """A list type whose elements are never null."""
    return pa.list_(pa.field("element", value_type, nullable=False))


def has_column(table: pa.Table, name: str) -> bool:
    """Whether an Arrow table, whose names are all different, has a column.

    Listing the names of a table of twenty columns takes ten times as long.
    """
    return bool(table.schema.get_field_index(name) >= 0)
