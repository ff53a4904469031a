"""Results that DuckDB has and Arrow, or Polars, has not: refused by column, never changed."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as types

from trajreplay.schema.errors import QueryError

if TYPE_CHECKING:
    import duckdb

# What comes out of Arrow in their place: another number, a time without its zone, bare bytes.
_LOST = {"uhugeint", "time with time zone", "bit", "bignum", "variant"}
_NESTED = {"struct", "list", "array", "map", "union"}
_INT32, _INT64 = (1 << 31) - 1, (1 << 63) - 1  # DuckDB's infinity of dates and of timestamps
_LONGEST = Decimal(10**38)  # scaled or not, a decimal of DuckDB is shorter; HUGEINT comes as one
_DAY_S = 24 * 60 * 60
_UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}  # in a second


def refuse_types(relation: duckdb.DuckDBPyRelation) -> None:
    """Refuse columns of a type that Arrow has no equal of.

    Raises:
        QueryError: There is one; of several, the first is named.
    """
    for name, kind in zip(relation.columns, relation.types, strict=True):
        if any(one in _LOST for one in _type_names(kind)):
            raise _unheld(name, str(kind), ", which Arrow does not have")


def refuse_values(rows: pa.RecordBatch) -> None:
    """Refuse values that stand for something else in DuckDB than in Arrow.

    Raises:
        QueryError: An infinite date or timestamp, the time 24:00:00, or an integer that is longer
            than Arrow's decimals.
    """
    for field, column in zip(rows.schema, rows.columns, strict=True):
        if any(types.is_temporal(one) or types.is_decimal(one) for one in _kinds(field.type)):
            for found in filter(None, map(_special, _parts(column))):
                raise _unheld(
                    field.name, str(field.type), f" and holds {found}, which Arrow cannot"
                )


def refuse_for_polars(schema: pa.Schema) -> None:
    """Refuse columns that Polars has no type for.

    Raises:
        QueryError: There is one.
    """
    for field in schema:
        if any(types.is_interval(one) or types.is_union(one) for one in _kinds(field.type)):
            raise _unheld(field.name, str(field.type), ", which Polars does not have")


def _unheld(name: str, kind: str, why: str) -> QueryError:
    """The error of a column that cannot be handed on as it is."""
    return QueryError(
        f"column {name} is of type {kind}{why}",
        hint=f"Cast it to text in the statement: {name}::varchar",
        column=name,
    )


def _type_names(kind: Any) -> Iterator[str]:
    """The name of a DuckDB type, and of every type inside it."""
    yield kind.id
    for _, inside in kind.children if kind.id in _NESTED else ():
        if isinstance(inside, type(kind)):  # the size of an array is among its children
            yield from _type_names(inside)


def _kinds(kind: pa.DataType) -> Iterator[pa.DataType]:
    """An Arrow type and every type inside it."""
    yield kind
    for index in range(kind.num_fields):
        yield from _kinds(kind.field(index).type)


def _parts(values: pa.Array) -> Iterator[pa.Array]:
    """An array and every array inside it."""
    yield values
    kind = values.type
    if types.is_map(kind):
        inner = [values.keys, values.items]
    elif types.is_struct(kind) or types.is_union(kind):
        inner = [values.field(index) for index in range(kind.num_fields)]
    else:
        inner = [values.flatten()] if types.is_nested(kind) else []
    for one in inner:
        yield from _parts(one)


def _special(values: pa.Array) -> str:
    """What an array holds that only DuckDB has; nothing where it holds no such value."""
    kind = values.type
    limit: Any
    if types.is_decimal128(kind):
        limit, plain, found = _LONGEST, kind, "integers of more than 38 digits"
    elif types.is_date32(kind):
        limit, plain, found = _INT32, pa.int32(), "infinity"
    elif types.is_timestamp(kind):
        limit, plain, found = _INT64, pa.int64(), "infinity"
    elif types.is_time64(kind):
        limit, plain, found = _DAY_S * _UNITS[kind.unit], pa.int64(), "the time 24:00:00"
    else:
        return ""
    low, high = pc.min_max(values.view(plain)).as_py().values()
    return found if low is not None and not -limit < low <= high < limit else ""
