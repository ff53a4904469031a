"""A statement of a policy: one SELECT that returns a number, and the bounds of that."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trajreplay.query.tables.sql import check_sql
from trajreplay.schema.errors import QueryError
from trajreplay.stages.gate.heartbeats import is_number

_BOUNDS = ("below", "above", "at_most", "at_least", "equals")


@dataclass(frozen=True)
class SqlCheck:
    """A statement that returns one number, and its bound.

    Args:
        name: What the check is called.
        query: One SELECT over the tables of the lake, of one row and one column.
        bounds: By kind, the bounds that the number has to keep, at least one.
    """

    name: str
    query: str
    bounds: Mapping[str, float]


def statement_of(tree: Any, where: str) -> SqlCheck:
    """A statement from plain values, as far as these can be one.

    Raises:
        QueryError: It is no table, or has other keys.
    """
    if not isinstance(tree, dict):
        raise QueryError(f"{where}: sql is {tree!r}, expected tables [[sql]]")
    check_known(tree, ("name", "query", *_BOUNDS), f"{where}: sql")
    bounds = {name: tree[name] for name in _BOUNDS if name in tree}
    plain = {name: float(one) if is_number(one) else one for name, one in bounds.items()}
    return SqlCheck(tree.get("name"), tree.get("query"), plain)  # type: ignore[arg-type]


def check_statement_of(one: SqlCheck, where: str) -> None:
    """Refuse a statement that can never be held to a bound, whatever a lake holds.

    Raises:
        QueryError: It has no name or no finite bound, or is not one SELECT.
    """
    texts: dict[str, Any] = {"name": one.name, "query": one.query}
    for key, text in texts.items():
        if not isinstance(text, str) or not text.strip():
            raise QueryError(f"{where}: a statement has the {key} {text!r}, expected text")
    named = f"{where}: sql {one.name!r}"
    if not isinstance(one.bounds, Mapping):
        raise QueryError(f"{named} has the bounds {one.bounds!r}, expected numbers by kind")
    check_known(one.bounds, _BOUNDS, named)
    wrong = [name for name, value in one.bounds.items() if not is_number(value)]
    if wrong or not one.bounds:
        found = f"{wrong[0]} = {one.bounds[wrong[0]]!r}" if wrong else "no bound"
        raise QueryError(f"{named} has {found}, expected a number for one of {', '.join(_BOUNDS)}")
    check_sql(one.query, named)


def check_known(found: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    """Refuse a key that is none of those allowed.

    Raises:
        QueryError: There is one.
    """
    unknown = [name for name in found if name not in known]
    if unknown:
        raise QueryError(
            f"{where}: unknown {unknown[0]!r}, expected one of {', '.join(known) or 'none'}"
        )
