"""What heartbeats alone tell of is said, and nothing passes by comparing nothing."""

from dataclasses import replace
from typing import Any

import pytest

from tests.helpers.gates import (
    HEALTHY,
    RUN,
    TRACES,
    beat,
    end,
    healthy_run,
    reserve,
    trace_times,
)
from tests.helpers.mismatches import write_pair
from tests.helpers.recorded import enabled, record_rollout, record_step
from tests.helpers.scenes import WAY
from trajreplay import Lake
from trajreplay.capture.switching.selection import Selection
from trajreplay.cli.verbs.gate import verdict_lines
from trajreplay.schema import ProducerInfo
from trajreplay.schema.errors import QueryError
from trajreplay.schema.events import ENDED_CLEAN, HEARTBEAT, TERMINAL, dump_detail
from trajreplay.schema.identity import ResumePoint, make_key
from trajreplay.schema.lakefile import open_lake
from trajreplay.stages.gate import GateVerdict, Policy, SqlCheck, load_gate_policy
from trajreplay.writer import Event, commit_events

SAMPLED = [[-1.0, -2.0, -0.5], [-0.25, -3.0]]


def gated(lake: Lake, policy: Policy | str, *attempts: int) -> GateVerdict:
    return Lake.open(lake.path).gate(policy, RUN, attempts or (0,), command_exit=0)


def reasons(verdict: GateVerdict) -> dict[str, str]:
    return {one.check: one.reason for one in verdict.checks if one.verdict == "fail"}


def training(lake: Lake, rollouts: int, **changes: Any) -> None:
    """A training of two steps a rollout, of which some may be captured by choice."""
    recorder = enabled(lake, **changes)
    for rollout_id in range(rollouts):
        samples = record_rollout(recorder, rollout_id)
        for step_id in range(2):
            record_step(recorder, samples[4 * step_id : 4 * step_id + 4], rollout_id, step_id)
    recorder.close()


def step(lake: Lake, rollout: int, attempt: int = 0, delta: float = 0.001, **more: Any) -> None:
    trained = [[one + delta for one in row] for row in SAMPLED]
    write_pair(lake, trained, SAMPLED, run_id=RUN, rollout_id=rollout, attempt=attempt, **more)


def test_a_step_that_was_told_and_not_captured_is_counted_in_the_verdict(lake: Lake) -> None:
    for rollout in range(5):
        beat(lake, 0, rollout + 1, HEALTHY)
        if rollout != 3:
            step(lake, rollout)
    verdict = gated(lake, Policy(checks={"attempt": {}, "captures": {}}))
    told = verdict.to_json()["steps"]
    assert told == {"recorded": 5, "captured": 4, "not_captured": ["3:0"]}
    assert reasons(verdict) == {
        "captures": "captured 4 of 5 steps, not step 3:0; chosen = true allows what was left out "
        "by choice"
    }
    chosen = gated(lake, Policy(checks={"captures": {"chosen": True}}))
    assert (chosen.verdict, chosen.not_captured) == ("pass", ("3:0",))


@pytest.mark.parametrize("part", ["dropped", "incomplete"])
def test_a_step_that_was_captured_in_part_is_none_that_was(lake: Lake, part: str) -> None:
    for rollout in range(2):
        beat(lake, 0, rollout + 1, HEALTHY)
        whole = part == "dropped" or not rollout
        step(lake, rollout, expected_ranks=[0] if whole else [0, 1])
    if part == "dropped":
        key = {"run_id": RUN, "rollout_id": 2, "step_id": 0, "rank": 0, "expected_ranks": [0]}
        beat(lake, 0, 3, HEALTHY)
        with lake.capture(**key, settings=WAY.short) as capture:  # type: ignore[arg-type]
            capture.drop("queue full")
    verdict = gated(lake, Policy(checks={"captures": {"chosen": True}}))
    assert verdict.not_captured == (("2:0",) if part == "dropped" else ("1:0",))
    assert verdict.verdict == "fail"


def test_a_training_that_captures_some_steps_by_choice_is_clean_where_it_says_so(
    lake: Lake,
) -> None:
    training(lake, 2)
    whole = gated(lake, "replay-clean")
    assert (whole.verdict, whole.captured, whole.not_captured) == ("pass", 4, ())
    other = Lake.create(f"{lake.path}-chosen")
    training(other, 2, selection=Selection(steps="0:0,1:1"))
    verdict = gated(other, "replay-clean")
    assert set(reasons(verdict)) == {"captures"}
    assert verdict.not_captured == ("0:1", "1:0")
    policy = load_gate_policy("replay-clean").with_parameters("captures", chosen=True)
    assert gated(other, policy).certifies


def statement(query: str, **bounds: float) -> Policy:
    return Policy(sql=(SqlCheck("one", query, bounds or {"at_most": 0}),))


@pytest.mark.parametrize("table", ["steps", "rollouts", "samples", "outputs", "routes"])
def test_a_statement_over_a_table_of_which_nothing_was_recorded_bounds_nothing(
    lake: Lake, table: str
) -> None:
    healthy_run(lake)
    policy = statement(f"SELECT count(*) FROM {table} WHERE run_id = 'nobody'")
    found = reasons(gated(lake, policy))
    assert found == {"sql:one": f"it reads {table}, of which attempt 0 recorded no row"}
    assert gated(lake, statement("SELECT count(*) FROM events", at_least=1)).verdict == "pass"


@pytest.mark.parametrize("query", ["SELECT 0", "SELECT count(*) FROM range(3) WHERE range > 5"])
def test_a_statement_that_reads_no_table_bounds_nothing(lake: Lake, query: str) -> None:
    healthy_run(lake)
    assert reasons(gated(lake, statement(query))) == {"sql:one": "it reads no table of the lake"}


@pytest.mark.parametrize("check", ["sql", "replay"])
def test_each_attempt_of_a_chain_has_something_that_is_compared(lake: Lake, check: str) -> None:
    policy = Policy(checks={"replay": {}}) if check == "replay" else statement(_ODD)
    name = "replay" if check == "replay" else "sql:one"
    training(lake, 1)
    assert gated(lake, policy).verdict == "pass"
    other = Lake.create(f"{lake.path}-chain")
    reserve(other, 0)
    beat(other, 0, 1, HEALTHY)
    recorder = enabled(other, resume_rollout_id=1)
    record_step(recorder, record_rollout(recorder, 1), 1)
    recorder.close()
    verdict = gated(other, policy, 0, 1)
    assert "attempt 0" in reasons(verdict)[name]


_ODD = "SELECT count(*) FROM steps WHERE response_length < 0"


def test_steps_are_named_as_the_command_line_takes_them(lake: Lake) -> None:
    """Two a rollout; one that no heartbeat and no capture places is told by its number."""
    reserve(lake, 0)
    for number in range(1, 5):
        place = (number - 1) // 2, (number - 1) % 2
        values = dict(HEALTHY, loss=None if number == 3 else 1.0)
        if number > 1:
            values |= {"abs_delta_max": 2.0, "over_0_5": 1, "over_1_0": 1}
        kept = {name: one for name, one in values.items() if one is not None}
        detail = dump_detail(HEARTBEAT, {"step": number, **kept})
        key = make_key(RUN, 0, "events", *place, 0)
        commit_events(open_lake(lake.path), key, [Event(HEARTBEAT, detail)])
    policy = Policy(checks={"complete": {}, "delta_tail": {}}, max_steps=6)
    found = reasons(gated(lake, policy))
    assert found["complete"].startswith("step 1:0 and number 5, 6 has no loss: record scalars=")
    assert found["delta_tail"] == "step 0:1 has one"


@pytest.mark.parametrize("captured", [False, True])
def test_a_value_that_is_missing_says_how_it_is_recorded(lake: Lake, captured: bool) -> None:
    if captured:
        step(lake, 0)
    else:
        healthy_run(lake, 1, truncation_rate=[None], reward_std=[None], abs_delta_max=[None])
    found = reasons(gated(lake, load_gate_policy("router-replay", max_steps=1)))
    assert found["truncation"] == (
        "truncation_rate was not recorded of step 0:0: record truncated=True or False in every "
        "SampleRecord, or end_step(truncation_rate=...)"
    )
    missed = "advantage_abs_max" if captured else "reward_std"
    assert f"{missed} was not recorded of step 0:0: record " in found["learning_signal"]


@pytest.mark.parametrize("crashed", ["trainer", "sampler", "nobody"])
def test_of_two_processes_with_one_rank_number_each_has_to_close(lake: Lake, crashed: str) -> None:
    """As a driver that records rollouts beside the workers that train."""
    reserve(lake, 0)
    producers = {"trainer": ProducerInfo(), "sampler": ProducerInfo(role="rollout")}
    step(lake, 0)
    step(lake, 0, step_id=None, producer=producers["sampler"])
    for place, (name, producer) in enumerate(producers.items()):
        if name != crashed:
            _end(lake, place, producer)
    verdict = gated(lake, Policy(checks={"terminal": {}}))
    wanted = {} if crashed == "nobody" else {"terminal"}
    assert set(reasons(verdict)) == set(wanted)
    if crashed == "sampler":
        assert "a process of role 'rollout' recorded" in reasons(verdict)["terminal"]


def _end(lake: Lake, place: int, producer: Any = None, **told: Any) -> None:
    key = make_key(RUN, 0, "events", None, place, 0)
    detail = dump_detail(TERMINAL, {"status": ENDED_CLEAN, **told})
    commit_events(open_lake(lake.path), key, [Event(TERMINAL, detail)], producer=producer)


@pytest.mark.parametrize(("steps", "wanted"), [((3,), "pass"), ((0,), "fail"), ((0, 3), "pass")])
def test_the_process_that_counted_the_steps_closes(
    lake: Lake, steps: tuple[int, ...], wanted: str
) -> None:
    """One of the same rank and role that took no step is another one."""
    reserve(lake, 0)
    for number in range(1, 4):
        beat(lake, 0, number, HEALTHY)
    for count in steps:
        _end(lake, count, steps=count)
    verdict = gated(lake, Policy(checks={"terminal": {}}))
    assert verdict.verdict == wanted


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        ({"sql": (SqlCheck("a", "SELEC 1", {"below": 1}),)}, "sql 'a': Parser Error"),
        ({"sql": (SqlCheck("a", "DROP TABLE steps", {"below": 1}),)}, "of kind DROP"),
        ({"sql": (SqlCheck("a", "SELECT 1", {}),)}, "has no bound"),
        ({"sql": (SqlCheck("a", "SELECT 1", {"under": 1}),)}, "unknown 'under'"),
        ({"sql": (SqlCheck("a", "SELECT 1", {"below": float("nan")}),)}, "has below = nan"),
        ({"sql": (SqlCheck("", "SELECT 1", {"below": 1}),)}, "the name ''"),
        ({"checks": {"losses": {}}}, "unknown 'losses'"),
        ({"checks": {"truncation": {"below": "1"}}}, "below is '1'"),
        ({"checks": {"complete": {}}}, "max_steps is missing"),
        ({"checks": {"attempt": {}}, "run": "whole"}, "run is 'whole'"),
        ({"checks": {"attempt": {}}, "allow_precision": 1}, "allow_precision is 1"),
        ({"checks": []}, "checks is []"),
        ({}, "no check is named"),
    ],
)
def test_a_policy_that_no_file_states_is_refused_like_one_of_a_file(
    lake: Lake, policy: dict[str, Any], reason: str
) -> None:
    healthy_run(lake)
    with pytest.raises(QueryError, match="the policy: ") as caught:
        gated(lake, Policy(**policy))
    assert reason in caught.value.message
    with pytest.raises(QueryError):
        lake.watch(policy=Policy(**policy))


def test_of_a_chain_the_steps_without_traces_are_named(lake: Lake) -> None:
    first, _ = trace_times()
    reserve(lake, 0, started_s=first - 100)
    reserve(lake, 1, ResumePoint(0, 4), started_s=first - 50)
    for number in range(1, 11):
        beat(lake, 0 if number < 5 else 1, number, HEALTHY)
    end(lake, 1)
    stated = {"traces": str(TRACES), "contract": "legacy-async"}
    (check,) = gated(lake, Policy(checks={"routes": stated}), 0, 1).checks
    assert check.verdict == "pass"
    assert check.reason == (
        "says nothing of step 0:0, 1:0, 2:0, 3:0 of attempt 0, which left no trace; "
        "step 5:0, 6:0, 7:0, 8:0, 9:0 of attempt 1, not traced; "
        "attempt 1: time alone says whose traces they are: its captures name no process of theirs, "
        "nor samples whose lengths they show; no choices of experts are captured"
    )
    assert check.value["0"]["untraced"] == ["0:0", "1:0", "2:0", "3:0"]


def test_a_verdict_names_so_many_steps_that_a_person_can_read_them(lake: Lake) -> None:
    names = tuple(f"{rollout}:0" for rollout in range(250))
    healthy_run(lake, 1)
    verdict = replace(gated(lake, Policy(checks={"attempt": {}})), steps=names, not_captured=names)
    told = verdict.to_json()["steps"]
    assert (told["recorded"], told["captured"]) == (250, 0)
    assert told["not_captured"] == list(names[:100])


@pytest.mark.parametrize("run", ["direct", "intermediate"])
def test_a_policy_of_which_nothing_is_judged_passes_nothing(lake: Lake, run: Any) -> None:
    healthy_run(lake, 4)
    checks: dict[str, Any] = {"route_agreement": {"chosen": True}}
    if run == "intermediate":
        checks = {"nonzero_loss": {}}
    alone = gated(lake, Policy(checks=checks, max_steps=4, run=run))
    assert [one.verdict for one in alone.checks] == ["not-judged"]
    assert (alone.verdict, alone.certifies, alone.exit_code, alone.failing) == (
        *("fail", False, 1),
        (),
    )
    *_, line = verdict_lines(alone)
    assert line.endswith("no check was judged")
    beside = gated(lake, Policy(checks={"attempt": {}, **checks}, max_steps=4, run=run))
    assert (beside.verdict, beside.certifies) == ("pass", False)
    *_, line = verdict_lines(beside)
    assert line.endswith(
        "an intermediate run certifies nothing"
        if run == "intermediate"
        else "certifies nothing: route_agreement not judged"
    )


@pytest.mark.parametrize("patience", [1, 2, 3])
def test_a_baseline_is_none_where_no_step_could_be_above(lake: Lake, patience: int) -> None:
    loud = [0.0001, 0.0001, 0.0001, 0.4, 0.4]
    healthy_run(lake, 5, abs_delta=loud)
    stated = {"window": 3, "patience": patience}
    verdict = gated(lake, Policy(checks={"mismatch_baseline": stated}))
    assert verdict.verdict == "fail"
    told = "5 steps were recorded, expected 3 and then 3 or more"
    assert (verdict.checks[0].reason == told) is (patience == 3)
