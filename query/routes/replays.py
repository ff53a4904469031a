"""What routers were set to and what the forward used, layer by layer."""

from __future__ import annotations

from trajreplay.query.routes.coverage import cells_of
from trajreplay.query.routes.findings import RouteFindings
from trajreplay.query.routes.policy import RoutePolicy
from trajreplay.query.routes.shapes import check_replay_shapes
from trajreplay.query.routes.trace import Cell, Replays, Trace
from trajreplay.query.routes.verified import (
    are_paired,
    check_alike,
    check_expected,
    check_expected_backward,
    check_verification,
    may_fall_back,
    used_instead,
)


def check_replays(trace: Trace, policy: RoutePolicy, say: RouteFindings) -> tuple[int, int]:
    """Check actions and verifications of every assigned layer.

    Returns:
        Rows that were left to the trainer's own router, and rows of all verified forwards.
    """
    cells = cells_of(trace, policy)
    unverified_stages = {
        stage
        for stage in policy.stages
        if not any(trace.replays[cell].verified for cell in cells if cell.stage == stage)
    } & {cell.stage for cell in cells}
    for stage in sorted(unverified_stages):
        say.fail(
            "verify.coverage",
            f"no forward of {stage} was verified; set NRL_R3_TRACE_VERIFY_FORWARD=1",
            stage=stage,
        )
    check_replay_shapes(trace, cells, say)
    check_alike(trace, cells, say)
    fallback = rows = 0
    for cell in cells:
        replays = trace.replays[cell]
        _check_counts(cell, replays, cell.stage not in unverified_stages, say)
        _check_actions(cell, replays, say)
        if not are_paired(replays):
            say.unverified(
                "verify.expected",
                f"{cell.told}: {len(replays.verified)} verifications of {len(replays.forward)} "
                f"forwards and {len(replays.assigned)} assignments: which is of which is not known",
                **cell.where,
            )
        for number, one in enumerate(replays.verified):
            check_verification(cell, one, say)
            check_expected(cell, replays, number, one, say)
            fallback += one.fallback_rows
            rows += one.actual.shape[0] if one.actual.shape else 0
        for one in replays.verified_backward:
            check_verification(cell, one, say)
            check_expected_backward(cell, replays, one, say)
    for cell in sorted(trace.replays.keys() - set(cells)):
        say.fail(
            "installed.action",
            f"{cell.told}: routers were set without an assignment",
            **cell.where,
        )
    return fallback, rows


def _check_counts(cell: Cell, replays: Replays, verified: bool, say: RouteFindings) -> None:
    assigned, forward = len(replays.assigned), len(replays.forward)
    backward = len(replays.backward)
    if forward != assigned:
        say.fail(
            "action.coverage",
            f"{cell.told}: {forward} forward replays of {assigned} assignments",
            **cell.where,
        )
    expected = forward if cell.stage == "train" else 0
    if backward != expected and forward == assigned:
        say.fail(
            "backward.count",
            f"{cell.told}: {backward} backward replays, expected {expected}",
            **cell.where,
        )
    if verified and len(replays.verified) < min(forward, assigned):
        say.fail(
            "verify.coverage",
            f"{cell.told}: {len(replays.verified)} of {forward} forwards were verified",
            **cell.where,
        )


def _check_actions(cell: Cell, replays: Replays, say: RouteFindings) -> None:
    """A forward installs the next assignment; a backward one of those, or what a forward used."""
    hashes = [one.routes.sha256 for one in replays.assigned]
    used = used_instead(replays)
    if len(replays.forward) != len(hashes):
        return  # action.coverage says so
    for number, action in enumerate(replays.forward):
        if action.routes is None or action.routes.sha256 != hashes[number]:
            say.fail(
                "installed.action",
                f"{cell.told}: forward replay {number + 1} installed other routes than its "
                f"assignment ({action.origin.file}, line {action.origin.line})",
                **cell.where,
                microbatch=number + 1,
            )
    if not replays.verified and any(may_fall_back(one.routes) for one in replays.assigned):
        return  # which routes a forward used instead is not known
    for number, action in enumerate(replays.backward):
        if action.routes is None or action.routes.sha256 not in used.union(hashes):
            found = "no routes" if action.routes is None else "routes that nobody assigned"
            say.fail(
                "installed.action",
                f"{cell.told}: backward replay {number + 1} installed {found} "
                f"({action.origin.file}, line {action.origin.line})",
                **cell.where,
            )
