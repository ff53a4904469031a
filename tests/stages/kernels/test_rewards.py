import math
from collections.abc import Callable
from random import Random

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers import references
from tests.helpers.packed import float32s
from trajreplay.schema import StageError
from trajreplay.stages.kernels import constant_groups, group_rewards, group_rewards_error

F = np.float32
Floats = npt.NDArray[np.float32]


def in_torch(rewards: Floats) -> Floats:
    r = torch.from_numpy(rewards)
    c = r - r.mean()
    return (c / (c.std(correction=1) + 1e-6)).numpy()


def in_numpy(rewards: Floats) -> Floats:
    c = rewards - rewards.mean(dtype=F)
    result: Floats = c / (c.std(ddof=1, dtype=F) + F(1e-6))
    return result


def by_raw_spread(rewards: Floats) -> Floats:
    result: Floats = (rewards - rewards.mean(dtype=F)) / (rewards.std(ddof=1, dtype=F) + F(1e-6))
    return result


def one_by_one(rewards: Floats) -> Floats:
    n = F(len(rewards))
    mean = sum(rewards, F(0)) * (F(1) / n)
    c = [reward - mean for reward in rewards]
    again = sum(c, F(0)) / n
    variance = sum(((one - again) * (one - again) for one in c), F(0)) / (n - F(1))
    return np.array([one / (np.sqrt(variance) + F(1e-6)) for one in c], dtype=F)


def by_welford(rewards: Floats) -> Floats:
    c = rewards - rewards.mean(dtype=F)
    mean = squares = F(0)
    for count, one in enumerate(c, start=1):
        delta = one - mean
        mean += delta / F(count)
        squares += delta * (one - mean)
    return np.array(c / (np.sqrt(squares / F(len(c) - 1)) + F(1e-6)), dtype=F)


TRAINERS = [in_torch, in_numpy, by_raw_spread, one_by_one, by_welford]

ANY = st.floats(-1e3, 1e3)
CHEERFUL = st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7, 1.0, -5.5])
GROUP = (
    st.lists(ANY, min_size=1, max_size=24)
    | st.lists(CHEERFUL, min_size=1, max_size=64)
    | st.builds(lambda reward, size: [reward] * size, ANY | CHEERFUL, st.integers(1, 64))
    | st.builds(
        lambda base, size, steps: [base + step * size for step in steps],
        ANY,
        st.sampled_from([1e-9, 1e-7, 1e-5, 1e-3]),
        st.lists(st.integers(-4, 4), min_size=2, max_size=16),
    )
)


@st.composite
def grouped(draw: st.DrawFn) -> tuple[list[float], list[int]]:
    """Draw the rewards of some groups, their samples shuffled together."""
    groups = draw(st.lists(GROUP, max_size=5))
    pairs = [(reward, 7 - 2 * group) for group, rewards in enumerate(groups) for reward in rewards]
    pairs = draw(st.permutations(pairs))
    return [reward for reward, _ in pairs], [group for _, group in pairs]


def tensors(rewards: list[float], groups: list[int]) -> tuple[Tensor, Tensor]:
    return torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups, dtype=torch.int64)


@given(
    grouped(),
    st.sampled_from(["mean", "none"]),
    st.booleans(),
    st.integers(0, 2),
    st.sampled_from([1e-6, 1e-4]),
)
def test_equals_a_loop_over_samples(
    samples: tuple[list[float], list[int]],
    baseline: str,
    divide_by_std: bool,
    ddof: int,
    epsilon: float,
) -> None:
    scored = group_rewards(
        *tensors(*samples),
        baseline=baseline,
        divide_by_std=divide_by_std,
        ddof=ddof,
        epsilon=epsilon,
    )
    expected = references.group_rewards(
        *samples, baseline=baseline, divide_by_std=divide_by_std, ddof=ddof, epsilon=epsilon
    )
    assert scored.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(grouped(), st.randoms())
def test_order_of_samples_does_not_matter(
    samples: tuple[list[float], list[int]], random: Random
) -> None:
    rewards, groups = tensors(*samples)
    order = torch.tensor(random.sample(range(len(rewards)), len(rewards)), dtype=torch.int64)
    scored = group_rewards(rewards[order], groups[order])
    torch.testing.assert_close(scored, group_rewards(rewards, groups)[order], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("trainer", TRAINERS)
@given(group=GROUP)
def test_float32_trainers_lie_within_the_bound(
    trainer: Callable[[Floats], Floats], group: list[float]
) -> None:
    if len(group) == 1:
        group = group * 2
    rewards, groups = tensors(group, [0] * len(group))
    trained = trainer(rewards.numpy().astype(F)).astype(np.float64)
    difference = np.abs(trained - group_rewards(rewards, groups).numpy())
    assert (difference <= group_rewards_error(rewards, groups).numpy()).all()


@given(GROUP)
def test_float32_without_division_lies_within_the_bound(group: list[float]) -> None:
    rewards, groups = tensors(group, [0] * len(group))
    narrow = rewards.float()
    for baseline, trained in (("mean", narrow - narrow.mean()), ("none", narrow)):
        exact = group_rewards(rewards, groups, baseline=baseline, divide_by_std=False)
        bound = group_rewards_error(rewards, groups, baseline=baseline, divide_by_std=False)
        assert ((trained.double() - exact).abs() <= bound).all()


@given(st.lists(float32s(0.0, 1.0), min_size=8, max_size=8).filter(lambda r: np.std(r) > 0.05))
def test_the_bound_of_spread_rewards_is_small(group: list[float]) -> None:
    assert group_rewards_error(*tensors(group, [0] * 8)).max() < 1e-4


def test_a_spread_of_a_few_ulps_is_not_taken_for_none() -> None:
    rewards, groups = tensors([1000.0 + step * 2.0**-13 for step in range(16)], [0] * 16)
    assert group_rewards_error(rewards, groups).max() < 5.0


def test_the_bound_of_whole_rewards_is_smaller_and_that_of_equal_ones_0() -> None:
    mixed = group_rewards_error(*tensors([1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0], [0] * 8))
    assert mixed.max() < 5e-6
    assert group_rewards_error(*tensors([1.0] * 8, [0] * 8)).tolist() == [0.0] * 8
    assert group_rewards_error(*tensors([-5.5] * 4, [3] * 4)).tolist() == [0.0] * 4


@pytest.mark.parametrize(("reward", "trained"), [(0.3, 0.0298023), (0.7, 0.0596), (0.1, -0.00745)])
def test_equal_rewards_score_0_and_the_float32_score_is_within_the_bound(
    reward: float, trained: float
) -> None:
    """G04: eight equal rewards, the mean of which float32 misses by a rounding."""
    rewards, groups = tensors([reward] * 8, [5] * 8)
    assert group_rewards(rewards, groups).tolist() == [0.0] * 8
    assert constant_groups(rewards, groups).all()
    bound = group_rewards_error(rewards, groups)
    assert (abs(trained) <= bound).all()
    assert (bound < 1.0).all()


def test_golden_group_of_eight() -> None:
    """G01."""
    raw = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    scored = group_rewards(*tensors(raw, [0] * 8))
    expected = [1.2076124 if reward else -0.724567413 for reward in raw]
    assert scored.tolist() == pytest.approx(expected, abs=5e-8)
    wider = group_rewards(*tensors(raw, [0] * 8), epsilon=1e-4)
    expected = [1.20738149 if reward else -0.724428833 for reward in raw]
    assert wider.tolist() == pytest.approx(expected, abs=1e-7)


def test_golden_groups_of_four_and_two() -> None:
    """G02, G03 and the groups of G06, which a whole batch as one group gets wrong."""
    four = [1.30557966, -0.783347785, -0.783347785, 0.2611159]
    three = [0.57735, 0.57735, -1.15470]
    assert group_rewards(*tensors([1.0, 0.0], [0, 0])).tolist() == pytest.approx(
        [0.707105756, -0.707105756], abs=5e-8
    )
    raw = [1.0, 0.0, 0.0, 0.5, 1.0, 1.0, 0.0]
    scored = group_rewards(*tensors(raw, [0] * 4 + [1] * 3)).tolist()
    assert scored[:4] == pytest.approx(four, abs=1e-7)
    assert scored[4:] == pytest.approx(three, abs=5e-6)
    batch = group_rewards(*tensors(raw, [0] * 7)).tolist()
    assert batch == pytest.approx([1, -1, -1, 0, 1, 1, -1], abs=2e-6)
    centred = group_rewards(*tensors(raw[:4], [0] * 4), divide_by_std=False)
    assert centred.tolist() == [0.625, -0.375, -0.375, 0.125]


def test_a_group_of_one_scores_0_and_is_exact() -> None:
    rewards, groups = tensors([5.1, 1.0, 0.0], [3, 1, 1])
    assert group_rewards(rewards, groups)[0] == 0.0
    assert group_rewards_error(rewards.float(), groups)[0] == 0.0
    assert group_rewards(rewards, groups, baseline="none")[0] == 5.1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_undefined_reward_reaches_its_group_only_and_has_no_bound(bad: float) -> None:
    rewards, groups = tensors([bad, 1.0, 0.0, 1.0, bad], [0, 0, 1, 1, 2])
    scored = group_rewards(rewards, groups)
    assert scored.isnan().tolist() == [True, True, False, False, True]
    bound = group_rewards_error(rewards, groups)
    assert bound.isnan().tolist() == [True, True, False, False, True]
    centred = group_rewards(rewards, groups, divide_by_std=False)
    assert not centred[0].isfinite()


def test_a_spread_that_may_be_0_over_no_epsilon_has_no_bound() -> None:
    assert group_rewards_error(*tensors([0.3] * 3, [0] * 3), epsilon=0.0).isnan().all()


def test_the_dtype_is_kept_and_sums_run_in_float64() -> None:
    rewards = torch.tensor([0.3] * 8)
    scored = group_rewards(rewards, torch.zeros(8, dtype=torch.int64))
    assert scored.dtype == torch.float32
    assert scored.tolist() == [0.0] * 8


def test_no_samples_score_nothing_and_inputs_are_not_changed() -> None:
    assert group_rewards(*tensors([], [])).tolist() == []
    assert group_rewards_error(*tensors([], [])).tolist() == []
    rewards, groups = tensors([1.0, 0.0], [0, 0])
    group_rewards(rewards, groups, baseline="none", divide_by_std=False).add_(1.0)
    assert rewards.tolist() == [1.0, 0.0]


@pytest.mark.parametrize("kernel", [group_rewards, group_rewards_error])
def test_an_unknown_baseline_is_refused(kernel: Callable[..., Tensor]) -> None:
    with pytest.raises(StageError, match="no baseline 'median', expected one of mean, none"):
        kernel(*tensors([1.0], [0]), baseline="median")
