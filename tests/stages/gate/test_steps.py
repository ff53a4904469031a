"""Steps and ranks that are missing fail, whatever those that are there say."""

from collections.abc import Collection
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.gates import HEALTHY, RUN, beat, end, reserve
from tests.helpers.mismatches import write_pair
from trajreplay import Lake
from trajreplay.query import Catalog
from trajreplay.schema import Settings
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.events import HEARTBEAT, dump_detail
from trajreplay.schema.identity import ResumePoint, make_key
from trajreplay.schema.lakefile import open_lake
from trajreplay.stages.gate import GateVerdict, Policy, load_gate_policy
from trajreplay.stages.gate.checks import CHECKS_BY_NAME, judged
from trajreplay.stages.gate.counted import _check_whole
from trajreplay.stages.gate.evidence import Evidence
from trajreplay.writer import Event, commit_events

SAMPLED = [[-1.0, -2.0, -0.5], [-0.25, -3.0]]
MISMATCH = ("delta_tail", "delta_fraction", "generation_kl", "mismatch_baseline")
BASELINE = load_gate_policy("mismatch-baseline")


def step(lake: Lake, number: int, delta: float = 0.001, **options: Any) -> None:
    """The capture of a step, one step a rollout, whose trainer is off by so much."""
    trained = [[one + delta for one in row] for row in SAMPLED]
    usual: dict[str, Any] = {"run_id": RUN, "rollout_id": number - 1, "step_id": 0}
    write_pair(lake, trained, SAMPLED, **usual | options)


def told(lake: Lake, number: int, attempt: int) -> None:
    beat(lake, attempt, number, HEALTHY | {"abs_delta": 0.001})


def gated(lake: Lake, policy: Policy, *attempts: int) -> GateVerdict:
    return Lake.open(lake.path).gate(policy, RUN, attempts or (0,), command_exit=0)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("resumed", [None, ResumePoint(0, 4), ResumePoint(0, 7)])
@pytest.mark.parametrize("first", [5, 8])
def test_a_chain_with_a_gap_between_its_attempts_certifies_nothing(
    lake: Lake, captured: bool, resumed: ResumePoint | None, first: int
) -> None:
    reserve(lake, 0)
    reserve(lake, 1, resumed)
    for number in range(1, 5):
        step(lake, number) if captured else told(lake, number, 0)
    for number in range(first, 11):
        step(lake, number, attempt=1) if captured else told(lake, number, 1)
    verdict = gated(lake, BASELINE, 0, 1)
    early = resumed is not None and first - 1 < resumed.rollout_id
    assert verdict.certifies is (first == 5 and not early)
    assert verdict.failing == (() if verdict.certifies else ("attempt",))
    reasons = [one.reason for one in verdict.checks if one.verdict == "fail"]
    missing = "step number 5, 6, 7 is missing, after step 3:0 and before others"
    before = "attempt 1 was resumed at rollout 7 and recorded step 4:0, 5:0, 6:0"
    assert reasons == ([before] if early else [missing] if first == 8 else [])


def uncounted(lake: Lake, attempt: int, rollout: int, steps: int = 1) -> None:
    """Heartbeats of a rollout by a recorder that was resumed, which counts none."""
    for step_id in range(steps):
        key = make_key(RUN, attempt, "events", rollout, step_id, 0)
        detail = dump_detail(HEARTBEAT, HEALTHY | {"rollout_id": rollout, "step_id": step_id})
        commit_events(open_lake(lake.path), key, [Event(HEARTBEAT, detail)])


@pytest.mark.parametrize("hole", [None, (0, 3), (1, 4), (1, 6)])
@pytest.mark.parametrize("run", ["intermediate", "final"])
def test_a_resumed_attempt_that_counts_no_steps_goes_on_from_the_one_before(
    lake: Lake, hole: tuple[int, int] | None, run: Any
) -> None:
    reserve(lake, 0)
    reserve(lake, 1, ResumePoint(0, 4))
    for number in range(1, 7):  # the last two were done anew
        if hole != (0, number - 1):
            beat(lake, 0, number, HEALTHY | {"rollout_id": number - 1, "step_id": 0})
    for rollout in range(4, 10):
        if hole != (1, rollout):
            uncounted(lake, 1, rollout)
    end(lake, 1)
    policy = Policy(checks={"attempt": {}, "complete": {}}, max_steps=10, run=run)
    verdict = gated(lake, policy, 0, 1)
    assert (not verdict.failing) is (hole is None), [one.reason for one in verdict.checks]
    assert gated(lake, policy, 1).failing  # alone, it does not say which steps these are


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(1, 3))
def test_steps_without_number_are_counted_only_where_none_can_be_missing(
    steps: list[int], usual: int
) -> None:
    places = [(rollout, at) for rollout, count in enumerate(steps) for at in range(count)]
    given_now = {(1, place): [(0, {"loss": 1.0})] for place in places}
    counted = {1: [(0, 0, {"rollout_id": 0, "step_id": at}) for at in range(usual)]}
    last = max((rollout for rollout, count in enumerate(steps) if count), default=0)
    first = max(usual, steps[0])
    whole = all(one == first for one in [first, *steps[1:last]]) and (
        not last or steps[last] <= first
    )
    try:
        _check_whole(counted, given_now)
    except DatasetError:
        assert not whole
    else:
        assert whole


@given(st.sets(st.integers(1, 12), min_size=1), st.booleans())
def test_steps_that_are_missing_between_others_fail_one_check_and_only_one(
    catalog: Catalog, steps: Collection[int], completes: bool
) -> None:
    """That of the steps, where the policy makes it, since its reason says which are missing."""
    found = Evidence(
        catalog, RUN, (0,), {one: {**HEALTHY, "attempt": 0} for one in steps}, records=1
    )
    checks = ["attempt", "complete"] if completes else ["attempt"]
    policy = Policy(checks={one: {} for one in checks}, max_steps=12, run="intermediate")
    failing = [name for name in checks if not judged(CHECKS_BY_NAME[name], found, policy).passed]
    hole = max(steps) - min(steps) + 1 > len(steps)
    assert failing == (checks[-1:] if hole else [])


@given(st.sets(st.integers(1, 9), min_size=5), st.integers(1, 4))
def test_a_warm_up_is_the_first_steps_of_the_run(
    catalog: Catalog, steps: Collection[int], window: int
) -> None:
    values = {one: {"attempt": 0, "abs_delta": 0.01} for one in steps}
    policy = Policy(checks={"mismatch_baseline": {"window": window}})
    found = Evidence(catalog, RUN, (0,), values, records=1)
    passed = judged(CHECKS_BY_NAME["mismatch_baseline"], found, policy).passed
    assert passed is set(range(1, window + 1)).issubset(steps)


def test_a_warm_up_does_not_skip_to_later_steps(lake: Lake) -> None:
    reserve(lake, 0)
    for number in (1, *range(40, 44)):
        step(lake, number, 0.001 if number == 1 else 0.02)
    verdict = gated(lake, BASELINE)
    assert set(verdict.failing) == {"attempt", "mismatch_baseline"}
    assert not verdict.certifies


@pytest.mark.parametrize(("begins", "certified"), [(0, True), (1, True), (2, False), (40, False)])
def test_captures_that_begin_with_a_later_rollout_show_no_warm_up(
    lake: Lake, begins: int, certified: bool
) -> None:
    """Also where no heartbeat tells the number of a step."""
    reserve(lake, 0)
    for rollout in range(begins, begins + 6):
        step(lake, rollout + 1)
    assert gated(lake, BASELINE).certifies is certified


@pytest.mark.parametrize("closed", [(0,), (0, 1)])
@pytest.mark.parametrize("silent", [False, True])
def test_every_rank_whose_captures_a_step_expects_closes(
    lake: Lake, closed: tuple[int, ...], silent: bool
) -> None:
    """Also one whose capture is missing, and one that told of no step."""
    reserve(lake, 0)
    for number in range(1, 6):
        step(lake, number, rank=0, expected_ranks=[0, 1])
        if not silent:
            step(lake, number, rank=1, expected_ranks=[0, 1], first=2)
        beat(lake, 0, number, HEALTHY)
    for rank in closed:
        end(lake, 0, rank=rank)
    checks = gated(lake, Policy(checks={"terminal": {}})).checks
    assert [one.verdict for one in checks] == ["pass" if closed == (0, 1) else "fail"]


def test_ranks_of_an_earlier_attempt_need_not_close(lake: Lake) -> None:
    reserve(lake, 0)
    reserve(lake, 1, ResumePoint(0, 1))
    step(lake, 1, expected_ranks=[0, 1])
    step(lake, 2, attempt=1)
    end(lake, 1)
    assert gated(lake, Policy(checks={"terminal": {}}), 0, 1).verdict == "pass"


def test_one_rank_may_tell_for_all_but_of_tokens_that_others_capture(lake: Lake) -> None:
    """Steps 4 and 5 were not captured: a heartbeat of rank 0 tells nothing of rank 1's tokens."""
    reserve(lake, 0)
    for number in range(1, 6):
        for rank in (0, 1):
            if number < 4:
                step(lake, number, rank=rank, expected_ranks=[0, 1], first=2 * rank)
        beat(lake, 0, number, HEALTHY)
    for rank in (0, 1):
        end(lake, 0, rank=rank)
    whole = ("attempt", "complete", "terminal", "nonzero_loss", "truncation")
    policy = Policy(checks={one: {} for one in (*whole, "delta_tail")}, max_steps=5)
    assert set(gated(lake, policy).failing) == {"delta_tail"}
    for number in (4, 5):
        for rank in (0, 1):
            step(lake, number, rank=rank, expected_ranks=[0, 1], first=2 * rank)
    assert gated(lake, policy).certifies


@pytest.mark.parametrize("spoil", ["incomplete", "dropped", "not"])
def test_no_heartbeat_stands_for_the_mismatch_of_a_capture_that_is_missing(
    lake: Lake, spoil: str
) -> None:
    reserve(lake, 0)
    for number in range(1, 6):
        for rank in (0, 1):
            told = HEALTHY | {"abs_delta": 0.01, "valid_tokens": 5}
            beat(lake, 0, number, told, rank=rank)
        if number < 5 or spoil == "not":
            step(lake, number, rank=0, expected_ranks=[0, 1])
            step(lake, number, rank=1, expected_ranks=[0, 1], first=2)
            continue
        step(lake, number, 8.0, rank=0, expected_ranks=[0, 1])
        if spoil == "dropped":
            place: dict[str, Any] = {
                "run_id": RUN,
                "rollout_id": number - 1,
                "step_id": 0,
                "rank": 1,
            }
            with lake.capture(**place, expected_ranks=[0, 1], settings=Settings()) as capture:
                capture.drop("queue full")
    verdict = gated(lake, Policy(checks={"attempt": {}} | {one: {} for one in MISMATCH}))
    assert set(verdict.failing) == (set() if spoil == "not" else set(MISMATCH))
    assert verdict.certifies is (spoil == "not")


def test_heartbeats_tell_of_steps_that_were_not_captured(lake: Lake) -> None:
    """Only every second step is captured, as a selection may say."""
    reserve(lake, 0)
    for number in range(1, 7):
        told(lake, number, 0)
        if number % 2:
            step(lake, number)
    policy = Policy(checks={"attempt": {}} | {one: {} for one in MISMATCH})
    assert gated(lake, policy).verdict == "pass"
