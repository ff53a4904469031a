"""What a scalar of the policy loss is off by only if no rounding is behind it, at little cost."""

from __future__ import annotations

import torch
from torch import Tensor

from trajreplay.schema.settings import LossSettings
from trajreplay.stages.kernels import segment_sum
from trajreplay.stages.losses.sample_losses import SampleLosses

# A term errs by far less than this share of itself, or of this in all: float32 rounds to 2**-24,
# and a ratio of probabilities to that share of its logarithm.
_ROUGH = 2.0**-5
# Corrections and ratios whose weight of a token moves little where a bound or a log-prob does; not
# those that become 0, nor products over whole samples, in which the rounding of every token adds
# up.
_CORRECTIONS = ("none", "tis", "geometric-tis")
_RATIOS = ("token", "sequence-mean", "one")


def continuous_scalars(settings: LossSettings) -> tuple[str, ...]:
    """The scalars in which no token counts for more where rounding moves it over a bound.

    >>> continuous_scalars(LossSettings())
    ('entropy_loss', 'ppo_kl', 'kl_loss', 'pg_loss', 'loss')
    >>> continuous_scalars(LossSettings(opsm_delta=0.1))
    ('entropy_loss', 'ppo_kl', 'kl_loss')
    >>> continuous_scalars(LossSettings(veto=1e-4))
    ()
    """
    if settings.rejection or settings.veto is not None or settings.m2_threshold is not None:
        return ()
    found = ["entropy_loss", "ppo_kl"]
    if not settings.kl_loss_weighted:
        found.append("kl_loss")
    smooth = (
        settings.surrogate == "ppo-clip"
        and settings.ratio in _RATIOS
        and settings.correction in _CORRECTIONS
        and settings.undefined_weight is None
        and settings.opsm_delta is None
    )
    if smooth:
        found.append("pg_loss")
        if not settings.kl_loss_weighted or not settings.kl_loss_coef:
            found.append("loss")
    return tuple(found)


def least_wrong(
    settings: LossSettings,
    losses: SampleLosses,
    name: str,
    samples: Tensor,
    *,
    by_batch: bool = False,
) -> float:
    """The least that a total is off by if more than rounding is behind it.

    The loss is not evaluated once more for it, as it is for the bounds of `SampleLosses.errors`,
    far above which it lies.

    Args:
        settings: The loss in force.
        losses: Its terms.
        name: The scalar.
        samples: (K,) int64. Packed sample numbers.
        by_batch: Whether each enters with its share of the mean of its micro-batch.

    Returns:
        Infinity where a token that rounding moves over a bound may change anything.
    """
    terms, coefs = losses.tokens.terms, {name: 1.0}
    own = losses.of_tokens.of_kernel or name in losses.of_batches
    if own or name not in continuous_scalars(settings):
        return torch.inf
    if name == "loss":
        coefs = {"pg_loss": 1.0, **losses.of_tokens.coefs}
    weights = losses.token_shares(name)
    size = torch.zeros_like(weights)
    for one in coefs.keys() & terms.keys():
        size += abs(coefs[one]) * (terms[one].abs() + _ROUGH) * weights
    of_samples = segment_sum(size, losses.offsets)
    if by_batch:
        of_samples = of_samples * losses.aggregates.shares(name)
    return _ROUGH * float(of_samples[samples].sum())
