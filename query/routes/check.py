"""The check of a trace folder: every rule in order, from what the files are to what routers did."""

from __future__ import annotations

import os

from trajreplay.query.routes.amounts import check_amounts
from trajreplay.query.routes.assigned import check_assigned
from trajreplay.query.routes.attempts import check_contract, check_one_attempt, check_readable
from trajreplay.query.routes.beyond import check_beyond
from trajreplay.query.routes.coverage import check_coverage
from trajreplay.query.routes.dtypes import check_dtypes
from trajreplay.query.routes.dummies import check_dummies
from trajreplay.query.routes.fetched import shares_of
from trajreplay.query.routes.findings import RouteFindings, RouteReport, in_order
from trajreplay.query.routes.installed import check_installed
from trajreplay.query.routes.policy import RoutePolicy
from trajreplay.query.routes.repeated import check_repeated
from trajreplay.query.routes.replays import check_replays
from trajreplay.query.routes.shards import check_shards
from trajreplay.query.routes.shown import check_shown
from trajreplay.query.routes.stages import check_stage_routes
from trajreplay.query.routes.topology import topology_of
from trajreplay.query.routes.trace import Trace
from trajreplay.query.routes.transport import check_transport
from trajreplay.query.routes.values import check_values
from trajreplay.query.routes.whose import AttemptFacts, check_whose
from trajreplay.schema.bundles.r3 import read_trace_folder


def check_routes(
    folder: str | os.PathLike[str], policy: RoutePolicy, facts: AttemptFacts | None = None
) -> RouteReport:
    """Check the router-replay traces of a folder under a stated transport contract.

    Args:
        folder: Holds the `*.jsonl` files of all processes of one attempt.
        policy: The contract, and what else the run states.
        facts: What is known of the attempt beside its traces, whose they then have to be.

    Returns:
        The report; `report.verdict` is `pass` or `fail`.

    Raises:
        DatasetError: It is no folder, holds links, or more than can be read.

    Source:
        NVIDIA NeMo-RL, `tools/check_r3_trace.py`, whose rules are the first of these.
    """
    read = read_trace_folder(folder, keep=policy.keeps, ignore=policy.ignore)
    say = RouteFindings()
    fallback = (0, 0)
    trace = Trace([])
    readable = check_readable(read, policy, say) and check_one_attempt(read.records, say)
    if readable:
        trace = Trace(check_contract(read.records, policy, say))
        topology = topology_of(trace)
        if policy.contract == "transfer-queue":
            check_transport(trace, policy, say)
        check_coverage(trace, topology, policy, say)
        fallback = check_replays(trace, policy, say)
        check_dtypes(trace, say)
        shares = shares_of(trace, topology)
        held = check_shards(trace, topology, shares, policy, say)
        put, matched = check_installed(trace, topology, held, shares, policy, say)
        if policy.contract == "transfer-queue":
            check_amounts(trace, topology, shares, held, matched, policy, say)
        else:
            check_repeated(trace, topology, policy, say)
        check_stage_routes(trace, policy, put, say)
        check_beyond(trace, policy, say)
        check_assigned(trace, topology, policy, say)
        check_values(trace, policy, fallback, say)
        check_dummies(trace, topology, held, policy, say)
        check_shown(trace, say)
        if facts is not None:
            check_whose(trace, held, facts, say)
    return RouteReport(
        path=os.fspath(folder),
        policy=policy,
        findings=in_order(say.found),
        steps=trace.steps,
        ranks=trace.world,
        layers=trace.layers,
        records=len(read.records),
        left_out=read.left_out,
        fallback_rows=fallback[0],
        verified_rows=fallback[1],
        stopped=not readable,
        of_attempt=facts is not None,
    )


def count_records(folder: str | os.PathLike[str], policy: RoutePolicy) -> int:
    """How many records of a folder are of the processes and times that a policy states.

    Args:
        folder: As of `check_routes`; lines that are no records count where those around them do.
        policy: What is asked for.

    Raises:
        DatasetError: As of `check_routes`.
    """
    read = read_trace_folder(folder, keep=policy.keeps, ignore=policy.ignore)
    return len(read.records) + len(read.problems)
