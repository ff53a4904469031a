"""The arithmetic of slime, read from its own arguments."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from trajreplay.capture.slime.identity import place
from trajreplay.schema.contracts import StageContract
from trajreplay.schema.recompute import RecomputeConfig
from trajreplay.schema.settings import Settings
from trajreplay.schema.settings.profiles import with_changes

AS_GRPO = ("grpo", "gspo", "cispo")  # which differ in the loss alone
_CLIPPED = ("grpo", "gspo", "ppo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")


def settings_of(args: Any) -> Settings:
    """The settings of a rollout: the arguments of slime have the names of the short form."""
    names = [one.name for one in fields(RecomputeConfig)]
    given = {name: getattr(args, name) for name in names if getattr(args, name, None) is not None}
    if given.get("advantage_estimator") in AS_GRPO:
        given["advantage_estimator"] = "grpo"
    settings = RecomputeConfig(**given).resolve()
    if place().context_size > 1:
        padding = "batch" if getattr(args, "qkv_format", None) == "bshd" else "sequence"
        changes = {"layout.context": "zigzag", "layout.context_padding": padding}
        return with_changes(settings, changes)
    return settings


def loss_settings(args: Any, *, on_policy: bool) -> Settings:
    """The settings of a step.

    Args:
        args: slime's arguments.
        on_policy: Whether there are no old log-probs, so that the ratio is one.
    """
    per_token = bool(getattr(args, "calculate_per_token_loss", False))
    changes: dict[str, Any] = {
        "loss.aggregation": "token-mean" if per_token else "seq-mean-token-mean",
        "loss.batch_reduction": "sum",
        "loss.dual_clip": getattr(args, "eps_clip_c", None),
        "loss.use_kl_loss": "kl_loss" in scalars_of(args),
        "loss.kl_loss_coef": float(getattr(args, "kl_loss_coef", 0.0) or 0.0),
        "loss.kl_loss_estimator": getattr(args, "kl_loss_type", None) or "k1",
        "loss.kl_loss_weight": "rollout" if args.use_rollout_logprobs else "old",
        "loss.kl_loss_weighted": bool(getattr(args, "use_unbiased_kl", False)),
        "loss.tis": bool(getattr(args, "use_tis", False)),
        "loss.opsm": bool(getattr(args, "use_opsm", False)),
        "loss.opd": False,  # it is in the advantages
        "loss.per_token": per_token,
    }
    if args.advantage_estimator == "gspo":
        changes["loss.ratio"] = "sequence-mean"
    elif args.advantage_estimator == "cispo":
        changes["loss.surrogate"] = "cispo"
    if changes["loss.tis"]:
        low, high = getattr(args, "tis_clip_low", 0.0), getattr(args, "tis_clip", 2.0)
        changes |= {"loss.correction": "tis", "loss.correction_bounds": (float(low), float(high))}
    if changes["loss.opsm"]:
        changes["loss.opsm_delta"] = float(args.opsm_delta)
    if on_policy:
        changes["loss.ratio"] = "one"
    return with_changes(settings_of(args), changes)


def scalars_of(args: Any) -> tuple[str, ...]:
    """The scalars of the loss; a KL whose coefficient is 0 is a mere metric to slime."""
    scalars = ("loss", "pg_loss", "pg_clipfrac", "ppo_kl", "entropy_loss")
    if getattr(args, "use_kl_loss", False) and getattr(args, "kl_loss_coef", 0.0):
        return (*scalars, "kl_loss")
    return scalars


def loss_contract(args: Any, *, alone: bool | None) -> StageContract:
    """What is claimed of the policy loss.

    Args:
        args: slime's arguments.
        alone: Whether each sample is the only one of its rollout of a prompt, over whose tokens
            slime takes a mean; None where that is not known.
    """
    per_token = bool(getattr(args, "calculate_per_token_loss", False))
    reasons = {
        f"advantage_estimator is {args.advantage_estimator!r}": args.advantage_estimator
        not in (*_CLIPPED, "cispo"),
        "a custom function corrected for the rollout": bool(
            getattr(args, "custom_tis_function_path", None)
        ),
        "a custom function reduced the loss": bool(
            getattr(args, "custom_pg_loss_reducer_function_path", None)
        ),
        "score centering needs the sampler's head": bool(
            getattr(args, "use_score_centering", False)
        ),
        "the loss is of reinforce": getattr(args, "pg_loss_type", None) == "reinforce",
        "a context-parallel rank has its part of each mean": place().context_size > 1,
        "a mean is one over several samples of a rollout": alone is False and not per_token,
        "what a mean is divided by is not known without record_rollout": alone is None
        and not per_token,
    }
    reason = next((one for one, holds in reasons.items() if holds), "")
    if reason:
        return StageContract("loss.policy", "recorded-only", reason=reason)
    return StageContract("loss.policy", scalars=scalars_of(args))
