import math
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers import reference_advantages as references
from tests.helpers.packed import Packed, float32s, packed, pools
from trajreplay.schema import StageError
from trajreplay.stages.kernels import (
    distillation_advantages,
    gpg_rewards,
    override_advantages,
    pass_at_k_rewards,
)

ROWS = packed(max_samples=6, max_tokens=12)
VALUES = pools(float32s(-10.0, 10.0), size=16)
REWARDS = st.floats(-100, 100) | st.sampled_from([0.0, 0.3, 1.0])
SAMPLES = st.lists(st.tuples(REWARDS, st.integers(0, 3)), max_size=16)
FOUR = torch.tensor([1.0, 0.0, 0.0, 0.5])
ONE_GROUP = torch.zeros(4, dtype=torch.int64)


def tensors(samples: list[tuple[float, int]]) -> tuple[Tensor, Tensor]:
    rewards = torch.tensor([reward for reward, _ in samples], dtype=torch.float64)
    return rewards, torch.tensor([group for _, group in samples], dtype=torch.int64)


@given(SAMPLES, st.sampled_from([1.0, 2.5]))
def test_gpg_equals_a_loop(samples: list[tuple[float, int]], f_norm: float) -> None:
    rewards, groups = tensors(samples)
    batches = groups // 2
    scored = gpg_rewards(rewards, groups, batch_index=batches, f_norm=f_norm)
    expected = references.gpg_rewards(rewards.tolist(), groups.tolist(), batches.tolist(), f_norm)
    assert scored.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


@given(SAMPLES, st.booleans())
def test_pass_at_k_equals_a_loop(samples: list[tuple[float, int]], divide_by_std: bool) -> None:
    samples = [*samples, *((0.25, group) for group in range(4) for _ in range(2))]
    rewards, groups = tensors(samples)
    options: dict[str, Any] = {"divide_by_std": divide_by_std, "epsilon": 1e-6}
    scored = pass_at_k_rewards(rewards, groups, **options)
    expected = references.pass_at_k_rewards(rewards.tolist(), groups.tolist(), **options)
    assert scored.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(SAMPLES, st.randoms(use_true_random=False))
def test_order_of_samples_does_not_matter(samples: list[tuple[float, int]], random: Random) -> None:
    samples = [*samples, *((0.25, group) for group in range(4) for _ in range(2))]
    rewards, groups = tensors(samples)
    order = random.sample(range(len(samples)), len(samples))
    for kernel in (gpg_rewards, pass_at_k_rewards):
        moved, expected = kernel(rewards[order], groups[order]), kernel(rewards, groups)[order]
        torch.testing.assert_close(moved, expected, rtol=1e-9, atol=1e-9)


def test_golden_gpg_and_pass_at_k() -> None:
    """G02."""
    assert gpg_rewards(FOUR, ONE_GROUP).tolist() == [1.25, -0.75, -0.75, 0.25]
    assert pass_at_k_rewards(FOUR, ONE_GROUP).tolist() == pytest.approx([1.04446375, 0, 0, 0])
    plain = pass_at_k_rewards(FOUR, ONE_GROUP, divide_by_std=False)
    assert plain.tolist() == [0.5, 0.0, 0.0, 0.0]


def test_gpg_of_rewards_that_are_all_0_is_0_and_a_lone_one_is_kept() -> None:
    assert gpg_rewards(torch.zeros(2), torch.tensor([0, 0])).tolist() == [0.0, 0.0]
    assert gpg_rewards(torch.tensor([2.0, 0.0]), torch.arange(2)).tolist() == [4.0, 0.0]
    assert gpg_rewards(torch.tensor([2.0]), torch.tensor([0]), lone="zero").tolist() == [0.0]


def test_several_best_samples_have_no_lead() -> None:
    rewards, groups = torch.tensor([0.3, 0.3, 0.1, 0.7, 0.7]), torch.tensor([0, 0, 0, 1, 1])
    assert pass_at_k_rewards(rewards, groups).tolist() == [0.0] * 5


@pytest.mark.parametrize("kernel", [gpg_rewards, pass_at_k_rewards])
def test_an_undefined_reward_reaches_its_group_only(kernel: Any) -> None:
    rewards = torch.tensor([math.nan, 1.0, 1.0, 0.0])
    scored = kernel(rewards, torch.tensor([0, 0, 1, 1]))
    assert scored.isnan().tolist() == [True, True, False, False]


@given(ROWS, VALUES, VALUES, st.sampled_from([0.0, 1.0, -0.5]), st.booleans())
def test_distillation_equals_a_loop(
    rows: Packed,
    pool: list[float],
    teacher: list[float],
    coefficient: float,
    estimated: bool,
) -> None:
    log_probs, teacher_log_probs = rows.tensor(pool), rows.tensor(teacher)
    advantages = rows.tensor(pool[::-1]) if estimated else None
    result = distillation_advantages(
        log_probs,
        teacher_log_probs,
        advantages=advantages,
        coefficient=coefficient,
    )
    before = [0.0] * rows.tokens if advantages is None else advantages.tolist()
    expected = [
        a - coefficient * (student - taught)
        for a, student, taught in zip(
            before, log_probs.tolist(), teacher_log_probs.tolist(), strict=True
        )
    ]
    assert result.tolist() == pytest.approx(expected, abs=1e-12)


@given(ROWS, VALUES, st.sampled_from([math.nan, -1.0]))
def test_overrides_reach_flagged_tokens_only(
    rows: Packed, pool: list[float], advantage: float
) -> None:
    advantages = rows.tensor(pool)
    result = override_advantages(advantages, rows.mask, advantage=advantage)
    expected = [
        advantage if flag else one
        for one, flag in zip(advantages.tolist(), rows.loss_mask, strict=True)
    ]
    assert result.tolist() == pytest.approx(expected, nan_ok=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_dtype_is_kept_and_inputs_are_not_changed(dtype: torch.dtype) -> None:
    values = FOUR.to(dtype)
    for result in (
        gpg_rewards(values, ONE_GROUP),
        pass_at_k_rewards(values, ONE_GROUP),
        distillation_advantages(values, values),
        override_advantages(values, torch.zeros(4), advantage=1.0),
    ):
        assert result.dtype == dtype
        result.zero_()
    assert values.tolist() == FOUR.tolist()


def test_what_does_not_fit_is_refused() -> None:
    three, four = torch.ones(3), torch.ones(4)
    with pytest.raises(StageError, match=r"f_norm is 0\.0, expected more than 0"):
        gpg_rewards(FOUR, ONE_GROUP, f_norm=0.0)
    with pytest.raises(StageError, match="batch_index has 3 along S, expected 4"):
        gpg_rewards(FOUR, ONE_GROUP, batch_index=three)
    with pytest.raises(StageError, match="1 of 2 groups have one sample, expected two or more"):
        pass_at_k_rewards(FOUR, torch.tensor([0, 0, 0, 1]))
    with pytest.raises(StageError, match="ddof is 3, expected 0 or 1"):
        pass_at_k_rewards(FOUR, ONE_GROUP, ddof=3)
    with pytest.raises(StageError, match="teacher_log_probs has 3 along N, expected 4"):
        distillation_advantages(four, three)
    with pytest.raises(StageError, match="flagged has 3 along N, expected 4"):
        override_advantages(four, three, advantage=0.0)
