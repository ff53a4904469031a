"""What forwards and backwards were verified to use, held against what was installed."""

from __future__ import annotations

from collections.abc import Sequence

from trajreplay.query.routes.findings import RouteFindings
from trajreplay.query.routes.trace import Cell, Replays, Trace
from trajreplay.schema.bundles.r3.records import TensorRecord, Verification


def check_verification(cell: Cell, one: Verification, say: RouteFindings) -> None:
    """Check that a verification matched, and that its hashes and fallback rows say so, too."""
    place = f"{cell.told} ({one.origin.file}, line {one.origin.line})"
    if not one.matches:
        say.fail("verify.match", f"{place}: the forward used other experts", **cell.where)
        return
    if one.expected is None:
        say.fail("verify.contradiction", f"{place}: nothing was expected", **cell.where)
        return
    rows = one.actual.shape[0] if one.actual.shape else 0
    if one.actual.shape != one.expected.shape or one.fallback_rows > rows:
        say.fail(
            "verify.contradiction",
            f"{place}: {list(one.actual.shape)} used, {list(one.expected.shape)} expected, "
            f"{one.fallback_rows} fallback rows",
            **cell.where,
        )
        return
    same = one.actual.sha256 == one.expected.sha256
    if one.actual.dtype != one.expected.dtype:
        same = one.actual.preview == one.expected.preview
    if not same and not one.fallback_rows:
        say.fail(
            "verify.contradiction",
            f"{place}: said to match without fallback rows, and the hashes differ",
            **cell.where,
        )
    elif one.fallback_rows:
        _check_fallback(cell, place, one, one.expected, say)


def _check_fallback(
    cell: Cell, place: str, one: Verification, expected: TensorRecord, say: RouteFindings
) -> None:
    """Rows of -1 may differ from what was used, others may not: as far as previews go."""
    pairs = list(zip(one.actual.rows, expected.rows, strict=False))
    left = [row for _, row in pairs if all(value == -1 for value in row)]
    differing = [row for used, row in pairs if used != row and row not in left]
    whole = expected.is_whole and one.actual.is_whole
    if differing or len(left) > one.fallback_rows or (whole and len(left) < one.fallback_rows):
        say.fail(
            "verify.contradiction",
            f"{place}: {one.fallback_rows} fallback rows do not account for what differs",
            **cell.where,
        )


def check_alike(trace: Trace, cells: Sequence[Cell], say: RouteFindings) -> None:
    """Of equal routes as many rows have none, in whatever stage and on whatever rank."""
    first: dict[object, tuple[Cell, Verification]] = {}
    verified = ((cell, one) for cell in cells for one in trace.replays[cell].verified)
    for cell, one in verified:
        if one.expected is None or not one.matches:
            continue
        expected = one.expected
        where, before = first.setdefault((expected.sha256, expected.shape), (cell, one))
        if before.fallback_rows != one.fallback_rows:
            say.fail(
                "verify.contradiction",
                f"{cell.told} ({one.origin.file}, line {one.origin.line}): {one.fallback_rows} "
                f"fallback rows, and {before.fallback_rows} of equal routes on {where.told}",
                **cell.where,
            )


def check_expected(
    cell: Cell, replays: Replays, number: int, one: Verification, say: RouteFindings
) -> None:
    """What the k-th forward expected was installed by the k-th action; by any if they are not 1:1.

    That what an action installs was assigned is another rule.
    """
    if one.expected is None:
        return
    if are_paired(replays):
        installed = replays.forward[number].routes
        known = {replays.assigned[number].routes.sha256}
        known |= {installed.sha256} if installed else set()
    else:
        known = _known(replays)
    if one.expected.sha256 not in known:
        say.fail(
            "verify.expected",
            f"{cell.told}: forward {number + 1} was verified against other routes than were "
            f"installed ({one.origin.file}, line {one.origin.line})",
            **cell.where,
            microbatch=number + 1,
        )


def check_expected_backward(
    cell: Cell, replays: Replays, one: Verification, say: RouteFindings
) -> None:
    """What a backward expected was installed, or is what a forward used where rows had no route."""
    if one.expected is None or one.expected.sha256 in _known(replays) | used_instead(replays):
        return
    place = f"{cell.told} ({one.origin.file}, line {one.origin.line})"
    if not replays.verified and any(may_fall_back(other.routes) for other in replays.assigned):
        say.unverified(
            "verify.expected",
            f"{place}: which routes forwards used, and a backward repeats, is not known",
            **cell.where,
        )
    else:
        say.fail(
            "verify.expected",
            f"{place}: a backward was verified against routes that nobody installed",
            **cell.where,
        )


def are_paired(replays: Replays) -> bool:
    """Whether the k-th assignment, forward and verification are of one micro-batch."""
    return len(replays.verified) == len(replays.forward) == len(replays.assigned)


def _known(replays: Replays) -> set[str]:
    """Hashes of all that was assigned, or installed forward."""
    installed = {one.routes.sha256 for one in replays.forward if one.routes}
    return installed | {one.routes.sha256 for one in replays.assigned}


def used_instead(replays: Replays) -> set[str]:
    """Hashes of what forwards used in which the trainer's own router chose some rows."""
    return {one.actual.sha256 for one in replays.verified if one.fallback_rows}


def may_fall_back(routes: TensorRecord) -> bool:
    """Whether some row may have no route."""
    return not routes.is_whole or -1 in routes.preview
