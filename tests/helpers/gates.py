"""Runs as a gate finds them: heartbeats, clean ends and attempts, written to a lake."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trajreplay import Lake
from trajreplay.schema.attempt import AttemptRecord, dump_attempt
from trajreplay.schema.events import ENDED_CLEAN, HEARTBEAT, TERMINAL, dump_detail
from trajreplay.schema.identity import ResumePoint, make_key
from trajreplay.schema.lakefile import open_lake
from trajreplay.schema.layout import attempt_path
from trajreplay.writer import Event, commit_events

CASES = Path(__file__).parents[1] / "cases"
RUN = "r"
TRACES = CASES / "r3_traces" / "la_healthy"
# Of a healthy step; tests change one value.
HEALTHY = {
    "reward_std": 0.32,
    "advantage_abs_max": 1.7,
    "loss": -0.013,
    "truncation_rate": 0.62,
    "valid_tokens": 129171,
    "over_0_5": 0,
    "over_1_0": 0,
    "abs_delta_max": 0.41,
    "generation_kl": 0.0003876,
}


def reserve(
    lake: Lake, attempt: int, resumed: ResumePoint | None = None, *, started_s: float = 1e-6
) -> None:
    """Record an attempt; where nothing is said it began long ago, before any trace of the cases."""
    record = AttemptRecord(RUN, attempt, int(started_s * 1e6), resumed, "", "")
    store = open_lake(lake.path)
    assert store.publish_if_absent(attempt_path(RUN, attempt), dump_attempt(record))


def trace_times() -> tuple[float, float]:
    """The first and last second of TRACES."""
    times = [
        json.loads(line)["time"]
        for file in TRACES.glob("*.jsonl")
        for line in file.read_text().splitlines()
    ]
    return min(times), max(times)


def beat(lake: Lake, attempt: int, step: int, values: Mapping[str, Any], rank: int = 0) -> None:
    """Write the heartbeat of a step, one step a rollout."""
    key = make_key(RUN, attempt, "events", step - 1, 0, rank)
    detail = dump_detail(HEARTBEAT, {"step": step, **values})
    commit_events(open_lake(lake.path), key, [Event(HEARTBEAT, detail)])


def end(lake: Lake, attempt: int, status: str = ENDED_CLEAN, rank: int = 0) -> None:
    """Write that an attempt ended."""
    key = make_key(RUN, attempt, "events", None, None, rank)
    detail = dump_detail(TERMINAL, {"status": status})
    commit_events(open_lake(lake.path), key, [Event(TERMINAL, detail)])


def healthy_run(
    lake: Lake, steps: int = 10, *, attempt: int = 0, first: int = 1, **changed: Sequence[Any]
) -> None:
    """An attempt with a clean end; `changed` has values by step for some of the fields."""
    reserve(lake, attempt, ResumePoint(attempt - 1, first - 1) if attempt else None)
    for number in range(steps):
        values = HEALTHY | {name: given[number] for name, given in changed.items()}
        told = {name: one for name, one in values.items() if one is not None}
        beat(lake, attempt, first + number, told)
    end(lake, attempt)


def gate_cases() -> list[dict[str, Any]]:
    """The cases, each a run with its verdict."""
    cases: list[dict[str, Any]] = json.loads((CASES / "gate_cases.json").read_text())["cases"]
    return cases


def written(lake: Lake, case: Mapping[str, Any]) -> tuple[int, ...]:
    """Write the run of a case; returns the attempts that its gate names.

    Jobs become attempts in order of their numbers; steps of no attempt are those of another one.
    """
    chain = case.get("chain") or [case["attempt"]]
    jobs = sorted({*chain, *(str(one.get("attempt")) for one in case["steps"])}, key=_job)
    number = {job: place for place, job in enumerate(jobs)}
    first: dict[str, int] = {}
    for one in case["steps"]:
        first.setdefault(str(one.get("attempt")), one["step"])
    for job in jobs:
        resumed = None
        if job in chain[1:]:
            before = chain[chain.index(job) - 1]
            resumed = ResumePoint(number[before], first.get(job, 1) - 1)
        reserve(lake, number[job], resumed)
    write_events(lake, case, number)
    return tuple(number[job] for job in chain)


def write_events(lake: Lake, case: Mapping[str, Any], number: Mapping[str, int]) -> None:
    """Write the heartbeats and the end of a case, whose jobs are attempts of these numbers."""
    words = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}
    for one in case["steps"]:
        values = {
            name: words.get(value, value) if isinstance(value, str) else value
            for name, value in one.items()
            if name not in ("step", "attempt")
        }
        beat(lake, number[str(one.get("attempt"))], one["step"], values)
    if case["terminal"] is not None:
        end(lake, number[case["terminal"]["attempt"]], case["terminal"]["status"])


def _job(name: str) -> tuple[bool, str]:
    return name.isdigit(), name  # steps without an attempt come first
