"""What routers were set to and what the forward used, layer by layer."""

from __future__ import annotations

from trajreplay.query.routes.coverage import cells_of
from trajreplay.query.routes.findings import RouteFindings
from trajreplay.query.routes.policy import RoutePolicy
from trajreplay.query.routes.trace import Cell, Replays, Trace
from trajreplay.schema.bundles.r3.records import TensorRecord, Verification


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
    fallback = rows = 0
    for cell in cells:
        replays = trace.replays[cell]
        _check_counts(cell, replays, cell.stage not in unverified_stages, say)
        _check_actions(cell, replays, say)
        if not _are_paired(replays):
            say.unverified(
                "verify.expected",
                f"{_named(cell)}: {len(replays.verified)} verifications of {len(replays.forward)} "
                f"forwards and {len(replays.assigned)} assignments: which is of which is not known",
                **_where(cell),
            )
        for number, one in enumerate(replays.verified):
            _check_verification(cell, one, say)
            _check_expected(cell, replays, number, one, say)
            fallback += one.fallback_rows
            rows += one.actual.shape[0] if one.actual.shape else 0
        for one in replays.verified_backward:
            _check_verification(cell, one, say)
            _check_expected_backward(cell, replays, one, say)
    for cell in sorted(trace.replays.keys() - set(cells)):
        say.fail(
            "installed.action",
            f"{_named(cell)}: routers were set without an assignment",
            **_where(cell),
        )
    return fallback, rows


def _check_counts(cell: Cell, replays: Replays, verified: bool, say: RouteFindings) -> None:
    assigned, forward = len(replays.assigned), len(replays.forward)
    backward = len(replays.backward)
    if forward != assigned:
        say.fail(
            "action.coverage",
            f"{_named(cell)}: {forward} forward replays of {assigned} assignments",
            **_where(cell),
        )
    expected = forward if cell.stage == "train" else 0
    if backward != expected and forward == assigned:
        say.fail(
            "backward.count",
            f"{_named(cell)}: {backward} backward replays, expected {expected}",
            **_where(cell),
        )
    if verified and len(replays.verified) < min(forward, assigned):
        say.fail(
            "verify.coverage",
            f"{_named(cell)}: {len(replays.verified)} of {forward} forwards were verified",
            **_where(cell),
        )


def _check_actions(cell: Cell, replays: Replays, say: RouteFindings) -> None:
    """A forward installs the next assignment; a backward one of those, or what a forward used."""
    hashes = [one.routes.sha256 for one in replays.assigned]
    used = _used_instead(replays)
    if len(replays.forward) != len(hashes):
        return  # action.coverage says so
    for number, action in enumerate(replays.forward):
        if action.routes is None or action.routes.sha256 != hashes[number]:
            say.fail(
                "installed.action",
                f"{_named(cell)}: forward replay {number + 1} installed other routes than its "
                f"assignment ({action.origin.file}, line {action.origin.line})",
                **_where(cell),
                microbatch=number + 1,
            )
    if not replays.verified and any(_may_fall_back(one.routes) for one in replays.assigned):
        return  # which routes a forward used instead is not known
    for number, action in enumerate(replays.backward):
        if action.routes is None or action.routes.sha256 not in used.union(hashes):
            found = "no routes" if action.routes is None else "routes that nobody assigned"
            say.fail(
                "installed.action",
                f"{_named(cell)}: backward replay {number + 1} installed {found} "
                f"({action.origin.file}, line {action.origin.line})",
                **_where(cell),
            )


def _check_verification(cell: Cell, one: Verification, say: RouteFindings) -> None:
    place = f"{_named(cell)} ({one.origin.file}, line {one.origin.line})"
    if not one.matches:
        say.fail("verify.match", f"{place}: the forward used other experts", **_where(cell))
        return
    if one.expected is None:
        say.fail("verify.contradiction", f"{place}: nothing was expected", **_where(cell))
        return
    rows = one.actual.shape[0] if one.actual.shape else 0
    if one.actual.shape != one.expected.shape or one.fallback_rows > rows:
        say.fail(
            "verify.contradiction",
            f"{place}: {list(one.actual.shape)} used, {list(one.expected.shape)} expected, "
            f"{one.fallback_rows} fallback rows",
            **_where(cell),
        )
        return
    same = one.actual.sha256 == one.expected.sha256
    if one.actual.dtype != one.expected.dtype:
        same = one.actual.preview == one.expected.preview
    if not same and not one.fallback_rows:
        say.fail(
            "verify.contradiction",
            f"{place}: said to match without fallback rows, and the hashes differ",
            **_where(cell),
        )
    elif one.fallback_rows:
        _check_fallback(cell, place, one, one.expected, say)


def _check_fallback(
    cell: Cell, place: str, one: Verification, expected: TensorRecord, say: RouteFindings
) -> None:
    """Rows of -1 may differ from what was used, others may not: as far as previews go."""
    pairs = list(zip(rows_of(one.actual), rows_of(expected), strict=False))
    left = [row for _, row in pairs if all(value == -1 for value in row)]
    differing = [row for used, row in pairs if used != row and row not in left]
    whole = expected.is_whole and one.actual.is_whole
    if differing or len(left) > one.fallback_rows or (whole and len(left) < one.fallback_rows):
        say.fail(
            "verify.contradiction",
            f"{place}: {one.fallback_rows} fallback rows do not account for what differs",
            **_where(cell),
        )


def _check_expected(
    cell: Cell, replays: Replays, number: int, one: Verification, say: RouteFindings
) -> None:
    """What the k-th forward expected was installed by the k-th action; by any if they are not 1:1.

    That what an action installs was assigned is another rule.
    """
    if one.expected is None:
        return
    if _are_paired(replays):
        installed = replays.forward[number].routes
        known = {replays.assigned[number].routes.sha256}
        known |= {installed.sha256} if installed else set()
    else:
        known = _known(replays)
    if one.expected.sha256 not in known:
        say.fail(
            "verify.expected",
            f"{_named(cell)}: forward {number + 1} was verified against other routes than were "
            f"installed ({one.origin.file}, line {one.origin.line})",
            **_where(cell),
            microbatch=number + 1,
        )


def _check_expected_backward(
    cell: Cell, replays: Replays, one: Verification, say: RouteFindings
) -> None:
    """What a backward expected was installed, or is what a forward used where rows had no route."""
    if one.expected is None or one.expected.sha256 in _known(replays) | _used_instead(replays):
        return
    place = f"{_named(cell)} ({one.origin.file}, line {one.origin.line})"
    if not replays.verified and any(_may_fall_back(other.routes) for other in replays.assigned):
        say.unverified(
            "verify.expected",
            f"{place}: which routes forwards used, and a backward repeats, is not known",
            **_where(cell),
        )
    else:
        say.fail(
            "verify.expected",
            f"{place}: a backward was verified against routes that nobody installed",
            **_where(cell),
        )


def _are_paired(replays: Replays) -> bool:
    """Whether the k-th assignment, forward and verification are of one micro-batch."""
    return len(replays.verified) == len(replays.forward) == len(replays.assigned)


def _known(replays: Replays) -> set[str]:
    """Hashes of all that was assigned, or installed forward."""
    installed = {one.routes.sha256 for one in replays.forward if one.routes}
    return installed | {one.routes.sha256 for one in replays.assigned}


def _used_instead(replays: Replays) -> set[str]:
    """Hashes of what forwards used in which the trainer's own router chose some rows."""
    return {one.actual.sha256 for one in replays.verified if one.fallback_rows}


def _may_fall_back(routes: TensorRecord) -> bool:
    return not routes.is_whole or -1 in routes.preview


def rows_of(tensor: TensorRecord) -> list[tuple[int, ...]]:
    """The whole rows of a preview, each the choices of one token."""
    width = tensor.shape[-1] if tensor.shape else 0
    values = tensor.preview
    return [
        values[start : start + width] for start in range(0, len(values) - width + 1, width) if width
    ]


def _named(cell: Cell) -> str:
    return f"rank {cell.rank}, layer {cell.layer}, {cell.stage} at step {cell.step}"


def _where(cell: Cell) -> dict[str, object]:
    return {
        "stage": cell.stage,
        "trace_step": cell.step,
        "rank": cell.rank,
        "layer": cell.layer,
    }
