"""The sections of a manifest entry that are decoded only when asked for, each by its reader."""

from __future__ import annotations

import marshal
from collections.abc import Callable, Mapping
from functools import lru_cache
from itertools import product
from types import MappingProxyType
from typing import Any

from trajreplay.schema import exact
from trajreplay.schema.canonical import PLAIN_MARSHAL, read_float
from trajreplay.schema.contracts import StageContract
from trajreplay.schema.entry import (
    REDUCTIONS,
    SCOPES,
    ColumnSeal,
    LogProbOrigin,
    Output,
)
from trajreplay.schema.policy import Tolerance

_NOTHING = type(None)
_SEAL_TYPES = frozenset(product([str], [int], [int], [int, _NOTHING], [str, _NOTHING]))


def read_seals(tree: Any) -> dict[str, ColumnSeal]:
    """The columns of a data file."""
    seals = {}
    for name, parts in exact.tree(tree).items():
        if type(parts) is not list or tuple(map(type, parts)) not in _SEAL_TYPES:
            raise ValueError(f"{parts!r} are no digest, counts and dtype")
        _, values, nulls, non_finite, _ = parts
        if values < 0 or nulls < 0 or (non_finite or 0) < 0:
            raise ValueError(f"{parts!r} count fewer than none")
        seals[name] = ColumnSeal._make(parts)
    return seals


def _outputs(trees: Any) -> tuple[Output, ...]:
    return tuple(map(_output, exact.array(trees)))


def _output(tree: Any) -> Output:
    get = exact.tree(tree).get
    value, values, scope = get("value"), get("values"), get("scope")
    by_row = scope == "sample"
    if (values is None) == by_row or (value is None) != by_row:
        raise ValueError("an output has either one value or, at scope sample, one per row")
    output: Output = object.__new__(Output)
    vars(output).update(
        _meaning(tree["stage"], tree["field"], scope, get("reduction"), get("micro_batch_id")),
        value=_number(value),
        values=None if values is None else tuple(map(read_float, exact.array(values))),
        numerator=_number(get("numerator")),
        denominator=_number(get("denominator")),
        scale=read_float(tree["scale"]),
    )
    return output


@lru_cache(maxsize=1024)
def _meaning(
    stage: Any, field: Any, scope: Any, reduction: Any, micro_batch_id: Any
) -> Mapping[str, str | None]:
    """What a scalar is, checked: captures of a run record the same ones."""
    return {
        "stage": exact.text(stage),
        "field": exact.text(field),
        "scope": None if scope is None else exact.one_of(scope, SCOPES),
        "reduction": None if reduction is None else exact.one_of(reduction, REDUCTIONS),
        "micro_batch_id": exact.optional(micro_batch_id, exact.text),
    }


def _number(value: Any) -> float | None:
    return None if value is None else read_float(value)


def _contracts(tree: Any) -> Mapping[str, StageContract]:
    return _shared_contracts(marshal.dumps(tree, PLAIN_MARSHAL))


@lru_cache(maxsize=256)
def _shared_contracts(tree: bytes) -> Mapping[str, StageContract]:
    """Entries share them, since a run claims the same of all its captures."""
    found = exact.tree(marshal.loads(tree))
    return MappingProxyType(
        {name: StageContract(name, **_texts(one)) for name, one in found.items()}
    )


def _tolerances(tree: Any) -> dict[str, Tolerance]:
    return {name: _tolerance(*exact.array(one)) for name, one in exact.tree(tree).items()}


def _tolerance(atol: Any, rtol: Any) -> Tolerance:
    return Tolerance(read_float(atol), read_float(rtol))


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
