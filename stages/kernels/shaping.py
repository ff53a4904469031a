"""Rewards shaped before they are normalised: scales, clips, lengths and truncation."""

import torch
from torch import Tensor

from trajreplay.stages.kernels.options import check_option, check_positive, check_range, in_dtype_of
from trajreplay.stages.kernels.segments import check_shapes

TRUNCATION_RULES = ("multiply", "replace")


def scale_rewards(
    rewards: Tensor, *, source: tuple[float, float], target: tuple[float, float]
) -> Tensor:
    """Map one range of rewards onto another.

        y = t_0 + (clamp(r, s_0, s_1) - s_0) (t_1 - t_0) / (s_1 - s_0)

    Args:
        rewards: (S,) float. One reward per sample.
        source: s, the range that rewards are clamped to. Unit of `rewards`.
        target: t, the range that they are mapped to.

    Returns:
        (S,) in the dtype of `rewards` if that is floating, else float64. Unit of `target`.

    Raises:
        StageError: `rewards` have not one axis, or `source` is not wider than 0.

    Conventions:
        Runs in float64. Applied before any other shaping, and to each component of a reward, as
        in NeMo-RL. A target that falls turns rewards into costs. NaN stays NaN.

    Source:
        NeMo-RL, reward_scaling.

    >>> scale_rewards(torch.tensor([-1.0, 0.5, 3.0]), source=(0.0, 1.0), target=(-1.0, 1.0))
    tensor([-1.,  0.,  1.])
    """
    check_shapes("scale_rewards", rewards=(rewards, "S"))
    check_range("scale_rewards", "source", *source)
    check_positive("scale_rewards", "the width of source", source[1] - source[0])
    share = (rewards.double().clamp(*source) - source[0]) / (source[1] - source[0])
    return in_dtype_of(rewards, target[0] + share * (target[1] - target[0]))


def overlong_penalty(
    lengths: Tensor,
    *,
    max_length: float,
    buffer: float,
    penalty: float = 1.0,
    floored: bool = False,
) -> Tensor:
    """Punish responses that come near the longest allowed one.

        e = l - (max_length - buffer)      y = min(-e / buffer * penalty, 0)

    Args:
        lengths: (S,) integer or float, l. Tokens of each response.
        max_length: The longest response. Token.
        buffer: The last tokens before it, which are punished. Token.
        penalty: What a response of the longest length loses. Unit of the reward.
        floored: Whether longer responses lose no more than that.

    Returns:
        (S,) in the dtype of `lengths` if that is floating, else float64. To be added to a reward,
        in its unit.

    Raises:
        StageError: `lengths` have not one axis, or the buffer is not more than 0.

    Conventions:
        Runs in float64. Not floored in NeMo-RL, verl's DAPO and AReaL, floored in OpenRLHF. The
        length is that of the response in verl, of the first assistant message in NeMo-RL, and the
        sum of the loss mask in AReaL.

    Source:
        Yu et al. 2025, DAPO, section 3.4, arXiv:2503.14476, which floors it.

    >>> lengths = torch.tensor([90, 96, 100, 110])
    >>> overlong_penalty(lengths, max_length=100, buffer=8)
    tensor([-0.0000, -0.5000, -1.0000, -2.2500], dtype=torch.float64)
    >>> overlong_penalty(lengths, max_length=100, buffer=8, floored=True)
    tensor([-0.0000, -0.5000, -1.0000, -1.0000], dtype=torch.float64)
    """
    check_shapes("overlong_penalty", lengths=(lengths, "S"))
    check_positive("overlong_penalty", "the buffer", buffer)
    exceeded = (lengths.double() - (max_length - buffer)).clamp(min=0.0)
    if floored:
        exceeded = exceeded.clamp(max=buffer)
    return in_dtype_of(lengths, -exceeded / buffer * penalty)


def truncation_rewards(
    rewards: Tensor, truncated: Tensor, *, coefficient: float, rule: str = "multiply"
) -> Tensor:
    """Punish responses that did not stop by themselves.

        y = r coefficient (multiply) or coefficient (replace) where truncated, else r

    Args:
        rewards: (S,) float. One reward per sample.
        truncated: (S,) bool, integer or float. Not 0 where the response was cut off.
        coefficient: A factor, or a reward.
        rule: `multiply` or `replace`.

    Returns:
        (S,) in the dtype of `rewards` if that is floating, else float64. Unit of `rewards`.

    Raises:
        StageError: The inputs differ in length, or there is no such rule.

    Conventions:
        Runs in float64. NeMo-RL multiplies, and then leaves the overlong penalty out. OpenRLHF
        multiplies where the coefficient is 0 or more and replaces where it is less; there both
        penalties may be on. Multiplying by less than 1 rewards a truncated response whose reward is
        negative.

    Source:
        NeMo-RL and OpenRLHF, stop_properly_penalty_coef.

    >>> rewards, truncated = torch.tensor([1.0, 2.0]), torch.tensor([0, 1])
    >>> truncation_rewards(rewards, truncated, coefficient=0.25)
    tensor([1.0000, 0.5000])
    >>> truncation_rewards(rewards, truncated, coefficient=-1.0, rule="replace")
    tensor([ 1., -1.])
    """
    check_shapes("truncation_rewards", rewards=(rewards, "S"), truncated=(truncated, "S"))
    check_option("truncation_rewards", "rule", rule, TRUNCATION_RULES)
    raw = rewards.double()
    punished = raw * coefficient if rule == "multiply" else torch.full_like(raw, coefficient)
    return in_dtype_of(rewards, torch.where(truncated != 0, punished, raw))
