"""Whether the records of a folder are those of one attempt under one contract."""

from __future__ import annotations

import datetime
from collections import defaultdict
from collections.abc import Collection, Hashable

from trajreplay.query.routes.findings import RouteFindings
from trajreplay.query.routes.policy import RoutePolicy
from trajreplay.query.routes.trace import FETCH_STAGES
from trajreplay.schema.bundles.r3.folder import TraceFolder
from trajreplay.schema.bundles.r3.records import (
    BACKWARD,
    FORWARD,
    Action,
    PayloadSample,
    Shard,
    TraceRecord,
    Verification,
)

_PROCESSES = 3  # that a message names


def check_readable(folder: TraceFolder, policy: RoutePolicy, say: RouteFindings) -> bool:
    """Check that every line is a record and that there are some; false ends the check."""
    for problem in folder.problems:
        rule = "trace.record" if problem.is_json else "trace.json"
        where = f"{problem.file}, line {problem.line}: {problem.message}"
        say.fail(rule, where, file=problem.file, line=problem.line)
    for record in folder.records:
        if isinstance(record, Action | Verification) and (
            record.action not in (FORWARD, BACKWARD) or record.layer is None
        ):
            say.fail(
                "trace.record",
                f"{_place(record)}: action {record.action!r} of layer {record.layer}, expected "
                f"{FORWARD} or {BACKWARD} of a numbered layer",
                file=record.origin.file,
                line=record.origin.line,
            )
        if not isinstance(record, PayloadSample) and record.origin.rank is None:
            say.fail(
                "trace.record",
                f"{_place(record)}: no rank: it was replayed outside of a job",
                file=record.origin.file,
                line=record.origin.line,
            )
    if not folder.records and not folder.problems:
        say.fail(
            "trace.empty", f"no records in {len(folder.files)} files{_foreign(folder, policy)}"
        )
    return not say.has_failed("trace.json", "trace.record", "trace.empty")


def _foreign(folder: TraceFolder, policy: RoutePolicy) -> str:
    """Of when and of which processes those are that were left out, beside those asked for."""
    others = folder.others
    if not folder.files:
        return "; traces are the *.jsonl of the folder that NRL_R3_TRACE_DIR of a job names"
    if not others.records:
        return ""
    told = f"; all {others.records} are of others"
    outside = []
    if policy.since is not None and others.first < policy.since:
        outside.append(f"from {moment(policy.since)} on")
    if policy.until is not None and others.last > policy.until:
        outside.append(f"until {moment(policy.until)}")
    if outside:
        when = f"{moment(others.first)} to {moment(others.last)}"
        told += f": from {when}, and those that count are {' '.join(outside)}"
    if policy.processes:
        there, wanted = _some(others.processes), _some(policy.processes)
        told += f": of {there}, and those that count are of {wanted}"
    return f"{told}. Name the folder that the attempt wrote, NRL_R3_TRACE_DIR of its job"


def _some(processes: Collection[str]) -> str:
    more = f" and {len(processes) - _PROCESSES} more" if len(processes) > _PROCESSES else ""
    return ", ".join(list(processes)[:_PROCESSES]) + more


def moment(seconds: float) -> str:
    """A time of a trace as a person reads it.

    >>> moment(1795980002.0007)
    '2026-11-29 19:20:02.000 UTC'
    """
    try:
        found = datetime.datetime.fromtimestamp(seconds, datetime.UTC)
    except (ValueError, OverflowError, OSError):  # no year that a calendar has
        return f"second {seconds:g}"
    return f"{found.replace(tzinfo=None).isoformat(' ', 'milliseconds')} UTC"


def check_one_attempt(records: list[TraceRecord], say: RouteFindings) -> bool:
    """Check that no two attempts are mixed; false ends the check."""
    processes: dict[int, dict[str, None]] = defaultdict(dict)
    sizes: set[int] = set()
    for record in records:
        if record.origin.rank is not None:
            processes[record.origin.rank][record.origin.process] = None
        if record.origin.world_size is not None:
            sizes.add(record.origin.world_size)
    told = "; name the attempt's processes, or its times, to check one of them"
    for rank, found in sorted(processes.items()):
        if len(found) > 1:
            say.fail(
                "trace.one_attempt",
                f"rank {rank} has {len(found)} processes, {', '.join(found)}{told}",
                rank=rank,
            )
    if len(sizes) > 1:
        sizes_found = ", ".join(str(one) for one in sorted(sizes))
        say.fail("trace.one_attempt", f"records are of jobs of {sizes_found} ranks{told}")
    _check_counters(records, say, told)
    return not say.has_failed("trace.one_attempt")


def _check_counters(records: list[TraceRecord], say: RouteFindings, told: str) -> None:
    """A process counts its stages, fetches and micro-batches upward and never twice."""
    seen: dict[Hashable, str] = {}
    last: dict[Hashable, int] = {}
    said: set[str] = set()
    for record in records:
        process, step = record.origin.process, record.trace_step
        counter, count, key = _counted(record)
        before = last.get((process, counter), 0)
        last[process, counter] = max(step, before)
        again = False
        if count is not None:
            place = (process, counter, step, count)
            # A key that is put again is no new start: producer.duplicate judges it.
            again = place in seen and (not key or seen[place] != key)
            seen[place] = key
        if (step < before or again) and process not in said:
            said.add(process)
            say.fail(
                "trace.one_attempt",
                f"{_place(record)}: {counter} starts again at step {step} in process "
                f"{process}{told}",
                file=record.origin.file,
                line=record.origin.line,
                rank=record.origin.rank,
            )


def _counted(record: TraceRecord) -> tuple[str, int | None, str]:
    """The counter that a record shows, the place inside a step, and the key that is there."""
    if isinstance(record, PayloadSample):
        if record.stage is None:
            return "the counter of producers", record.sample_idx, record.key
        return f"the counter of {record.stage} fetches", record.sample_idx, ""
    counter = f"the counter of stage {record.stage}"
    return counter, record.microbatch if isinstance(record, Shard) else None, ""


def check_contract(
    records: list[TraceRecord], policy: RoutePolicy, say: RouteFindings
) -> list[TraceRecord]:
    """Refuse what the contract and the stages have no place for; return the other records."""
    kept: list[TraceRecord] = []
    strangers: dict[tuple[str, str], list[TraceRecord]] = defaultdict(list)
    for record in records:
        if isinstance(record, PayloadSample):
            if policy.contract == "legacy-async":
                event = "fetch" if record.stage else "producer"
                strangers["contract.mixed", event].append(record)
            else:
                kept.append(record)
        elif record.stage in policy.stages:
            kept.append(record)
        else:
            strangers["stage.forbidden", record.stage].append(record)
    for (rule, what), found in strangers.items():
        first = found[0]
        reason = (
            f"{len(found)} {what} records, expected none under legacy-async"
            if rule == "contract.mixed"
            else f"{len(found)} records of stage {what!r}, expected {', '.join(policy.stages)} only"
        )
        say.fail(
            rule,
            f"{_place(first)}: {reason}",
            file=first.origin.file,
            line=first.origin.line,
            stage=what if rule == "stage.forbidden" else None,
        )
    others = {one.stage for one in kept if isinstance(one, PayloadSample)} - {None, *FETCH_STAGES}
    for stage in sorted(one for one in others if one):
        say.remark("fetch.coverage", f"fetches of stage {stage!r} count for no stage", stage=stage)
    return kept


def _place(record: TraceRecord) -> str:
    return f"{record.origin.file}, line {record.origin.line}"
