import math

import pytest
import torch
from hypothesis import given

from tests.helpers import references
from tests.helpers.packed import Packed, float32s, packed, pools
from trajreplay.schema import StageError
from trajreplay.stages.kernels import grpo_advantages


@given(packed(), pools(float32s(-10.0, 10.0)))
def test_equals_a_loop_over_tokens(rows: Packed, pool: list[float]) -> None:
    rewards = [pool[sample % len(pool)] for sample in range(len(rows.lengths))]
    advantages = grpo_advantages(
        torch.tensor(rewards), torch.tensor(rows.lengths, dtype=torch.int64)
    )
    assert advantages.tolist() == references.grpo_advantages(rewards, rows.lengths)


@pytest.mark.parametrize("lengths", [[1, 1], [2, 1], [2, 2]])
def test_values_are_copied_bit_for_bit_and_not_shared(lengths: list[int]) -> None:
    rewards = torch.tensor([math.nan, -0.0])
    advantages = grpo_advantages(rewards, torch.tensor(lengths))
    assert advantages[0].isnan()
    assert math.copysign(1.0, advantages[-1].item()) == -1.0
    advantages.zero_()
    assert rewards[0].isnan()


def test_samples_without_tokens_add_nothing() -> None:
    rewards = torch.tensor([1.0, 2.0])
    assert grpo_advantages(rewards, torch.tensor([0, 0])).tolist() == []
    assert grpo_advantages(rewards[:0], torch.tensor([], dtype=torch.int64)).tolist() == []


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(StageError, match="a sample has -1 tokens"):
        grpo_advantages(torch.ones(2), torch.tensor([2, -1]))
