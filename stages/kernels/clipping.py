"""Policy losses of tokens that clip a ratio, PPO, GSPO and CISPO, and the one without a ratio."""

from typing import NamedTuple

import torch
from torch import Tensor

from trajreplay.schema import StageError
from trajreplay.stages.kernels.options import check_option
from trajreplay.stages.kernels.policy import ppo_clip, ratio_bounds
from trajreplay.stages.kernels.segments import check_shapes

SIDES = ("negative", "both")
BOUNDS = ("two-sided", "by-sign", "upper-absolute")


class ClipLoss(NamedTuple):
    """The loss of each token and where a bound changed it."""

    pg_loss: Tensor
    clipped: Tensor
    dual_clipped: Tensor


class CispoLoss(NamedTuple):
    """The loss of each token, its bounded ratio and where the bound changed it."""

    pg_loss: Tensor
    weight: Tensor
    clipped: Tensor


def clip_loss(
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    dual_clip: float | None = None,
    dual_side: str = "negative",
) -> ClipLoss:
    """Score each token by the clipped surrogate of a given log-ratio, with or without dual clip.

        r = exp(l)      b = clamp(r, 1 - eps, 1 + eps_high)      pg_loss = max(-A r, -A b)
        negative: for A < 0 min(pg_loss, -c A)      both: max(-A min(r, c), -A b)

    Args:
        log_ratio: (N,) float. Of tokens, as `log_ratio` gives it, or of samples, as
            `sequence_log_ratio` does. Nat.
        advantages: (N,) float. Dimensionless.
        eps_clip: How far below 1 the ratio counts. Dimensionless.
        eps_clip_high: How far above 1, the same as below if None. Dimensionless.
        dual_clip: c, more than 1; None for none. Dimensionless.
        dual_side: The advantages that c bounds, `negative` or `both`.

    Returns:
        Three (N,) tensors in the dtype of the inputs: pg_loss; clipped, 1 where b made the loss
        strictly larger; dual_clipped, 1 where c then made that of a negative advantage strictly
        smaller. Dimensionless.

    Raises:
        StageError: The inputs differ in length, the side is neither, or c is not more than 1.

    Conventions:
        verl has c = 3 unless told otherwise; slime, NeMo-RL, OpenRLHF and AReaL have none. TRL's
        delta bounds the ratio for both signs, which is the same where c >= 1 + eps_high. Both
        counts leave out an advantage of 0 and a ratio on its bound; TRL counts ratios outside
        their bounds, the same tokens. GSPO in AReaL also replaces the advantages by their mean
        over the sample. Masks are not looked at.

    Source:
        Schulman et al. 2017, PPO, equation 7, arXiv:1707.06347; dual clip: Ye et al. 2020,
        arXiv:1912.09729; samples: Zheng et al. 2025, GSPO, equation 5, arXiv:2507.18071.

    >>> tokens = clip_loss(torch.tensor([2.0, 2.0]), torch.tensor([1.0, -1.0]), dual_clip=3.0)
    >>> tokens.pg_loss, tokens.dual_clipped
    (tensor([-1.2000,  3.0000]), tensor([0., 1.]))
    """
    check_shapes("clip_loss", log_ratio=(log_ratio, "N"), advantages=(advantages, "N"))
    check_option("clip_loss", "dual_side", dual_side, SIDES)
    if dual_clip is not None and not dual_clip > 1.0:
        raise StageError(
            f"clip_loss: dual_clip is {dual_clip}, expected more than 1",
            hint="Give None for no dual clip.",
        )
    tokens = ppo_clip(
        log_ratio,
        torch.zeros_like(log_ratio),
        advantages,
        eps_clip=eps_clip,
        eps_clip_high=eps_clip_high,
    )
    if dual_clip is None:
        return ClipLoss(tokens.pg_loss, tokens.clipped, torch.zeros_like(tokens.pg_loss))
    weight = -advantages
    limit = weight * dual_clip
    dual_clipped = (advantages < 0.0) & (tokens.pg_loss > limit)
    if dual_side == "negative":
        pg_loss = torch.where(dual_clipped, limit, tokens.pg_loss)
    else:
        low, high = ratio_bounds(eps_clip, eps_clip_high)
        bounded = weight * tokens.ratio.clamp(low, high)
        pg_loss = torch.maximum(weight * tokens.ratio.clamp(max=dual_clip), bounded)
    return ClipLoss(pg_loss, tokens.clipped, dual_clipped.to(pg_loss.dtype))


def cispo_loss(
    log_probs: Tensor,
    log_ratio: Tensor,
    advantages: Tensor,
    *,
    eps_clip: float = 0.2,
    eps_clip_high: float | None = None,
    bounds: str = "two-sided",
) -> CispoLoss:
    """Weigh the log-probability of each token by its bounded ratio.

        pg_loss = -b A log pi      r = exp(l)
        two-sided: b = clamp(r, 1 - eps, 1 + eps_high)      upper-absolute: b = min(r, eps_high)
        by-sign: b = min(r, 1 + eps_high) if A >= 0 else max(r, 1 - eps)

    Args:
        log_probs: (N,) float. Log-probability of each token under the current policy. Nat.
        log_ratio: (N,) float. Current to old policy. Nat.
        advantages: (N,) float. Dimensionless.
        eps_clip: How far below 1 the ratio counts; not looked at if the bound is absolute.
            Dimensionless.
        eps_clip_high: How far above 1, the same as below if None; or the highest ratio itself if
            the bound is absolute. Dimensionless.
        bounds: `two-sided`, `by-sign` or `upper-absolute`.

    Returns:
        Three (N,) tensors in the dtype of the inputs: pg_loss (nat); weight, which is b, and
        clipped, 1 or 0 (dimensionless).

    Raises:
        StageError: The inputs differ in length, the bounds are none of these, or an absolute
            bound is missing.

    Conventions:
        Two-sided in slime, verl and NeMo-RL; by sign in Relax; absolute in TRL, where 0.28 bounds
        the ratio by 0.28 and not by 1.28. No gradient flows through b. clipped counts any change
        of the ratio, as slime and verl; TRL counts only positive advantages, and so does
        `upper-absolute`. Masks are not looked at.

    Source:
        MiniMax 2025, MiniMax-M1, equation 4, arXiv:2506.13585.

    >>> tokens = cispo_loss(torch.tensor([-0.5]), torch.tensor([1.0]), torch.tensor([1.0]))
    >>> tokens.pg_loss, tokens.weight
    (tensor([0.6000]), tensor([1.2000]))
    """
    check_shapes(
        "cispo_loss",
        log_probs=(log_probs, "N"),
        log_ratio=(log_ratio, "N"),
        advantages=(advantages, "N"),
    )
    check_option("cispo_loss", "bounds", bounds, BOUNDS)
    ratio = log_ratio.exp()
    low, high = ratio_bounds(eps_clip, eps_clip_high)
    if bounds == "two-sided":
        weight = ratio.clamp(low, high)
        clipped = weight != ratio
    elif bounds == "by-sign":
        weight = torch.where(advantages >= 0.0, ratio.clamp(max=high), ratio.clamp(min=low))
        clipped = weight != ratio
    else:
        if eps_clip_high is None:
            raise StageError(
                "cispo_loss: eps_clip_high is None, expected the highest ratio",
                hint="With bounds='upper-absolute' there is no default.",
            )
        weight = ratio.clamp(max=eps_clip_high)
        clipped = (weight != ratio) & (advantages > 0.0)
    clipped &= ~torch.isnan(ratio)
    return CispoLoss(-weight * advantages * log_probs, weight, clipped.to(ratio.dtype))


def policy_gradient_loss(log_probs: Tensor, advantages: Tensor) -> Tensor:
    """Weigh the log-probability of each token by its advantage.

        pg_loss = -A log pi

    Args:
        log_probs: (N,) float. Log-probability of each token under the current policy. Nat.
        advantages: (N,) float. Dimensionless.

    Returns:
        (N,) in the dtype of the inputs. Nat.

    Raises:
        StageError: The inputs differ in length.

    Conventions:
        GPG in verl, RLOO in Relax, `disable_ppo_ratio` in NeMo-RL, `reinforce` in verl's bypass
        mode: no ratio and no bound, so that the value depends on log pi itself.

    Source:
        Williams 1992, REINFORCE, doi:10.1007/BF00992696.

    >>> policy_gradient_loss(torch.tensor([-0.5, -1.0]), torch.tensor([2.0, -1.0]))
    tensor([ 1., -1.])
    """
    check_shapes("policy_gradient_loss", log_probs=(log_probs, "N"), advantages=(advantages, "N"))
    return -advantages * log_probs
