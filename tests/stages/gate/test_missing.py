"""What is missing or does not belong to the attempt fails, whatever the rest says."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from tests.helpers.captures import record, sample
from tests.helpers.gates import HEALTHY, RUN, TRACES, beat, end, healthy_run, reserve, trace_times
from tests.helpers.mismatches import write_pair
from trajreplay import Lake
from trajreplay.schema.events import HEARTBEAT, dump_detail
from trajreplay.schema.identity import ResumePoint, make_key
from trajreplay.schema.lakefile import open_lake
from trajreplay.stages.gate import GateVerdict, Policy, SqlCheck, load_gate_policy
from trajreplay.writer import CaptureBuilder, Event, commit_events

SAMPLED = [[-1.0, -2.0, -0.5], [-0.25, -3.0]]
MISMATCH = ("delta_tail", "delta_fraction", "generation_kl")
LARGEST = SqlCheck(
    "tail",
    "SELECT max(list_max(list_transform(list_zip(old_log_probs, rollout_log_probs), "
    "lambda one: abs(one[1] - one[2])))) FROM steps",
    {"below": 1.0},
)


def step(lake: Lake, rollout: int, delta: float = 0.001, **options: Any) -> None:
    """A captured step whose trainer is off by so much in every token."""
    trained = [[one + delta for one in row] for row in SAMPLED]
    write_pair(lake, trained, SAMPLED, run_id=RUN, rollout_id=rollout, step_id=0, **options)


def demanding(*checks: str, **more: Any) -> Policy:
    return Policy(checks={name: {} for name in checks}, **more)


def judged(lake: Lake, policy: Policy, *attempts: int) -> GateVerdict:
    return Lake.open(lake.path).gate(policy, RUN, attempts or (0,), command_exit=0)


def failing(verdict: GateVerdict) -> set[str]:
    return {one.check for one in verdict.checks if one.verdict == "fail"}


def incomplete(lake: Lake) -> None:
    step(lake, 3, 5.0, expected_ranks=[0, 1])


def sampler_unknown(lake: Lake, mask: Sequence[int] = (1, 1)) -> None:
    def fill(capture: CaptureBuilder) -> None:
        capture.samples([sample(0, 3), sample(1, 2, loss_mask=list(mask))])
        rows = [np.array([-1, -2, -0.5], np.float32), np.array([-9, -9], np.float32)]
        capture.tensor("old_log_probs", rows, source="trainer")
        capture.tensor("rollout_log_probs", [rows[0] + np.float32(0.001), None], source="sampler")

    record(lake, fill, run_id=RUN, rollout_id=3, step_id=0)


@pytest.mark.parametrize("spoil", [incomplete, sampler_unknown])
@pytest.mark.parametrize("spoilt", [False, True])
def test_a_step_that_is_not_whole_or_not_known_to_the_last_sample_fails_every_bound(
    lake: Lake, spoil: Callable[[Lake], None], spoilt: bool
) -> None:
    for rollout in (0, 1, 2, 4, 5, 6):
        step(lake, rollout)
    if spoilt:
        spoil(lake)
    else:
        step(lake, 3)
    wanted = set(MISMATCH) if spoilt else set()
    assert failing(judged(lake, demanding("attempt", *MISMATCH))) == wanted
    baseline = judged(lake, load_gate_policy("mismatch-baseline"))
    assert baseline.verdict == ("fail" if spoilt else "pass")
    assert not (spoilt and baseline.certifies)


def test_a_sample_without_a_valid_token_needs_no_log_probs(lake: Lake) -> None:
    sampler_unknown(lake, mask=[0, 0])
    assert judged(lake, demanding("attempt", *MISMATCH)).verdict == "pass"


def test_a_statement_over_tables_that_leave_something_out_fails(lake: Lake) -> None:
    step(lake, 0)
    policy = Policy(sql=(LARGEST,))
    assert judged(lake, policy).verdict == "pass"
    step(lake, 1, 5.0, expected_ranks=[0, 1])
    (found,) = judged(lake, policy).checks
    assert found.verdict == "fail"
    assert "left out as incomplete" in found.reason


@pytest.mark.parametrize("table", ["manifest", "checksums", "steps"])
def test_a_statement_sees_the_attempts_named_and_no_others(lake: Lake, table: str) -> None:
    for attempt, count in ((0, 2), (1, 3)):
        for rollout in range(count):
            step(lake, rollout, attempt=attempt)
    write_pair(lake, SAMPLED, SAMPLED, run_id="other", step_id=0)
    text = f"SELECT count(DISTINCT (run_id, attempt, rollout_id)) FROM {table}"
    for attempt, count in ((0, 2), (1, 3)):
        policy = Policy(sql=(SqlCheck("n", text, {"equals": count}),))
        assert judged(lake, policy, attempt).verdict == "pass"


@pytest.mark.parametrize("told", [0, 2, 9])
def test_a_rank_that_falls_silent_or_does_not_close_is_missed(lake: Lake, told: int) -> None:
    healthy_run(lake)
    for number in range(1, told + 1):
        beat(lake, 0, number, HEALTHY, rank=1)
    policy = demanding("attempt", "complete", "terminal", "truncation", *MISMATCH, max_steps=10)
    everything = {"complete", "terminal", "truncation", *MISMATCH}
    assert failing(judged(lake, policy)) == (everything if told else set())


def test_of_ranks_that_all_told_and_closed_nothing_is_missed(lake: Lake) -> None:
    healthy_run(lake)
    for number in range(1, 11):
        beat(lake, 0, number, HEALTHY, rank=1)
    end(lake, 0, rank=1)
    policy = demanding("attempt", "complete", "terminal", "truncation", *MISMATCH, max_steps=10)
    assert judged(lake, policy).verdict == "pass"


def test_a_step_captured_by_one_attempt_and_told_by_another_is_recorded_twice(lake: Lake) -> None:
    for number in range(1, 11):
        beat(lake, 0 if number < 5 else 1, number, HEALTHY)
    for rollout in range(4):
        step(lake, rollout, attempt=0)
    policy = demanding(*MISMATCH, max_steps=10, run="final")
    assert judged(lake, policy, 0, 1).verdict == "pass"
    step(lake, 4, attempt=0)
    assert failing(judged(lake, policy, 0, 1)) == {"attempt"}


def test_captures_that_cannot_be_taken_fail_a_policy_that_does_not_name_the_attempt(
    lake: Lake,
) -> None:
    for number in range(1, 5):
        beat(lake, 0, number, HEALTHY)
    policy = demanding(*MISMATCH)
    assert judged(lake, policy).verdict == "pass"
    step(lake, 0, 5.0, sampled="trainer")
    verdict = judged(lake, policy)
    assert failing(verdict) == {"attempt", *MISMATCH}
    assert not verdict.certifies


def routes(**stated: object) -> Policy:
    given = {"traces": str(TRACES), "contract": "legacy-async", **stated}
    return Policy(checks={"attempt": {}, "routes": given})


def test_traces_count_for_the_attempt_that_was_running(lake: Lake) -> None:
    first, last = trace_times()
    reserve(lake, 0, started_s=1)
    reserve(lake, 1, started_s=first - 100)
    reserve(lake, 2, started_s=last + 100)
    for attempt in range(3):
        beat(lake, attempt, 1, HEALTHY)
    found = {one: judged(lake, routes(), one).verdict for one in range(3)}
    assert found == {0: "fail", 1: "pass", 2: "fail"}
    assert judged(lake, routes(since=0), 2).verdict == "fail"
    assert judged(lake, routes(until=last + 1e6), 0).verdict == "fail"


def test_of_a_chain_the_last_attempt_has_traces_of_its_own(lake: Lake) -> None:
    first, last = trace_times()
    for started, wanted in ((first - 50, "pass"), (last + 100, "fail")):
        made = Lake.create(f"{lake.path}-{wanted}")
        reserve(made, 0, started_s=first - 100)
        reserve(made, 1, ResumePoint(0, 4), started_s=started)
        for number in range(1, 11):
            beat(made, 0 if number < 5 else 1, number, HEALTHY)
        assert judged(made, routes(), 0, 1).verdict == wanted


def test_watch_finds_each_heartbeat_of_several_written_at_once(lake: Lake) -> None:
    policy = demanding("truncation", "delta_tail", run="intermediate")
    for rollout in range(4):
        step(lake, rollout)
    for batch in ([0, 1, 2], [3]):
        key = make_key(RUN, 0, "events", batch[0], 0, 0)
        told = [
            {"step": one + 1, "rollout_id": one, "step_id": 0, "truncation_rate": 0.1 + one / 4}
            for one in batch
        ]
        events = [Event(HEARTBEAT, dump_detail(HEARTBEAT, values)) for values in told]
        commit_events(open_lake(lake.path), key, events)
    watch = lake.watch(policy=policy, wait=0)
    found = {
        one.rollout_id: {check.check: (check.verdict, check.value) for check in watch.gate(one)}
        for one in watch.poll()
    }
    assert {one: values["delta_tail"][0] for one, values in found.items()} == dict.fromkeys(
        range(4), "pass"
    )
    assert {one: values["truncation"] for one, values in found.items()} == {
        one: ("pass", pytest.approx(0.1 + one / 4)) for one in range(4)
    }
