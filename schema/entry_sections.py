"""The sections of a manifest entry that are decoded only when asked for, each by its reader."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from itertools import product
from typing import Any

from trajreplay.schema import exact
from trajreplay.schema.canonical import read_float
from trajreplay.schema.contracts import StageContract
from trajreplay.schema.entry import REDUCTIONS, SCOPES, ColumnSeal, LogProbOrigin, Output
from trajreplay.schema.policy import Tolerance

_NOTHING = type(None)
_SEAL_TYPES = frozenset(product([str], [int], [int], [int, _NOTHING], [str, _NOTHING]))


def read_seals(tree: Any) -> dict[str, ColumnSeal]:
    """The columns of a data file."""
    return {name: _seal(exact.array(one)) for name, one in exact.tree(tree).items()}


def _seal(parts: list[Any]) -> ColumnSeal:
    seal = ColumnSeal._make(parts)
    if tuple(map(type, seal)) not in _SEAL_TYPES or min(seal[1], seal[2], seal[3] or 0) < 0:
        raise ValueError(f"{parts!r} are no digest, counts and dtype")
    return seal


def _outputs(trees: Any) -> tuple[Output, ...]:
    return tuple(_output(one) for one in exact.array(trees))


def _output(tree: Any) -> Output:
    get = exact.tree(tree).get
    values = get("values")
    by_row = get("scope") == "sample"
    if (values is None) == by_row or (get("value") is None) != by_row:
        raise ValueError("an output has either one value or, at scope sample, one per row")
    output: Output = object.__new__(Output)
    vars(output).update(
        stage=exact.text(tree["stage"]),
        field=exact.text(tree["field"]),
        value=exact.optional(get("value"), read_float),
        values=None if values is None else tuple(map(read_float, exact.array(values))),
        scope=exact.optional(get("scope"), partial(exact.one_of, allowed=SCOPES)),
        reduction=exact.optional(get("reduction"), partial(exact.one_of, allowed=REDUCTIONS)),
        micro_batch_id=exact.optional(get("micro_batch_id"), exact.text),
        numerator=exact.optional(get("numerator"), read_float),
        denominator=exact.optional(get("denominator"), read_float),
        scale=read_float(tree["scale"]),
    )
    return output


def _contracts(tree: Any) -> dict[str, StageContract]:
    return {name: _contract(name, *_texts(one).items()) for name, one in exact.tree(tree).items()}


@lru_cache(maxsize=1024)
def _contract(name: str, *fields: tuple[str, Any]) -> StageContract:
    """Entries share them, since a run claims the same of all its captures."""
    return StageContract(name, **dict(fields))


def _tolerances(tree: Any) -> dict[str, Tolerance]:
    return {
        name: Tolerance(*map(read_float, exact.array(one)))
        for name, one in exact.tree(tree).items()
    }


def _origins(tree: Any) -> dict[str, LogProbOrigin]:
    return {
        name: LogProbOrigin(
            exact.text(one["source"]),
            exact.optional(one["temperature"], read_float),
            exact.optional(one["weight_version"], exact.whole),
        )
        for name, one in exact.tree(tree).items()
    }


def _texts(tree: Any) -> dict[str, Any]:
    return {name: exact.text(value) for name, value in exact.tree(tree).items()}


SECTIONS: Mapping[str, Callable[[Any], Any]] = {
    "producer": exact.tree,
    "settings_tree": exact.tree,
    "contracts": _contracts,
    "tolerances": _tolerances,
    "origins": _origins,
    "redaction": _texts,
    "outputs": _outputs,
}
