"""The arithmetic of verl, read from its own configuration where that is passed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trajreplay.schema.contracts import StageContract
from trajreplay.schema.settings import Settings
from trajreplay.schema.settings.profiles import profile, with_changes

_CLAMP = (-20.0, 20.0)
_CAPPED = 20.0  # of the ratio in dppo, where the configuration says nothing
# What each mode of its aggregation is here; what it divides by is told with each loss.
_AGGREGATIONS = {
    "token-mean": "token-mean",
    "token-sum": "token-mean",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "seq-mean-token-sum-norm": "seq-mean-token-sum",
    "seq-mean-token-mean": "seq-mean-token-mean",
}
# What each kind of its KL penalty is here; the two names of k3 are clamped twice.
_K3 = {
    "loss.kl_loss_estimator": "k3",
    "loss.kl_loss_clamp": (-10.0, 10.0),
    "loss.kl_loss_log_ratio_clamp": (-20.0, 20.0),
}
_PENALTIES: dict[str, dict[str, Any]] = {
    "kl": {"loss.kl_loss_estimator": "k1"},
    "k1": {"loss.kl_loss_estimator": "k1"},
    "abs": {"loss.kl_loss_estimator": "abs"},
    "mse": {"loss.kl_loss_estimator": "k2"},
    "k2": {"loss.kl_loss_estimator": "k2"},
    "low_var_kl": _K3,
    "k3": _K3,
}
_THROUGH = "+"  # behind a kind: its value, with the gradient of k2
_CENTRED = {"reward.divide_by_std": False}
_WHITE = {"advantage.whiten": "cohort"}
_TOKENS = {
    "reward.grouping": "none",
    "advantage.reward_source": "token",
    "advantage.masking": "carry",
}
# What each estimator changes of the profile of verl.
_ESTIMATORS: dict[str, dict[str, Any]] = {
    "gae": {**_TOKENS, **_WHITE, "advantage.estimator": "gae"},
    "grpo": {},
    "grpo_passk": {"reward.rule": "pass@k"},
    "grpo_vectorized": {},
    "opo": {**_CENTRED, "reward.baseline": "length-weighted"},
    "reinforce_plus_plus": {**_TOKENS, **_WHITE, "advantage.estimator": "reinforce++"},
    "reinforce_plus_plus_baseline": {
        **_CENTRED,
        **_WHITE,
        "advantage.estimator": "reinforce++-baseline",
    },
    "rloo": {**_CENTRED, "reward.baseline": "leave-one-out"},
    "rloo_vectorized": {**_CENTRED, "reward.baseline": "leave-one-out", "reward.lone": "zero"},
}
BY_TOKEN = ("gae", "reinforce_plus_plus")  # which take the rewards of tokens as they are
WHITENED = ("reinforce_plus_plus_baseline",)  # whose advantages do not show what was whitened


@dataclass
class Terms:
    """What verl added to a policy loss.

    Attributes:
        entropy, entropy_loss: Of each token, and as one number; None where there is none.
        ref_log_probs, kl_kind, penalty, kl_loss: Of the reference, the kind of the penalty, the
            penalty of each token, and as one number.
    """

    entropy: Any = None
    entropy_loss: Any = None
    ref_log_probs: Any = None
    kl_kind: str = ""
    penalty: Any = None
    kl_loss: Any = None

    @property
    def scalars(self) -> dict[str, Any]:
        """The numbers that they came to."""
        told = {"entropy_loss": self.entropy_loss, "kl_loss": self.kl_loss}
        return {name: one for name, one in told.items() if one is not None}

    @property
    def estimator(self) -> str:
        """The kind of the penalty, however its gradient is made."""
        return self.kl_kind.removesuffix(_THROUGH)

    @property
    def passes_through(self) -> bool:
        """Whether the gradient of the penalty is that of another kind."""
        return (
            self.kl_kind.endswith(_THROUGH) and _PENALTIES.get(self.estimator) != _PENALTIES["k2"]
        )


def loss_settings(name: str, mode: str, config: Any, terms: Terms) -> Settings:
    """The policy loss that a registered function computes, with what is added to it.

    Args:
        name: Its name in the registry.
        mode: `loss_agg_mode`.
        config: verl's ActorConfig.
        terms: What is added.
    """
    low, high = config.clip_ratio_low, config.clip_ratio_high
    general = {
        "loss.eps_clip": float(config.clip_ratio if low is None else low),
        "loss.eps_clip_high": float(config.clip_ratio if high is None else high),
        "loss.aggregation": _AGGREGATIONS.get(_mode(name, mode), "token-mean"),
        "loss.denominator_rows": "with-tokens",
        "loss.dual_clip": None,
        "loss.log_ratio_clamp": _CLAMP,
        "loss.use_kl_loss": terms.kl_loss is not None,
        "loss.tis": False,
        "loss.opsm": False,
        "loss.opd": False,
        "loss.per_token": _mode(name, mode).startswith("token"),
    }
    if _mode(name, mode) == "token-sum":
        general["loss.batch_reduction"] = "sum"
    if terms.kl_loss is not None:
        general["loss.kl_loss_coef"] = float(config.kl_loss_coef)
        general |= _PENALTIES.get(terms.estimator, {})
    if terms.entropy_loss is not None:
        general["loss.entropy_coef"] = float(config.entropy_coeff)
    if terms.scalars and _mode(name, mode) != mode:
        own = _AGGREGATIONS.get(mode, "token-mean")
        general |= {"loss.entropy_aggregation": own, "loss.kl_loss_aggregation": own}
    special = _LOSSES[name](config) if name in _LOSSES else {}
    return with_changes(profile("verl").settings, general | special)


def loss_contract(
    name: str, mode: str, *, weighted: bool, terms: Terms, told: Mapping[str, Any]
) -> StageContract:
    """What is claimed of that loss.

    Args:
        name: Its name in the registry.
        mode: `loss_agg_mode`.
        weighted: Whether it takes weights against the sampler.
        terms: What is added to it.
        told: What verl's aggregation was told of the batch.
    """
    apart = bool(terms.scalars) and _mode(name, mode) != mode
    # One scalar states one denominator: over a batch, the loss and its terms have one each.
    counts = any(told.get(one) is not None for one in ("batch_num_tokens", "global_batch_size"))
    unlike = apart and (counts or _AGGREGATIONS.get(mode) != mode)
    reasons = {
        f"its terms are aggregated by {mode!r}, and {name} is not": unlike,
        f"kl_loss_type is {terms.kl_kind!r}": terms.kl_loss is not None
        and terms.estimator not in _PENALTIES,
        f"loss_mode is {name!r}": name not in _LOSSES,
        f"loss_agg_mode is {mode!r}": _mode(name, mode) not in _AGGREGATIONS,
        "losses are weighted by rollout_is_weights": weighted,
    }
    reason = next((one for one, holds in reasons.items() if holds), "")
    if reason:
        return StageContract("loss.policy", "recorded-only", reason=reason)
    return StageContract("loss.policy", scalars=("loss", "pg_loss", *terms.scalars))


def value_settings(mode: str, clip: float) -> Settings:
    """The value loss.

    Args:
        mode: `loss_agg_mode`.
        clip: `cliprange_value`.
    """
    changes = {
        "loss.aggregation": _AGGREGATIONS.get(mode, "token-mean"),
        "loss.denominator_rows": "with-tokens",
        "loss.per_token": mode.startswith("token"),
        "value.clip": float(clip),
    }
    return with_changes(profile("verl").settings, changes)


def value_contract(mode: str) -> StageContract:
    """What is claimed of the value loss."""
    if mode not in _AGGREGATIONS:
        return StageContract("loss.value", "recorded-only", reason=f"loss_agg_mode is {mode!r}")
    return StageContract("loss.value", scalars=("value_loss",))


def loss_meaning(name: str, mode: str, told: Mapping[str, Any], width: int) -> dict[str, Any]:
    """How a loss of a micro-batch was reduced, scaled and divided.

    Args:
        name: Its name in the registry.
        mode: `loss_agg_mode`.
        told: What verl's aggregation was told of the batch.
        width: Tokens that its samples are padded to.
    """
    mode, scale = _mode(name, mode), float(told.get("dp_size") or 1)
    if mode == "token-sum":
        return {"reduction": "sum", "scale": scale}
    if mode == "seq-mean-token-sum-norm":
        scale = scale / float(told.get("loss_scale_factor") or width)
    counted = "batch_num_tokens" if mode == "token-mean" else "global_batch_size"
    meaning = {"reduction": "mean", "scale": scale}
    if (given := told.get(counted)) is not None:
        meaning["denominator"] = float(given)
    return meaning


def _mode(name: str, mode: str) -> str:
    """Sapo adds up in its own way, whatever is asked for."""
    return "seq-mean-token-mean" if name == "sapo" else mode


def _dppo(measure: str) -> Callable[[Any], dict[str, Any]]:
    return lambda config: {
        "loss.surrogate": "dppo",
        "loss.dppo_form": "log-prob",
        "loss.dppo_measure": measure,
        "loss.dppo_ratio_cap": float(config.get("clip_ratio_c", _CAPPED)),
    }


_LOSSES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "vanilla": lambda config: {"loss.dual_clip": float(config.get("clip_ratio_c", 3.0))},
    "cispo": lambda config: {"loss.surrogate": "cispo"},
    "dppo_kl": _dppo("binary-kl"),
    "dppo_tv": _dppo("difference"),
    "dro": lambda config: {
        "loss.surrogate": "dro",
        "loss.dro_beta": float(config.policy_loss.dro_beta),
        "loss.log_ratio_clamp": None,
    },
    "gpg": lambda config: {"loss.surrogate": "reinforce", "loss.log_ratio_clamp": None},
    "gspo": lambda config: {
        "loss.ratio": "sequence-mean",
        "loss.log_ratio_clamp": None,
        "loss.sequence_log_ratio_clamp": (-math.inf, 10.0),
    },
    "sapo": lambda config: {
        "loss.surrogate": "sapo",
        "loss.sapo_tau_pos": float(config.tau_pos),
        "loss.sapo_tau_neg": float(config.tau_neg),
    },
    "kl_cov": lambda config: {
        "loss.surrogate": "kl-cov",
        "loss.log_ratio_clamp": None,
        "loss.kl_cov_fraction": float(config.policy_loss.kl_cov_ratio),
        "loss.kl_cov_coef": float(config.policy_loss.ppo_kl_coef),
    },
}


def advantage_settings(name: str, given: Mapping[str, Any]) -> Settings:
    """The estimator of a name in the registry.

    Args:
        name: Its name.
        given: What it was called with, by name.
    """
    changes = dict(_ESTIMATORS.get(name, {}))
    config = given.get("config")
    for field, key in (("advantage.gamma", "gamma"), ("advantage.lam", "lam")):
        value = given.get(key, getattr(config, key, None))
        if value is not None and name in BY_TOKEN:
            changes[field] = float(value)
    if name.startswith("grpo"):
        changes["reward.epsilon"] = float(given.get("epsilon", 1e-6))
        changes["reward.divide_by_std"] = bool(given.get("norm_adv_by_std_in_grpo", True))
    return with_changes(profile("verl").settings, {"reward.grouping": "group", **changes})


def advantage_stages(name: str, shows_rewards: bool) -> list[StageContract]:
    """What is claimed of a rollout.

    Args:
        name: The estimator.
        shows_rewards: Whether each sample has trained tokens, of which one shows its reward.
    """
    reason = "" if name in _ESTIMATORS else f"adv_estimator is {name!r}"
    hidden = "" if shows_rewards else "a sample without trained tokens shows no reward"
    if name in WHITENED:
        reason = "advantages that were whitened show no reward"
    return [
        StageContract("sample"),
        StageContract("reward.raw"),
        _contract("reward.post_process", reason or hidden),
        _contract("advantage.estimate", reason),
    ]


def _contract(stage: str, reason: str) -> StageContract:
    return StageContract(stage, "recorded-only", reason=reason) if reason else StageContract(stage)
