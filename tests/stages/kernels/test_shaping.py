import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers import reference_advantages as references
from trajreplay.schema import StageError
from trajreplay.stages.kernels import (
    cost_penalised_rewards,
    overlong_penalty,
    scale_rewards,
    truncation_rewards,
)

FINITE = st.floats(-1e3, 1e3)
REWARDS = st.lists(FINITE | st.sampled_from([math.nan, math.inf, -math.inf, 0.0]), max_size=20)
WHOLE = st.integers(-200, 200)


def in_float64(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@given(REWARDS, WHOLE, st.integers(1, 50), FINITE, FINITE)
def test_scaled_rewards_equal_a_loop(
    rewards: list[float], low: int, width: int, start: float, end: float
) -> None:
    source, target = (float(low), float(low + width)), (start, end)
    scaled = scale_rewards(in_float64(rewards), source=source, target=target)
    expected = references.scale_rewards(rewards, source=source, target=target)
    assert scaled.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9, nan_ok=True)


@given(
    st.lists(st.integers(0, 200), max_size=20),
    st.integers(1, 150),
    st.integers(1, 100),
    st.floats(0, 3),
    st.booleans(),
)
def test_overlong_penalties_equal_a_loop(
    lengths: list[int], max_length: int, buffer: int, penalty: float, floored: bool
) -> None:
    options: dict[str, Any] = {
        "max_length": max_length,
        "buffer": buffer,
        "penalty": penalty,
        "floored": floored,
    }
    punished = overlong_penalty(torch.tensor(lengths, dtype=torch.int64), **options)
    expected = references.overlong_penalty(lengths, **options)
    assert punished.tolist() == pytest.approx(expected, rel=1e-12)


def test_golden_overlong_penalties() -> None:
    """G26."""
    lengths = torch.tensor([96, 100, 110])
    assert overlong_penalty(lengths, max_length=100, buffer=8).tolist() == [-0.5, -1.0, -2.25]
    floored = overlong_penalty(lengths, max_length=100, buffer=8, floored=True)
    assert floored.tolist() == [-0.5, -1.0, -1.0]


@given(
    st.lists(st.tuples(FINITE, st.integers(0, 2)), max_size=20),
    FINITE,
    st.sampled_from(["multiply", "replace"]),
)
def test_truncation_equals_a_loop(
    samples: list[tuple[float, int]], coefficient: float, rule: str
) -> None:
    rewards, truncated = [one for one, _ in samples], [cut for _, cut in samples]
    shaped = truncation_rewards(
        in_float64(rewards), torch.tensor(truncated), coefficient=coefficient, rule=rule
    )
    assert shaped.tolist() == references.truncation_rewards(
        rewards, truncated, coefficient=coefficient, rule=rule
    )


def test_a_reward_that_is_replaced_may_be_undefined() -> None:
    rewards = torch.tensor([math.nan, math.inf])
    replaced = truncation_rewards(rewards, torch.ones(2), coefficient=-1.0, rule="replace")
    assert replaced.tolist() == [-1.0, -1.0]


@given(
    st.lists(st.tuples(FINITE, st.tuples(*[st.integers(0, 9)] * 3), st.integers(0, 3)), max_size=20)
)
def test_costs_equal_a_loop(samples: list[tuple[float, tuple[int, ...], int]]) -> None:
    rewards = [reward for reward, _, _ in samples]
    costs = [list(cost) for _, cost, _ in samples]
    groups = [group for _, _, group in samples]
    weights = (0.25, 0.1, 0.1)
    shaped = cost_penalised_rewards(
        in_float64(rewards),
        torch.tensor(costs).reshape(-1, 3),
        torch.tensor(groups, dtype=torch.int64),
        weights=weights,
    )
    expected = references.cost_penalised_rewards(rewards, costs, groups, weights)
    assert shaped.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_dtype_is_kept_and_inputs_are_not_changed(dtype: torch.dtype) -> None:
    rewards = torch.tensor([0.5, 3.0], dtype=dtype)
    for shaped in (
        scale_rewards(rewards, source=(0.0, 1.0), target=(0.0, 2.0)),
        truncation_rewards(rewards, torch.zeros(2), coefficient=0.0),
        cost_penalised_rewards(rewards, torch.ones(2, 1), torch.zeros(2).long(), weights=(0.0,)),
        overlong_penalty(rewards, max_length=4, buffer=2),
    ):
        assert shaped.dtype == dtype
        shaped.zero_()
    assert rewards.tolist() == [0.5, 3.0]


def test_what_does_not_fit_is_refused() -> None:
    rewards = torch.ones(2)
    with pytest.raises(StageError, match=r"the width of source is 0\.0, expected more than 0"):
        scale_rewards(rewards, source=(1.0, 1.0), target=(0.0, 1.0))
    with pytest.raises(StageError, match=r"source runs from 1\.0 to 0\.0, expected it to rise"):
        scale_rewards(rewards, source=(1.0, 0.0), target=(0.0, 1.0))
    with pytest.raises(StageError, match="the buffer is 0, expected more than 0"):
        overlong_penalty(rewards, max_length=10, buffer=0)
    with pytest.raises(StageError, match="no rule 'add', expected one of multiply, replace"):
        truncation_rewards(rewards, rewards, coefficient=1.0, rule="add")
    with pytest.raises(StageError, match="truncated has 3 along S, expected 2"):
        truncation_rewards(rewards, torch.ones(3), coefficient=1.0)
    with pytest.raises(StageError, match="2 weights for 1 costs, expected one each"):
        cost_penalised_rewards(rewards, torch.ones(2, 1), rewards, weights=(1.0, 2.0))
