"""Whether what a step says of its tokens can be: counts that fit together, and their maximum."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trajreplay.stages.gate.evidence import Evidence
from trajreplay.stages.gate.heartbeats import is_number

_COUNTS = ("valid_tokens", "over_0_5", "over_1_0")
_OVER = {"over_0_5": 0.5, "over_1_0": 1.0}
_SIZES = ("abs_delta_max", "abs_delta")
# What a trainer tells may be rounded to bfloat16, whose values are 2^-7 of themselves apart.
_ROUNDING = 2.0**-7


def impossible(found: Evidence) -> str:
    """Why the mismatch of some step cannot be what was measured; empty if it can.

    A share where a count is asked for is below every bound, and so is a count of no tokens.
    """
    for step, values in sorted(found.steps.items()):
        known = {name: values[name] for name in (*_COUNTS, *_SIZES) if is_number(values.get(name))}
        told = next(_odd(known), "")
        if told:
            return f"step {found.name(step)} cannot be: {told}"
    return ""


def _odd(known: Mapping[str, Any]) -> Iterator[str]:
    for name in _COUNTS:
        if name in known and not (float(known[name]).is_integer() and known[name] >= 0):
            yield f"{name} is {known[name]:g}, expected a number of tokens"
    if known.get("valid_tokens") == 0:
        yield "valid_tokens is 0, so that nothing is measured"
    for part, whole in (
        ("over_1_0", "over_0_5"),
        ("over_0_5", _COUNTS[0]),
        ("over_1_0", _COUNTS[0]),
    ):
        if part in known and whole in known and known[part] > known[whole]:
            yield f"{part} is {known[part]:g}, and {whole} is {known[whole]:g}"
    largest = known.get("abs_delta_max")
    if largest is None:
        return
    for name, beyond in _OVER.items():
        if name in known and (
            largest < beyond * (1 - _ROUNDING)
            if known[name]
            else largest > beyond * (1 + _ROUNDING)
        ):
            yield f"{name} is {known[name]:g}, and abs_delta_max is {largest:g}"
    if known.get("abs_delta", 0) > largest * (1 + _ROUNDING):
        yield f"abs_delta is {known['abs_delta']:g}, and abs_delta_max is {largest:g}"
