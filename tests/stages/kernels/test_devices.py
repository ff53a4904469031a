import pytest
import torch
from torch import Tensor

from tests.helpers.devices import DEVICES
from trajreplay.stages.kernels import (
    approx_kl,
    approx_kl_error,
    constant_groups,
    group_rewards,
    group_rewards_error,
    grpo_advantages,
    half_ulp,
    policy_loss,
    policy_loss_error,
    ppo_clip,
    ppo_clip_error,
    scatter_sum,
    scatter_sum_error,
    segment_max,
    segment_sum,
    seq_mean_token_mean,
    seq_mean_token_mean_error,
)


def every_kernel(device: str, dtype: torch.dtype, lengths: list[int]) -> list[Tensor]:
    """Run every kernel on a step that is the same on each device."""
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    samples, tokens = len(lengths), sum(lengths)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(3, tokens, generator=generator).to(device, dtype)
    log_probs, old, entropy = -drawn[0], -drawn[1], drawn[2]
    mask = drawn[2] < 0.8
    groups = torch.arange(samples, device=device) % 2
    raw = torch.arange(samples, device=device, dtype=dtype)

    rewards = group_rewards(raw, groups)
    advantages = grpo_advantages(rewards, offsets.diff())
    clip = ppo_clip(log_probs, old, advantages)
    bounds = ppo_clip_error(log_probs, old, advantages)
    pg = seq_mean_token_mean(clip.pg_loss, mask, offsets)
    pg_error = seq_mean_token_mean_error(clip.pg_loss, bounds.pg_loss, mask, offsets)
    entropy_mean = seq_mean_token_mean(entropy, mask, offsets)
    entropy_error = seq_mean_token_mean_error(entropy, None, mask, offsets)
    loss_error = policy_loss_error(pg_error, entropy_error, entropy_coef=0.01)
    return [
        rewards,
        group_rewards_error(raw, groups),
        constant_groups(raw, groups),
        approx_kl(log_probs, old),
        approx_kl_error(log_probs, old),
        half_ulp(log_probs, "bfloat16"),
        *clip,
        *bounds,
        *pg,
        *pg_error,
        policy_loss(pg.mean, entropy_mean.mean, entropy_coef=0.01),
        *scatter_sum_error(loss_error, groups, 2),
        scatter_sum(pg.mean, groups, 2),
        segment_sum(log_probs, offsets),
        segment_max(log_probs, offsets),
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [[5, 5, 5, 5], [3, 0, 9, 8]])
def test_every_kernel_runs_on_the_device_of_its_inputs(device: str, lengths: list[int]) -> None:
    expected = every_kernel("cpu", torch.float64, lengths)
    for value, on_cpu in zip(every_kernel(device, torch.float64, lengths), expected, strict=True):
        assert value.device.type == device
        torch.testing.assert_close(value.cpu(), on_cpu, rtol=1e-9, atol=1e-12, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [[5, 5, 5, 5], [3, 0, 9, 8]])
def test_values_keep_the_dtype_of_their_inputs(device: str, lengths: list[int]) -> None:
    wide = every_kernel(device, torch.float64, lengths)
    narrow = every_kernel(device, torch.float32, lengths)
    assert {one.dtype for one in wide} == {torch.float64, torch.bool}
    assert {one.dtype for one in narrow} == {torch.float64, torch.float32, torch.bool}
