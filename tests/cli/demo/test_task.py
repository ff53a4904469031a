"""The toy task: its rewards, its tool, and the sampler that meets both."""

import pytest
import torch

from trajreplay.cli.demo.config import TrainingConfig
from trajreplay.cli.demo.policy import Policy, response_statistics
from trajreplay.cli.demo.sampler import Sample, Sampler
from trajreplay.cli.demo.schedule import plan_requests
from trajreplay.cli.demo.task import EOS, MAX_RESPONSE_LENGTH, TOOL, Prompt, raw_reward


@pytest.mark.parametrize(
    ("written", "reward"),
    [
        ([1, 2, 4, EOS], 1.0),
        ([4, 2, 1, EOS], 0.75),
        ([1, 2, 4, TOOL, EOS], 0.75),
        ([1, 2, 4], 0.75),
        ([1, 2, 5, EOS], 0.9375),
        ([3, 4, EOS], 0.875),
        ([7, EOS], 0.5),
        ([EOS], 0.0),
        ([9] * MAX_RESPONSE_LENGTH, 0.0),
    ],
)
def test_the_reward_has_levels(written: list[int], reward: float) -> None:
    assert raw_reward(Prompt(target=7, count=3), written) == reward


@pytest.fixture
def sampled() -> list[Sample]:
    """Responses whose sampler got new weights after four tokens."""
    torch.manual_seed(0)
    policy = Policy()
    sampler = Sampler(policy, temperature=1.0, seed=0)
    sampler.start(plan_requests(TrainingConfig(), 0))
    sampler.advance(4)
    sampler.load_weights(policy, version=2)
    return sampler.finish()


def test_responses_are_ragged_and_end(sampled: list[Sample]) -> None:
    assert len({sample.response_length for sample in sampled}) > 3
    assert all(sample.finished for sample in sampled)
    assert all(EOS not in sample.response[:-1] for sample in sampled)


def test_only_what_the_tool_wrote_is_masked(sampled: list[Sample]) -> None:
    for sample in sampled:
        called = sample.response_length > 1 and sample.response[0] <= 9
        expected = [1, 0, 0, 1] if called else [1, 1, 1, 1]
        assert sample.loss_mask[:4] == expected[: sample.response_length]
        assert all(sample.loss_mask[4:])
    assert any(0 in sample.loss_mask for sample in sampled)


def test_a_response_may_cross_weight_versions(sampled: list[Sample]) -> None:
    for sample in sampled:
        length = sample.response_length
        crossed = [(0, 4, 0), (4, length, 2)]
        assert sample.weight_versions == (crossed if length > 4 else [(0, length, 0)])


def test_the_trainer_finds_the_log_probs_that_the_sampler_drew_with(sampled: list[Sample]) -> None:
    torch.manual_seed(0)
    log_probs, entropy = response_statistics(
        Policy(),
        [sample.tokens for sample in sampled],
        [sample.response_length for sample in sampled],
        temperature=1.0,
    )
    for sample, trained, spread in zip(sampled, log_probs, entropy, strict=True):
        assert len(trained) == len(spread) == sample.response_length
        wrote = torch.tensor(sample.loss_mask, dtype=torch.bool)
        torch.testing.assert_close(trained[wrote], torch.tensor(sample.rollout_log_probs)[wrote])
