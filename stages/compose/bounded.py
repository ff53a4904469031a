"""The policy loss of V1, and bounds of what float32 may change of it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from trajreplay.schema import LossSettings
from trajreplay.stages.capability import LOG_PROB_SOURCES
from trajreplay.stages.kernels import (
    MeanError,
    policy_loss_error,
    ppo_clip,
    ppo_clip_error,
    seq_mean_token_mean_error,
)


def plain_terms(settings: LossSettings, columns: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The terms of a loss that has nothing but a clip and an entropy bonus, a value a token.

    Args:
        settings: The loss in force.
        columns: (N,) float each: `log_probs`, the old ones, `advantages`, and `entropy` if there.

    Returns:
        By scalar, (N,) in the dtype of the columns.
    """
    clip = ppo_clip(
        *_inputs(settings, columns),
        eps_clip=settings.eps_clip,
        eps_clip_high=settings.eps_clip_high,
    )
    terms = {"pg_loss": clip.pg_loss, "pg_clipfrac": clip.clipped, "ppo_kl": clip.ppo_kl}
    return terms | ({"entropy_loss": columns["entropy"]} if "entropy" in columns else {})


def plain_errors(
    settings: LossSettings, columns: Mapping[str, Tensor], mask: Tensor, offsets: Tensor
) -> dict[str, MeanError]:
    """Bounds of each sample's mean of those terms, and of the loss, by scalar.

    Args:
        settings: The loss in force.
        columns: As of `plain_terms`.
        mask: (N,) bool. Trainable tokens.
        offsets: (S+1,) int64. Where the tokens of each sample begin.
    """
    clip = ppo_clip_error(
        *_inputs(settings, columns),
        eps_clip=settings.eps_clip,
        eps_clip_high=settings.eps_clip_high,
    )
    token_errors = {
        "pg_loss": clip.pg_loss,
        "pg_clipfrac": clip.undecided,
        "ppo_kl": clip.ppo_kl,
        "entropy_loss": None,
    }
    errors = {
        name: seq_mean_token_mean_error(values, token_errors[name], mask, offsets)
        for name, values in plain_terms(settings, columns).items()
    }
    entropy = errors.get("entropy_loss")
    if entropy is None:
        return errors | {"loss": errors["pg_loss"]}
    coef = settings.entropy_coef
    return errors | {"loss": policy_loss_error(errors["pg_loss"], entropy, entropy_coef=coef)}


def _inputs(settings: LossSettings, columns: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    old = columns[LOG_PROB_SOURCES[settings.old_source]]
    return columns["log_probs"], old, columns["advantages"]
