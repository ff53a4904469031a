"""What a gate says of route traces: whose they are, of which steps, and what is missing."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.gates import HEALTHY, RUN, TRACES, beat, end, reserve, trace_times
from tests.helpers.r3_traces import Layout, make_trace
from trajreplay import Lake, QueryError
from trajreplay.cli.verbs.gate import verdict_lines
from trajreplay.query.routes import RoutePolicy
from trajreplay.schema.events import HEARTBEAT, dump_detail
from trajreplay.schema.identity import ResumePoint, make_key
from trajreplay.schema.lakefile import open_lake
from trajreplay.stages.gate import CheckVerdict, GateVerdict, Policy, load_gate_policy
from trajreplay.stages.gate.checks import CHECKS_BY_NAME
from trajreplay.writer import Event, commit_events

UNTIED = (
    "time alone says whose traces they are: its captures name no process of theirs, nor samples "
    "whose lengths they show"
)


def gated(lake: Lake, *attempts: int, **stated: Any) -> GateVerdict:
    given = {"traces": str(TRACES), "contract": "legacy-async", **stated}
    kept = {name: one for name, one in given.items() if one is not None}
    policy = Policy(checks={"routes": kept})
    return Lake.open(lake.path).gate(policy, RUN, attempts or (0,), command_exit=0)


def checked(lake: Lake, *attempts: int, **stated: Any) -> CheckVerdict:
    (check,) = gated(lake, *attempts, **stated).checks
    return check


def trained(lake: Lake, steps: int) -> None:
    reserve(lake, 0)
    for number in range(1, steps + 1):
        beat(lake, 0, number, HEALTHY)
    end(lake, 0)


def test_the_steps_that_were_traced_are_named_and_the_others_too(lake: Lake) -> None:
    trained(lake, 4)
    check = checked(lake)
    assert (check.verdict, check.value["0"]["traced"]) == (
        "pass",
        {"prev-logprob": ["0:0"], "train": ["0:0"]},
    )
    assert check.reason == (
        "says nothing of step 1:0, 2:0, 3:0 of attempt 0, not traced; attempt 0: "
        f"{UNTIED}; no choices of experts are captured"
    )
    (line, *_) = verdict_lines(gated(lake))
    assert line == (
        "[      pass] routes: attempt 0: 92 records, prev-logprob of step 0:0, train of step 0:0 "
        "(valid under legacy-async; says nothing of step 1:0, 2:0, 3:0 of attempt 0, not traced; "
        f"attempt 0: {UNTIED}; no choices of experts are captured)"
    )


@pytest.mark.parametrize(
    ("wanted", "missed"),
    [
        (1, ""),
        (2, "of prev-logprob 1 steps are traced, expected 2 or more"),
        (["0:0"], ""),
        (["0:0", "2:0"], "of prev-logprob step 2:0 is not traced"),
        ("all", "of prev-logprob step 1:0, 2:0, 3:0 is not traced"),
    ],
)
def test_a_policy_says_which_steps_are_traced(lake: Lake, wanted: Any, missed: str) -> None:
    trained(lake, 4)
    check = checked(lake, traced_steps=wanted)
    assert check.verdict == ("fail" if missed else "pass")
    if missed:
        assert check.reason.startswith(missed)
        assert "NRL_R3_TRACE_STEPS" in check.reason


@pytest.mark.parametrize("steps", [1, 3])
def test_every_step_that_is_traced_is_said_to_be(lake: Lake, tmp_path: Path, steps: int) -> None:
    trained(lake, steps)
    traces = make_trace(Layout(steps=steps, queue=False)).write(tmp_path / "trace")
    check = checked(lake, traces=str(traces), traced_steps="all")
    assert (check.verdict, check.value["0"]["untraced"]) == ("pass", [])
    assert check.reason == f"attempt 0: {UNTIED}; no choices of experts are captured"


@pytest.mark.parametrize("wanted", [0, True, [], ["0"], ["a:b"], [1], "some", 1.5])
def test_steps_that_no_policy_can_want_are_refused(wanted: Any) -> None:
    policy = load_gate_policy("router-replay")
    with pytest.raises(QueryError, match=r"traced_steps is .* expected a whole number from 1 on"):
        policy.with_parameters("routes", traced_steps=wanted)


def test_traces_of_another_time_are_said_to_be_of_when(lake: Lake) -> None:
    first, last = trace_times()
    reserve(lake, 0, started_s=last + 3600)
    beat(lake, 0, 1, HEALTHY)
    check = checked(lake)
    assert check.verdict == "fail"
    assert check.reason == (
        "attempt 0: trace.empty: no records in 2 files; all 92 are of others: from "
        "2026-11-29 19:20:02.000 UTC to 2026-11-29 19:20:02.032 UTC, and those that count are from "
        "2026-11-29 20:20:02.032 UTC on. Name the folder that the attempt wrote, NRL_R3_TRACE_DIR "
        "of its job"
    )
    there = checked(lake, processes=["a:1"], since=first)
    assert "41001, nid001000" in there.reason
    assert "and those that count are of a:1" in there.reason


@pytest.mark.parametrize(
    ("stated", "named"),
    [
        ({"since": "later"}, "checks.routes.since"),
        ({"until": 5.0}, "checks.routes.until"),
        ({"processes": ["a:1"]}, "checks.routes.processes"),
    ],
)
def test_an_attempt_whose_traces_a_policy_leaves_out_did_not_leave_none(
    lake: Lake, tmp_path: Path, stated: dict[str, Any], named: str
) -> None:
    """Each attempt of the chain traced its first step into one folder."""
    first, last = trace_times()
    reserve(lake, 0, started_s=first - 50)
    reserve(lake, 1, ResumePoint(0, 4), started_s=last + 50)
    for number in range(1, 9):
        beat(lake, 0 if number < 5 else 1, number, HEALTHY)
    folder = tmp_path / "traces"
    folder.mkdir()
    for file in TRACES.glob("*.jsonl"):
        text = file.read_text()
        (folder / file.name).write_text(text)
        later = text.replace('"time": 1795980002', '"time": 1795980099').replace("41001", "51001")
        (folder / f"later-{file.name}").write_text(later.replace("41002", "51002"))
    given = {"traces": str(folder)}
    assert checked(lake, 0, 1, **given).verdict == "pass"
    if "since" in stated:
        stated = {"since": last + 60}
    check = checked(lake, 0, 1, **given, **stated)
    assert check.verdict == "fail"
    assert check.reason.startswith(f"attempt 0: {named} leaves out all of its 92 records")


def test_a_contract_that_is_missing_is_one_of_those_that_are_named(lake: Lake) -> None:
    trained(lake, 1)
    check = checked(lake, contract=None)
    assert check.verdict == "fail"
    assert check.reason == (
        "no contract is stated: legacy-async or transfer-queue, as checks.routes.contract, or "
        "--contract"
    )


def of_two_steps(lake: Lake, attempt: int, rollouts: range, number: int) -> None:
    """Heartbeats of rollouts that two optimizer steps consumed."""
    for rollout in rollouts:
        for step_id in range(2):
            key = make_key(RUN, attempt, "events", rollout, step_id, 0)
            detail = dump_detail(HEARTBEAT, {"step": number, **HEALTHY})
            commit_events(open_lake(lake.path), key, [Event(HEARTBEAT, detail)])
            number += 1


def test_train_is_entered_once_a_step_and_prev_logprob_once_a_rollout(
    lake: Lake, tmp_path: Path
) -> None:
    """Two rollouts of two steps each; both stages are traced up to their second pass."""
    reserve(lake, 0)
    of_two_steps(lake, 0, range(2), 1)
    traces = str(make_trace(Layout(steps=2, queue=False)).write(tmp_path / "trace"))
    check = checked(lake, traces=traces)
    assert check.value["0"]["traced"] == {
        "prev-logprob": ["0:0", "0:1", "1:0", "1:1"],
        "train": ["0:0", "0:1"],
    }
    assert check.value["0"]["untraced"] == ["1:0", "1:1"]
    assert checked(lake, traces=traces, traced_steps=2).verdict == "pass"
    for wanted in (3, "all", ["1:0"]):
        check = checked(lake, traces=traces, traced_steps=wanted)
        assert (check.verdict, check.reason.startswith("of train ")) == ("fail", True)


def test_passes_of_steps_that_a_later_attempt_replaced_count_for_none(
    lake: Lake, tmp_path: Path
) -> None:
    """Attempt 0 traced three steps, of which the first alone stands; attempt 1 traced one."""
    reserve(lake, 0, started_s=500.0)
    reserve(lake, 1, ResumePoint(0, 1), started_s=5000.0)
    for number in range(1, 4):
        beat(lake, 0, number, HEALTHY)
    for number in range(2, 5):
        beat(lake, 1, number, HEALTHY)
    folder = make_trace(Layout(steps=3, queue=False)).write(tmp_path / "trace")
    later = make_trace(Layout(queue=False), seed=1)
    for records in later.files.values():
        for one in records:
            one["time"] += 4000.0
            one["pid"] += 500
    for name, records in later.files.items():
        (folder / f"later_{name}").write_text("".join(json.dumps(one) + "\n" for one in records))
    check = checked(lake, 0, 1, traces=str(folder), traced_steps=2)
    assert check.verdict == "pass", check.reason
    assert check.value["0"]["traced"]["train"] == ["0:0"]
    check = checked(lake, 0, 1, traces=str(folder), traced_steps=3)
    assert check.reason.startswith("of prev-logprob 2 steps are traced, expected 3 or more")


def test_a_policy_states_all_that_is_stated_of_routes(lake: Lake) -> None:
    """Also events of other emitters, which are left out where they are named."""
    parameters = {one.name for one in CHECKS_BY_NAME["routes"].parameters}
    assert parameters == {one.name for one in fields(RoutePolicy)} | {"traces", "traced_steps"}
    trained(lake, 1)
    assert checked(lake, ignore=["router_replay_graph_consumer"]).verdict == "pass"
