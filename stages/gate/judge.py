"""Hold a run against a policy: every check is made, and what is missing fails."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import pairwise

from trajreplay.query import Catalog
from trajreplay.schema.canonical import MAX_BYTES
from trajreplay.schema.errors import QueryError, TrajReplayError
from trajreplay.schema.layout import attempt_path, entry_path
from trajreplay.stages.gate.checks import CHECKS, judged, sources
from trajreplay.stages.gate.evidence import Evidence
from trajreplay.stages.gate.gathering import gather
from trajreplay.stages.gate.of_run import unasked
from trajreplay.stages.gate.of_sql import judged_sql
from trajreplay.stages.gate.policy import Policy, checked
from trajreplay.stages.gate.verdict import CheckVerdict, GateVerdict, in_order


def gate(
    catalog: Catalog,
    policy: Policy,
    run_id: str,
    attempts: Sequence[int],
    *,
    command_exit: int | None = None,
    command_signal: int | None = None,
) -> GateVerdict:
    """Hold the attempts that are named, and nothing else, against a policy.

    A run, attempt or value that is not there is no error: its checks fail.

    Args:
        catalog: The lake.
        policy: The checks and their bounds.
        run_id: The run.
        attempts: One attempt, or a chain in its order.
        command_exit: Exit code of the command that ran the last attempt, where it is known.
        command_signal: The signal that killed it.

    Raises:
        QueryError: No attempt is named, or one twice or out of order, or the policy is malformed.
    """
    policy = checked(policy, "the policy")
    named = list(attempts)
    if not named or any(later <= earlier for earlier, later in pairwise(named)):
        raise QueryError(
            f"the attempts are {named}, expected one, or a chain in rising order such as 0,1"
        )
    found = gather(
        catalog,
        run_id,
        named,
        command_exit=command_exit,
        command_signal=command_signal,
        reads=sources(policy),
    )
    wanted = {*policy.checks, *unasked(found, policy)}
    made = [
        CheckVerdict.of(check.name, check.phase, judged(check, found, policy), check.unit)
        for check in CHECKS
        if check.name in wanted
    ]
    made += [
        CheckVerdict.of(f"sql:{one.name}", "sql", judged_sql(one, found)) for one in policy.sql
    ]
    return GateVerdict(
        run_id=run_id,
        attempts=tuple(named),
        run=policy.run,
        checks=in_order(made),
        policy=policy.to_json(),
        policy_digest=policy.digest,
        lake=str(catalog.store),
        lake_digest=lake_digest(found),
        steps=tuple(found.each_name(sorted(found.steps))),
        not_captured=tuple(found.each_name(found.not_captured)),
        command_exit=command_exit,
        command_signal=command_signal,
    )


def lake_digest(found: Evidence) -> str:
    """Digest of the names and bytes of all entries and records of the attempts."""
    state = hashlib.sha256()
    store = found.catalog.store
    paths = [attempt_path(found.run_id, one) for one in found.attempts]
    paths += [entry_path(key) for key in found.captures()]
    for path in sorted(paths):
        try:
            data = store.read(path, MAX_BYTES) if store.exists(path) else b""
        except TrajReplayError:
            data = b""  # unreadable: what it should have said fails a check
        state.update(f"{path}\n{len(data)}\n".encode())
        state.update(data)
    return "sha256:" + state.hexdigest()
