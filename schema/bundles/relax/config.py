"""The settings of a Relax replay bundle, each stated or said to be not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trajreplay.schema.bundles import fields as read
from trajreplay.schema.bundles.fields import Fields
from trajreplay.schema.errors import CaptureError
from trajreplay.schema.recompute import RecomputeConfig

_Read = Callable[[Any], Any]
_BOTH: dict[str, _Read] = {
    "advantage_estimator": read.text,
    "kl_loss_type": read.text,
    "kl_coef": read.finite,
    "eps_clip": read.finite,
    "eps_clip_high": read.finite,
    "entropy_coef": read.finite,
}
_REWARD: dict[str, _Read] = {
    "n_samples_per_prompt": read.count,
    "grpo_std_normalization": read.flag,
}
_LATER: dict[str, _Read] = dict.fromkeys(
    (
        *("rewards_normalization", "use_rollout_logprobs", "use_kl_loss", "use_tis"),
        *("use_opsm", "use_opd", "calculate_per_token_loss"),
    ),
    read.flag,
)
_PATHS = {
    "n_samples_per_prompt": "reward.n_samples_per_prompt",
    "grpo_std_normalization": "reward.divide_by_std",
}


def read_config(config: Fields, *, with_reward: bool) -> tuple[RecomputeConfig, list[str]]:
    """Read the settings of a bundle.

    Args:
        config: The object `config` of its index.
        with_reward: Whether the rewards are recomputed, so that their settings have to be stated.
            Format 2 has no reward stages, and says nothing of them.

    Returns:
        The settings, and which of them are not stated: none is guessed, and no stage of such a
        bundle reads them.

    Raises:
        DatasetError: One is missing, of another type, or unknown.
    """
    known = _BOTH | _REWARD | _LATER
    config.refuse_unknown(known, "a setting that is not known may change the arithmetic")
    needed = _BOTH | _REWARD if with_reward else _BOTH
    values = {name: config.get(name, take) for name, take in needed.items()}
    values |= {name: config.get(name, take) for name, take in known.items() if name in config}
    unstated = [path for name, path in _PATHS.items() if name not in config]
    return RecomputeConfig(**values), unstated


def write_config(settings: RecomputeConfig, with_reward: bool) -> dict[str, Any]:
    """The settings as the index of a bundle has them.

    Args:
        settings: The settings.
        with_reward: Whether the rewards are recomputed: else what nobody stated is left out.

    Raises:
        CaptureError: They say something that a bundle cannot.
    """
    high = settings.eps_clip if settings.eps_clip_high is None else settings.eps_clip_high
    values = {name: getattr(settings, name) for name in (*_BOTH, *_REWARD)}
    values["eps_clip_high"] = high
    if settings.n_samples_per_prompt is None:
        if with_reward:
            raise CaptureError(
                "reward.n_samples_per_prompt is not stated, and a bundle with rewards states it"
            )
        del values["n_samples_per_prompt"], values["grpo_std_normalization"]
    plain = RecomputeConfig()
    odd = [name for name in _LATER if getattr(settings, name) != getattr(plain, name)]
    if odd:
        raise CaptureError(
            f"a bundle of format 1.0.0 cannot say the settings {', '.join(odd)}",
            hint="Export a lake instead: trajreplay export lake.",
        )
    return values
