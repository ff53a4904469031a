import pytest
import torch
from torch import Tensor

from tests.helpers.devices import DEVICES
from trajreplay.stages.kernels import (
    cost_penalised_rewards,
    decoupled_rewards,
    discounted_returns,
    distillation_advantages,
    gae_advantages,
    gpg_rewards,
    kl_penalised_advantages,
    kl_penalised_rewards,
    length_adaptive_lambda,
    normalise_rewards,
    optimal_token_advantages,
    overlong_penalty,
    override_advantages,
    pass_at_k_rewards,
    remax_advantages,
    scale_rewards,
    summed_rewards,
    token_rewards,
    truncation_rewards,
    whiten,
)
from trajreplay.stages.kernels.normalise import DIVISORS, GROUP_BASELINES


def every_kernel(
    device: str, dtype: torch.dtype, lengths: list[int], rounded: torch.dtype = torch.float64
) -> list[Tensor]:
    """Run every kernel from rewards to advantages on a rollout that is the same everywhere.

    Args:
        device: Where.
        dtype: That of the numbers.
        lengths: Response tokens of each sample.
        rounded: The dtype that the numbers have been in before.
    """
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0)
    samples, tokens = len(lengths), sum(lengths)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.rand(3, tokens, generator=generator).to(device, rounded).to(dtype)
    log_probs, values, kl = -drawn[0], drawn[1], drawn[2]
    mask, sets = drawn[2] < 0.8, torch.arange(tokens, device=device) % 2
    groups = torch.arange(samples, device=device) % 2
    raw = torch.arange(samples, device=device, dtype=dtype)
    components = torch.stack([raw, raw.flip(0) ** 2], 1)
    weights = torch.ones(2, device=device)

    placed = token_rewards(raw, mask, offsets, kl=kl, kl_coef=0.1)
    return [
        *(
            normalise_rewards(
                raw,
                groups,
                baseline=baseline,
                divisor=divisor,
                lengths=offsets.diff(),
                greedy_rewards=raw.flip(0),
            )
            for baseline in GROUP_BASELINES
            for divisor in DIVISORS
        ),
        summed_rewards(components, weights, missing="exclude"),
        decoupled_rewards(components, weights, groups),
        scale_rewards(raw, source=(0.0, 1.0), target=(-1.0, 1.0)),
        truncation_rewards(raw, groups, coefficient=0.5),
        cost_penalised_rewards(raw, components, groups, weights=(0.25, 0.1)),
        overlong_penalty(offsets.diff().to(dtype), max_length=8, buffer=4),
        placed,
        discounted_returns(placed, mask, offsets, gamma=raw / 4.0, masking="carry"),
        remax_advantages(placed, raw, mask, offsets),
        kl_penalised_advantages(raw, kl, offsets, kl_coef=0.1),
        kl_penalised_rewards(raw, kl, mask, offsets, kl_coef=0.1),
        *gae_advantages(placed, values, mask, offsets, lam=0.9, masking="carry", bootstrap=raw),
        length_adaptive_lambda(offsets.diff().to(dtype), alpha=0.5),
        whiten(values, mask),
        whiten(values, mask, set_index=sets, one_pass=True),
        gpg_rewards(raw, groups),
        pass_at_k_rewards(raw, groups),
        distillation_advantages(log_probs, -values, advantages=kl),
        override_advantages(values, mask, advantage=-1.0),
        optimal_token_advantages(placed, log_probs, 1 + kl, mask, groups, offsets),
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("lengths", [[5, 5, 5, 5], [3, 0, 9, 8]])
def test_every_kernel_runs_on_the_device_of_its_inputs(device: str, lengths: list[int]) -> None:
    expected = every_kernel("cpu", torch.float64, lengths)
    for value, on_cpu in zip(every_kernel(device, torch.float64, lengths), expected, strict=True):
        assert value.device.type == device
        torch.testing.assert_close(value.cpu(), on_cpu, rtol=1e-6, atol=1e-9, equal_nan=True)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_keep_the_dtype_of_their_inputs(device: str, dtype: torch.dtype) -> None:
    assert {one.dtype for one in every_kernel(device, dtype, [3, 0, 9, 8])} == {dtype}
