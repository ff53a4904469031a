"""Attempts of a chain that follow each other, rollouts without holes, and counts that can be."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.gates import HEALTHY, RUN, beat, end, healthy_run, reserve
from tests.helpers.mismatches import write_pair
from trajreplay import Lake
from trajreplay.schema.identity import ResumePoint
from trajreplay.stages.gate import GateVerdict, Policy, load_gate_policy
from trajreplay.stages.gate.order import shorter_rollouts

SAMPLED = [[-1.0, -2.0, -0.5]]
BASELINE = load_gate_policy("mismatch-baseline")
DEMANDING = Policy(checks={name: {} for name in ("delta_tail", "delta_fraction", "generation_kl")})


def step(lake: Lake, rollout: int, number: int = 0, attempt: int = 0) -> None:
    trained = [[one + 0.001 for one in SAMPLED[0]]]
    given: dict[str, Any] = {"run_id": RUN, "rollout_id": rollout, "step_id": number}
    write_pair(lake, trained, SAMPLED, attempt=attempt, **given)


def gated(lake: Lake, policy: Policy, *attempts: int) -> GateVerdict:
    return Lake.open(lake.path).gate(policy, RUN, attempts or (0,), command_exit=0)


def reason(verdict: GateVerdict) -> str:
    return next((one.reason for one in verdict.checks if one.verdict == "fail"), "")


ORDERS = {
    "in order": (range(1, 6), range(6, 11), ""),
    "backward": (range(6, 11), range(1, 6), "attempt 0 has step 5:0, behind step 4:0 of attempt 1"),
    "odd and even": (
        range(1, 11, 2),
        range(2, 11, 2),
        "attempt 0 has step 2:0, behind step 1:0 of attempt 1",
    ),
}


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_the_steps_of_a_later_attempt_come_after_those_of_the_earlier(
    lake: Lake, order: str, captured: bool
) -> None:
    first, second, wanted = ORDERS[order]
    for attempt, numbers in enumerate((first, second)):
        reserve(lake, attempt)
        for number in numbers:
            if captured:
                step(lake, number - 1, attempt=attempt)
            else:
                beat(lake, attempt, number, HEALTHY | {"abs_delta": 0.001})
    end(lake, 1)
    verdict = gated(lake, BASELINE, 0, 1)
    assert verdict.certifies is (not wanted)
    assert reason(verdict).startswith(wanted)


@pytest.mark.parametrize("chain", [(1,), (0, 1)])
def test_an_attempt_records_nothing_from_before_it_was_resumed(
    lake: Lake, chain: Sequence[int]
) -> None:
    reserve(lake, 0)
    reserve(lake, 1, ResumePoint(0, 5))
    for number in range(1, 11):
        beat(lake, 0 if number == 5 and len(chain) > 1 else 1, number, HEALTHY)
    end(lake, 1)
    verdict = gated(lake, DEMANDING, *chain)
    assert verdict.failing == ("attempt",)
    assert "attempt 1 was resumed at rollout 5 and recorded step 0:0, 1:0" in reason(verdict)


@pytest.mark.parametrize("lacking", [None, (0, 2), (1, 2), (2, 2), (3, 2), (1, 1)])
def test_a_rollout_whose_last_steps_were_not_captured_has_a_hole(
    lake: Lake, lacking: tuple[int, int] | None
) -> None:
    """Of the last rollout nothing says that it was done."""
    for rollout in range(4):
        for number in range(3):
            if (rollout, number) != lacking:
                step(lake, rollout, number)
    verdict = gated(lake, BASELINE)
    assert verdict.certifies is (lacking in (None, (3, 2)))
    if lacking == (1, 2):
        assert "rollout 1 has 2 captured steps, between 3 of rollout 0 and 3 of" in reason(verdict)


@given(st.lists(st.integers(1, 4), max_size=6))
def test_only_a_rollout_with_fewer_steps_than_both_beside_it_lacks_some(counts: list[int]) -> None:
    places = [(0, rollout, one) for rollout, count in enumerate(counts) for one in range(count)]
    told = [int(one.split()[1]) for one in shorter_rollouts(places)]
    wanted = []
    for place in range(len(counts) - 1):
        beside = [place - 1, place + 1] if place else [1, 2]
        if beside[1] < len(counts) and all(counts[one] > counts[place] for one in beside):
            wanted.append(place)
    assert told == wanted


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"over_0_5": 0.3, "abs_delta_max": 0.9}, "over_0_5 is 0.3, expected a number of tokens"),
        ({"valid_tokens": 0}, "valid_tokens is 0, so that nothing is measured"),
        ({"valid_tokens": 1.5}, "valid_tokens is 1.5, expected"),
        ({"valid_tokens": -5}, "valid_tokens is -5, expected"),
        ({"over_1_0": -1}, "over_1_0 is -1, expected"),
        ({"over_0_5": 200_000, "abs_delta_max": 0.9}, "over_0_5 is 200000, and valid_tokens is"),
        ({"over_1_0": 5, "abs_delta_max": None}, "over_1_0 is 5, and over_0_5 is 0"),
        ({"over_1_0": 2e5, "over_0_5": None}, "over_1_0 is 200000, and valid_tokens is"),
        ({"over_0_5": 50}, "over_0_5 is 50, and abs_delta_max is 0.41"),
        ({"abs_delta_max": 0.6}, "over_0_5 is 0, and abs_delta_max is 0.6"),
        ({"abs_delta": 0.5}, "abs_delta is 0.5, and abs_delta_max is 0.41"),
    ],
)
def test_counts_that_cannot_be_certify_nothing(
    lake: Lake, changed: dict[str, Any], told: str
) -> None:
    """In one step of ten, whose share of all tokens is below any bound."""
    values: dict[str, Any] = {n: [one] + [HEALTHY.get(n)] * 9 for n, one in changed.items()}
    if "valid_tokens" not in values and "over_0_5" in values:
        values["valid_tokens"] = [129171] + [10**10] * 9
    healthy_run(lake, 10, **values)
    verdict = gated(lake, DEMANDING)
    assert set(verdict.failing) >= {"delta_tail", "generation_kl"}
    assert any(f"step 0:0 cannot be: {told}" in one.reason for one in verdict.checks)


@pytest.mark.parametrize("largest", [0.5, 0.4980, 0.502, 0.7])
def test_a_maximum_that_was_rounded_does_not_contradict_its_count(
    lake: Lake, largest: float
) -> None:
    """As bfloat16 rounds what is just above 0.5."""
    tokens = [10**6] * 10
    over = [1] + [0] * 9
    sizes = [largest] + [0.41] * 9
    healthy_run(lake, 10, over_0_5=over, abs_delta_max=sizes, valid_tokens=tokens)
    assert gated(lake, DEMANDING).verdict == "pass"
