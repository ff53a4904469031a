"""The clipped policy-gradient loss, token by token, and what float32 may change of it."""

from typing import NamedTuple

import torch
from torch import Tensor

from trajreplay.stages.kernels.precision import (
    FLOAT32_ROUNDOFF,
    FLOAT32_TINY,
    exp_error,
    finite_or_nan,
)
from trajreplay.stages.kernels.segments import check_shapes


class PpoClip(NamedTuple):
    """What the clipped loss is made of, one value a token."""

    log_ratio: Tensor
    ratio: Tensor
    pg_loss: Tensor
    clipped: Tensor

    @property
    def ppo_kl(self) -> Tensor:
        """`old_log_probs - log_probs`, the k1 estimate of old against current policy. Nat."""
        return -self.log_ratio


class PpoClipError(NamedTuple):
    """Bounds of a float32 evaluation, one value a token."""

    ppo_kl: Tensor
    pg_loss: Tensor
    undecided: Tensor


def ppo_clip(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
) -> PpoClip:
    """Score each token by the clipped surrogate of its probability ratio.

        r = exp(log pi - log old)      c = clamp(r, 1 - eps, 1 + eps_high)
        pg_loss = max(-A r, -A c)      clipped = -A c > -A r      ppo_kl = log old - log pi

    Args:
        log_probs: (N,) float. Log-probability of each token under the current policy. Nat.
        old_log_probs: (N,) float. The same before the update. Nat.
        advantages: (N,) float. Dimensionless.
        eps_clip: How far below 1 the ratio counts. Dimensionless.
        eps_clip_high: How far above 1, the same as below if None. Dimensionless.

    Returns:
        Four (N,) tensors in the dtype of the inputs: log_ratio (nat), ratio, pg_loss, and clipped,
        1 or 0 (dimensionless).

    Raises:
        StageError: The inputs differ in length.

    Conventions:
        The log ratio is not clamped (verl and OpenRLHF clamp it to -20 and 20) and there is no
        dual clip (verl has it on). A token counts as clipped if the loss strictly changes, so a
        ratio on a bound and an advantage of 0 do not; TRL counts by the ratio alone. NaN in any
        input gives a NaN loss that is not clipped. Masks are not looked at: masked tokens get
        values, which `seq_mean_token_mean` leaves out.

    Source:
        Schulman et al. 2017, PPO, equation 7, arXiv:1707.06347; bounds of different width: Yu et
        al. 2025, DAPO, section 3.1, arXiv:2503.14476.

    >>> old_log_probs, log_probs = torch.tensor([-1.0, -1.0]), torch.tensor([-0.5, -1.0])
    >>> tokens = ppo_clip(log_probs, old_log_probs, torch.tensor([1.0, -1.0]), eps_clip_high=0.28)
    >>> tokens.pg_loss, tokens.clipped
    (tensor([-1.2800,  1.0000]), tensor([1., 0.]))
    """
    _check("ppo_clip", log_probs, old_log_probs, advantages)
    low, high = ratio_bounds(eps_clip, eps_clip_high)
    log_ratio = log_probs - old_log_probs
    ratio = log_ratio.exp()
    weight = -advantages
    surrogate = weight * ratio
    bounded = ratio.clamp(low, high).mul_(weight)
    pg_loss = torch.maximum(surrogate, bounded)
    if bounded.requires_grad:
        return PpoClip(log_ratio, ratio, pg_loss, (bounded > surrogate).to(pg_loss.dtype))
    # In place, into floats: a third of the cost of a comparison that makes bools.
    return PpoClip(log_ratio, ratio, pg_loss, bounded.gt_(surrogate))


def ppo_clip_error(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
) -> PpoClipError:
    """Bound how far a float32 evaluation of `ppo_clip` may lie from the exact values.

        e(ppo_kl) = u |log r|      e(r) as of an exponential of an exponent that errs by that
        pg_loss = -A q with q = min(r, 1 + eps_high) if A > 0, else max(r, 1 - eps)
        e(pg_loss) = |A| e(q) + u |A| (q + e(q))
        undecided = |A| |r - bound| <= |A| (e(r) + e(bound) + 3 u bound)      for A != 0

    Args:
        log_probs: (N,) float. As consumed, without error. Nat.
        old_log_probs: (N,) float. As consumed, without error. Nat.
        advantages: (N,) float. As consumed, without error. Dimensionless.
        eps_clip: As in `ppo_clip`.
        eps_clip_high: As in `ppo_clip`.

    Returns:
        Three (N,) tensors: the bounds of ppo_kl (nat) and pg_loss (dimensionless) in float64, and
        undecided (bool): tokens whose clip comparison float32 may settle either way.

    Raises:
        StageError: The inputs differ in length.

    Conventions:
        e(q) is the larger half of the image of r +- e(r) under the bound, so that a token far
        beyond it errs by the rounding of the bound only. A token exactly on the bound of its sign
        is undecided, one on the other bound is not. Where an input is not finite the bound is NaN
        and the token is decided: agreement is `difference <= bound`, never
        `not difference > bound`. Where the ratio overflows float32 alone the bound stays finite.

    Source:
        Higham 2002, Accuracy and stability of numerical algorithms, section 2.2.

    >>> log_probs, advantages = torch.tensor([1.2, 1.3]).log(), torch.ones(2)
    >>> ppo_clip_error(log_probs, torch.zeros(2), advantages).undecided
    tensor([ True, False])
    """
    _check("ppo_clip_error", log_probs, old_log_probs, advantages)
    u = FLOAT32_ROUNDOFF
    low, high = ratio_bounds(eps_clip, eps_clip_high)
    x = log_probs.double() - old_log_probs.double()
    x_error = x.abs() * u
    # Beyond exp(700) both bounds are passed for good and only the width of the interval is asked.
    ratio = x.clamp(max=700.0).exp()
    ratio_error = exp_error(x, x_error)
    size = advantages.double().abs()
    gains = advantages > 0.0
    # 1 - eps is rounded once or, with eps rounded before it, twice.
    bound = torch.where(gains, high, low).double()
    bound_error = u * (bound.abs() + max(abs(high - 1.0), abs(1.0 - low)))

    def counted(value: Tensor, limit: Tensor) -> Tensor:
        return torch.where(gains, torch.minimum(value, limit), torch.maximum(value, limit))

    middle = counted(ratio, bound)
    above = counted(ratio + ratio_error, bound + bound_error) - middle
    below = middle - counted(ratio - ratio_error, bound - bound_error)
    middle_error = torch.maximum(above, below)
    loss_error = size * (middle_error + u * (middle.abs() + middle_error))
    loss_error = torch.where(size == 0.0, loss_error, loss_error + FLOAT32_TINY)
    margin = size * (ratio_error + bound_error + 3.0 * u * bound.abs()) + 2.0 * FLOAT32_TINY
    undecided = size * (ratio - bound).abs() <= margin
    undecided &= (size > 0.0) & torch.isfinite(margin)
    return PpoClipError(finite_or_nan(x_error), finite_or_nan(loss_error), undecided)


def _check(kernel: str, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> None:
    check_shapes(
        kernel,
        log_probs=(log_probs, "N"),
        old_log_probs=(old_log_probs, "N"),
        advantages=(advantages, "N"),
    )


def ratio_bounds(eps_clip: float, eps_clip_high: float | None) -> tuple[float, float]:
    """The lowest and the highest ratio; arguments as of `ppo_clip`."""
    return 1.0 - eps_clip, 1.0 + (eps_clip if eps_clip_high is None else eps_clip_high)
