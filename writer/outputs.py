"""Recorded scalars: what a producer says about them, as outputs of a capture."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from trajreplay.schema.contracts import stage_named
from trajreplay.schema.entry import REDUCTIONS, SCOPES, Output
from trajreplay.schema.errors import CaptureError, named, shown
from trajreplay.schema.identity import check_id
from trajreplay.writer.flatten import flatten

PerField = float | Mapping[str, float] | None


def make_outputs(
    stage: str,
    fields: Mapping[str, Any],
    *,
    scope: str | None,
    reduction: str | None,
    scale: float,
    numerator: PerField,
    denominator: PerField,
    micro_batch_id: str | None,
) -> list[Output]:
    """One output per field, checked for what a reader needs to know about it.

    Raises:
        SchemaError: There is no such stage, or the micro-batch's id is none.
        CaptureError: Scope and reduction contradict the other arguments.
    """
    stage_named(stage)
    _check_meaning(stage, scope, reduction, micro_batch_id)
    if micro_batch_id is not None:
        check_id("micro_batch_id", micro_batch_id)
    if isinstance(numerator, float | int) and len(fields) > 1:
        raise CaptureError(
            f"{stage}: one numerator for {len(fields)} scalars, expected one for each",
            hint='Give numerator={"loss": ..., "pg_loss": ...}.',
        )
    _check_factor(f"{stage}: scale", scale)
    outputs = []
    for name, value in fields.items():
        where = f"{stage}.{name}"
        parts = [_of_field(one, name) for one in (numerator, denominator)]
        if reduction == "weighted-mean" and None in parts:
            raise CaptureError(
                f"{where}: a weighted mean without numerator and denominator",
                hint="Give both, so that the value can be told from another mean.",
            )
        if parts[1] is not None:
            _check_factor(f"{where}: denominator", parts[1])
        single = scope != "sample"
        outputs.append(
            Output(
                stage,
                name,
                value=_number(where, value) if single else None,
                values=None if single else _numbers(where, value),
                scope=scope,
                reduction=reduction,
                micro_batch_id=micro_batch_id,
                numerator=None if parts[0] is None else _number(where, parts[0]),
                denominator=None if parts[1] is None else _number(where, parts[1]),
                scale=_number(where, scale),
            )
        )
    return outputs


def wrong_counts(outputs: Iterable[Output], rows: int) -> list[str]:
    """Say which scalars recorded per sample are not as many as there are samples."""
    return [
        f"{one.stage}.{one.field} has {len(one.values)} values, expected {rows}: one per sample"
        for one in outputs
        if one.values is not None and len(one.values) != rows
    ]


def _check_meaning(
    stage: str, scope: str | None, reduction: str | None, micro_batch_id: str | None
) -> None:
    for name, value, allowed in (
        ("scope", scope, SCOPES),
        ("reduction", reduction, REDUCTIONS),
    ):
        if value is not None and value not in allowed:
            raise CaptureError(
                f"{stage}: {name} is {named(value)}, expected one of {', '.join(allowed)}"
            )
    if (scope == "micro_batch") != (micro_batch_id is not None):
        raise CaptureError(
            f"{stage}: scope is {named(scope)} with micro_batch_id {named(micro_batch_id)}",
            hint='A scalar of a micro-batch has scope="micro_batch" and micro_batch_id=...',
        )


def _check_factor(where: str, value: Any) -> None:
    """Refuse a factor or divisor beside which any value would agree."""
    number = _number(where, value)
    if not (math.isfinite(number) and number > 0):
        raise CaptureError(
            f"{where} is {number}, expected a positive finite number",
            hint="Leave it out where the trainer did not scale or divide.",
        )


def _of_field(value: PerField, name: str) -> float | None:
    return value.get(name) if isinstance(value, Mapping) else value


def _number(where: str, value: Any) -> float:
    try:
        # A loss that still has its graph is read without it, as every integration would have to.
        return float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError) as error:
        raise CaptureError(f"{where} is {shown(value)}, expected a number") from error


def _numbers(where: str, values: Any) -> tuple[float, ...]:
    flat = flatten(where, values)
    if flat.valid is not None or flat.dtype == "bfloat16":
        return tuple(_number(where, value) for value in values)
    return tuple(flat.values.astype(np.float64).tolist())
