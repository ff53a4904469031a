import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trajreplay.schema import StageError
from trajreplay.stages.kernels import constant_groups
from trajreplay.stages.kernels.groups import groups_of

SAMPLES = st.lists(st.tuples(st.sampled_from([0.0, 0.1, 1.0, -0.0]), st.integers(-3, 3)))


@given(SAMPLES)
def test_a_group_is_constant_if_all_its_rewards_are_equal(
    samples: list[tuple[float, int]],
) -> None:
    rewards = torch.tensor([reward for reward, _ in samples], dtype=torch.float64)
    index = torch.tensor([group for _, group in samples], dtype=torch.int64)
    expected = [len({other for other, its in samples if its == group}) == 1 for _, group in samples]
    assert constant_groups(rewards, index).tolist() == expected


def test_groups_are_numbered_in_any_order_and_counted() -> None:
    groups = groups_of(torch.tensor([9, -2, 9, 9]))
    assert groups.member.tolist() == [1, 0, 1, 1]
    assert groups.size.tolist() == [1.0, 3.0]
    values = torch.tensor([1.0, 5.0, 2.0, 6.0], dtype=torch.float64)
    assert groups.sum(values).tolist() == [5.0, 9.0]
    assert groups.mean(values).tolist() == [5.0, 3.0]
    assert groups.least(values).tolist() == [5.0, 1.0]


@given(st.lists(st.integers(-5, 5) | st.integers(-(2**62), 2**62)))
def test_groups_are_numbered_alike_however_far_their_numbers_lie_apart(index: list[int]) -> None:
    found = groups_of(torch.tensor(index, dtype=torch.int64))
    names = sorted(set(index))
    assert found.member.tolist() == [names.index(one) for one in index]
    assert found.size.tolist() == [index.count(one) for one in names]


def test_rewards_that_only_round_alike_are_not_constant() -> None:
    rewards = torch.tensor([0.3, 0.3 + 1e-12], dtype=torch.float64)
    index = torch.zeros(2, dtype=torch.int64)
    assert constant_groups(rewards, index).tolist() == [False, False]
    assert constant_groups(rewards, index, within=1e-6).tolist() == [True, True]


@given(SAMPLES, st.floats(1e-6, 1.0))
def test_a_deviation_that_is_allowed_makes_a_group_constant(
    samples: list[tuple[float, int]], within: float
) -> None:
    rewards = torch.tensor([reward for reward, _ in samples], dtype=torch.float64)
    index = torch.tensor([group for _, group in samples], dtype=torch.int64)
    for (_, group), found in zip(
        samples, constant_groups(rewards, index, within=within).tolist(), strict=True
    ):
        members = [reward for reward, its in samples if its == group]
        spread = statistics.stdev(members) if len(members) > 1 else 0.0
        assert found == (spread <= within) or abs(spread - within) < 1e-12


def test_one_sample_is_constant_and_nan_is_not() -> None:
    rewards = torch.tensor([1.0, math.nan, 0.0, math.nan, math.inf, math.inf])
    index = torch.tensor([0, 1, 2, 2, 3, 3])
    for within in (0.0, 1e-6):
        found = constant_groups(rewards, index, within=within)
        assert found.tolist() == [True, False, False, False, True, True]


def test_inputs_of_different_length_are_refused() -> None:
    with pytest.raises(StageError, match="group_index has 1 along S, expected 2"):
        constant_groups(torch.ones(2), torch.zeros(1, dtype=torch.int64))
