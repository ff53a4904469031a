"""The loss of a critic, token by token: squared or Huber, clipped to its old value or not."""

from typing import NamedTuple

import torch
from torch import Tensor

from trajreplay.schema import StageError
from trajreplay.stages.kernels.options import check_option, check_positive
from trajreplay.stages.kernels.segments import check_shapes

COUNTS = ("loss", "value")


class ValueLoss(NamedTuple):
    """The loss of each token, and 1 where it counts as clipped."""

    value_loss: Tensor
    clipped: Tensor


def value_loss(
    values: Tensor,
    returns: Tensor,
    old_values: Tensor | None = None,
    *,
    value_clip: float | None = None,
    factor: float = 0.5,
    huber_delta: float | None = None,
    counted: str = "loss",
) -> ValueLoss:
    """Score each value by its distance from the return.

        h(x) = x^2      or, with huber_delta, x^2 if |x| < delta else delta (2 |x| - delta)
        loss = factor max(h(v - R), h(b - R))      b = v_old + clamp(v - v_old, -c, c)
        loss: clipped = h(b - R) > h(v - R)      value: clipped = |v - v_old| > c

    Args:
        values: (N,) float. The critic's now. Unit of the reward.
        returns: (N,) float. Unit of the reward.
        old_values: (N,) float. The critic's before the update. Unit of the reward.
        value_clip: c; None for no clip. Unit of the reward.
        factor: What the loss is multiplied by. Dimensionless.
        huber_delta: Where the loss becomes linear; None for a square. Unit of the reward.
        counted: What counts as clipped, the `loss` or the `value`.

    Returns:
        Two (N,) tensors in the dtype of the inputs: value_loss (squared unit of the reward) and
        clipped, 1 or 0, all 0 without a clip (dimensionless).

    Raises:
        StageError: The inputs differ in length, old values are missing with a clip, a width is not
            positive, or `counted` is neither.

    Conventions:
        slime and Relax: factor 1, clip 0.2 always on, counted by value. The others count by loss:
        verl and OpenRLHF 0.5 with clip 0.5 (OpenRLHF also none), NeMo-RL 0.5 and no clip, AReaL
        0.5 with clip 0.5, square or Huber with delta 10, TRL PPO 0.5 times its coefficient 0.1
        with clip 0.2. NaN in any input gives a NaN loss that is not clipped. Masks are not looked
        at.

    Source:
        Schulman et al. 2017, PPO, equation 9, arXiv:1707.06347; the clip: openai/baselines, ppo2.

    >>> v, old_values, returns = torch.tensor([0.5]), torch.tensor([0.0]), torch.tensor([1.0])
    >>> value_loss(v, returns, old_values, value_clip=0.25)
    ValueLoss(value_loss=tensor([0.2812]), clipped=tensor([1.]))
    """
    check_shapes("value_loss", values=(values, "N"), returns=(returns, "N"))
    check_option("value_loss", "counted", counted, COUNTS)
    if huber_delta is not None:
        check_positive("value_loss", "huber_delta", huber_delta)
    plain = _distance(values - returns, huber_delta)
    if value_clip is None:
        return ValueLoss(factor * plain, torch.zeros_like(plain))
    check_positive("value_loss", "value_clip", value_clip)
    if old_values is None:
        raise StageError(
            "value_loss: old_values is None, expected (N,) values with a value_clip",
            hint="Capture the values before the update, or give value_clip=None.",
        )
    check_shapes("value_loss", values=(values, "N"), old_values=(old_values, "N"))
    moved = values - old_values
    bounded = old_values + moved.clamp(-value_clip, value_clip)
    limited = _distance(bounded - returns, huber_delta)
    clipped = limited > plain if counted == "loss" else moved.abs() > value_clip
    return ValueLoss(factor * torch.maximum(plain, limited), clipped.to(plain.dtype))


def _distance(x: Tensor, huber_delta: float | None) -> Tensor:
    if huber_delta is None:
        return x.square()
    size = x.abs()
    return torch.where(size < huber_delta, x.square(), huber_delta * (2.0 * size - huber_delta))
