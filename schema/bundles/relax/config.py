"""The settings of a Relax replay bundle, each stated or said to be not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trajreplay.schema.bundles import fields as read
from trajreplay.schema.bundles.fields import Fields
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


def read_config(config: Fields, major: int) -> tuple[RecomputeConfig, list[str]]:
    """Read the settings of a bundle.

    Args:
        config: The object `config` of its index.
        major: Its format. Format 2 has no reward stages, and says nothing of their settings.

    Returns:
        The settings, and which of them are not stated: none is guessed, and no stage of such a
        bundle reads them.

    Raises:
        DatasetError: One is missing, of another type, or unknown.
    """
    known = _BOTH | _REWARD | _LATER
    config.refuse_unknown(known, "a setting that is not known may change the arithmetic")
    needed = _BOTH | _REWARD if major == 1 else _BOTH
    values = {name: config.get(name, take) for name, take in needed.items()}
    values |= {name: config.get(name, take) for name, take in known.items() if name in config}
    unstated = [path for name, path in _PATHS.items() if name not in config]
    return RecomputeConfig(**values), unstated
