"""Whether routes can be routes, as far as previews show them, and how many rows have none."""

from __future__ import annotations

from collections.abc import Iterator

from trajreplay.query.routes.findings import RouteFindings
from trajreplay.query.routes.policy import RoutePolicy
from trajreplay.query.routes.trace import Cell, Trace
from trajreplay.schema.bundles.r3.records import TensorRecord


def check_values(
    trace: Trace, policy: RoutePolicy, fallback: tuple[int, int], say: RouteFindings
) -> None:
    """Check experts of the rows that previews show, and the share of rows that have none.

    Args:
        trace: The trace.
        policy: Experts of a layer and the bound of the share.
        fallback: Rows left to the trainer's own router, and rows of all verified forwards.
        say: The findings.
    """
    seen: set[tuple[int, TensorRecord, bool]] = set()
    experts = policy.experts or trace.experts
    if trace.experts not in (0, experts):
        message = f"scores are of {trace.experts} experts, the policy states {experts}"
        say.fail("route.values", message)
    whole = True
    for cell, tensor, is_used in _tensors(trace):
        key = (cell.rank, tensor, is_used)
        if key in seen:
            continue
        seen.add(key)
        whole &= tensor.is_whole
        for row, choices in enumerate(tensor.rows):
            reason = _wrong(choices, experts, is_used)
            if reason:
                say.fail(
                    "route.values",
                    f"{cell.told}, row {row}: {list(choices)} {reason}",
                    **cell.where,
                )
                break
    if not whole and not say.has_failed("route.values"):
        say.unverified("route.values", "previews show the first rows of tensors only")
    _check_fallback(policy, *fallback, say)


def _tensors(trace: Trace) -> Iterator[tuple[Cell, TensorRecord, bool]]:
    """Every tensor of routes, and whether a forward used it."""
    for cell, replays in sorted(trace.replays.items()):
        for assigned in replays.assigned:
            yield cell, assigned.routes, False
        for verified in (*replays.verified, *replays.verified_backward):
            yield cell, verified.actual, True


def _wrong(choices: tuple[int, ...], experts: int, is_used: bool) -> str:
    negative = sum(value < 0 for value in choices)
    if negative == len(choices) and all(value == -1 for value in choices):
        return "is no route, and a forward used it" if is_used else ""
    if negative:
        return "is partly negative: a row is a route, or -1 throughout"
    if len(set(choices)) < len(choices):
        return "names an expert twice"
    if experts and max(choices) >= experts:
        return f"names an expert beyond the {experts} there are"
    return ""


def _check_fallback(policy: RoutePolicy, fallback: int, rows: int, say: RouteFindings) -> None:
    bound = policy.max_fallback_share
    if not rows:
        say.unverified("route.fallback", "no forward was verified, which alone counts rows")
        return
    share = fallback / rows
    counted = f"{fallback} of {rows} rows ({share:.3g}) had no route: the trainer routed them"
    if bound is not None and share > bound:
        say.fail("route.fallback", f"{counted}; the policy allows a share of {bound}")
    elif fallback and bound is None:
        say.unverified("route.fallback", f"{counted}; the policy states no max_fallback_share")
    elif fallback:
        say.remark("route.fallback", counted)
