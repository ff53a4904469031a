"""The V2 matrix: every name that the settings know, unless they contradict each other."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from trajreplay.schema.identity import ParallelCoordinates
from trajreplay.schema.settings import SECTIONS, Settings
from trajreplay.schema.settings.knobs import kinds
from trajreplay.stages.capability.ability import LOG_PROB_SOURCES, Ability

_BY_MICRO_BATCH = ("m2po", "kl-cov")
_Needs = tuple[tuple[str, ...], tuple[str, ...]]

# The settings that each stage reads, by section.
_SECTIONS = {
    "reward.post_process": ("reward",),
    "advantage.kl": ("kl",),
    "advantage.estimate": ("advantage",),
    "loss.policy": ("loss",),
    "loss.value": ("value", "loss"),
}


def ability(
    stage: str, settings: Settings, parallel: ParallelCoordinates, columns: Collection[str] = ()
) -> Ability:
    """Look a stage up in the V2 matrix; arguments as of V1's.

    >>> from trajreplay.schema.settings import RewardSettings
    >>> odd = Settings(reward=RewardSettings(grouping="stride"))
    >>> ability("reward.post_process", odd, ParallelCoordinates()).reason
    "reward.grouping is 'stride' and reward.n_samples_per_prompt is not stated"
    """
    if parallel.context_size != 1 and settings.layout.context == "unstated":
        reason = (
            f"context-parallel size is {parallel.context_size} and layout.context is not stated"
        )
        return Ability("unsupported", reason)
    if stage == "loss.policy" and (shown := _only_inspected(settings, columns)):
        return Ability("inspect-only", shown)
    reason = next(_unknown(stage, settings), "") or next(_contradictions(stage, settings), "")
    if reason:
        return Ability("unsupported", reason)
    reads, writes = _NEEDS[stage](settings, columns) if stage in _NEEDS else ((), ())
    return Ability("recompute", "", reads, writes, _takes_whole(stage, settings))


def _only_inspected(settings: Settings, columns: Collection[str]) -> str:
    """Why a policy loss can be looked at and not recomputed."""
    surrogate = settings.loss.surrogate
    if surrogate == "clip-cov":
        return "loss.surrogate is 'clip-cov', which chooses tokens at random"
    if surrogate in _BY_MICRO_BATCH and "micro_batch_id" not in columns:
        return f"loss.surrogate is {surrogate!r}, and the micro-batch of samples was not captured"
    return ""


def _takes_whole(stage: str, settings: Settings) -> bool:
    """Whether samples of other groups enter the result of one."""
    reward, advantage = settings.reward, settings.advantage
    if stage == "reward.post_process":
        by_batch = reward.grouping not in ("group", "none") or reward.std_grouping == "batch"
        return by_batch or reward.unit == "trajectory"
    if stage == "advantage.estimate":
        return advantage.whiten != "none"
    return False


def _unknown(stage: str, settings: Settings) -> Iterator[str]:
    """Names that no kernel goes by."""
    for section in _SECTIONS.get(stage, ()):
        for name, kind in kinds(SECTIONS[section]).items():
            found = getattr(getattr(settings, section), name)
            if kind.known and found not in kind.known:
                known = ", ".join(map(repr, kind.known))
                yield f"{section}.{name} is {found!r}; v2 recomputes {known}"


def _contradictions(stage: str, settings: Settings) -> Iterator[str]:
    checks = {"reward.post_process": _of_rewards, "loss.policy": _of_losses}
    checks |= {"advantage.estimate": _of_advantages, "loss.value": _of_values}
    if stage in checks:
        yield from checks[stage](settings)


def _of_rewards(settings: Settings) -> Iterator[str]:
    reward = settings.reward
    if reward.grouping == "stride" and not reward.n_samples_per_prompt:
        yield "reward.grouping is 'stride' and reward.n_samples_per_prompt is not stated"
    if reward.divisor == "baseline" and reward.baseline == "none":
        yield "reward.divisor is 'baseline' and reward.baseline is 'none'"
    if reward.ddof not in (0, 1):
        yield f"reward.ddof is {reward.ddof}; v2 recomputes 0 or 1"
    if reward.epsilon < 0:
        yield f"reward.epsilon is {reward.epsilon:g}, expected 0 or more"
    for name in ("scale_from", "scale_to", "clip_before", "clip_after"):
        bounds = getattr(reward, name)
        if bounds is not None and (bounds[0] == bounds[1] or not _is_range(name, bounds)):
            yield f"reward.{name} is {bounds}, expected a lower and a higher bound"
    if (reward.scale_from is None) != (reward.scale_to is None):
        yield "of reward.scale_from and reward.scale_to only one is stated"
    if reward.overlong_max_length is not None and not reward.overlong_buffer:
        yield "reward.overlong_max_length is stated and reward.overlong_buffer is 0"


def _of_advantages(settings: Settings) -> Iterator[str]:
    advantage = settings.advantage
    if advantage.kl_in_reward and advantage.estimator == "grpo":
        yield (
            "advantage.kl_in_reward is true and advantage.estimator is 'grpo', which has no token "
            "rewards"
        )
    if advantage.estimator == "gae" and advantage.masking == "reset":
        yield "advantage.masking is 'reset' and advantage.estimator is 'gae', which has no resets"
    if advantage.lam_alpha is not None and advantage.lam_alpha <= 0:
        yield f"advantage.lam_alpha is {advantage.lam_alpha:g}, expected more than 0"
    if advantage.whiten != "none" and advantage.whiten_ddof not in (0, 1):
        yield f"advantage.whiten_ddof is {advantage.whiten_ddof}; v2 recomputes 0 or 1"
    if advantage.kl_in_reward and settings.kl.coef == 0:
        yield "advantage.kl_in_reward is true and kl.coef is 0"


def _of_losses(settings: Settings) -> Iterator[str]:
    loss = settings.loss
    stated = (
        ("use_kl_loss", "kl_loss_coef", loss.kl_loss_coef != 0),
        ("tis", "correction", loss.correction != "none"),
        ("opsm", "opsm_delta", loss.opsm_delta is not None),
        ("per_token", "aggregation", loss.aggregation == "token-mean"),
    )
    for flag, field, on in stated:
        said = getattr(loss, flag)
        if said is not None and said != on:
            yield f"loss.{flag} is {said} and loss.{field} is {getattr(loss, field)!r}"
    if loss.opd:
        yield "loss.opd is True; v2 does not recompute the distillation term of the loss"
    if loss.correction != "none" and loss.correction_bounds is None:
        yield f"loss.correction is {loss.correction!r} and loss.correction_bounds are not stated"
    if loss.aggregation == "constant-norm" and not loss.constant_norm:
        yield "loss.aggregation is 'constant-norm' and loss.constant_norm is not stated"
    if loss.fragments == "shared" and loss.aggregation != "seq-mean-token-mean":
        yield f"loss.fragments are 'shared' and loss.aggregation is {loss.aggregation!r}"
    yield from _of_surrogates(settings)


def _of_surrogates(settings: Settings) -> Iterator[str]:
    loss = settings.loss
    if loss.dual_clip is not None and (loss.surrogate != "ppo-clip" or loss.dual_clip <= 0):
        yield f"loss.dual_clip is {loss.dual_clip:g} and loss.surrogate is {loss.surrogate!r}"
    if loss.surrogate == "dppo" and (loss.ratio != "token" or loss.log_ratio_clamp is not None):
        yield "loss.surrogate is 'dppo', and loss.ratio or loss.log_ratio_clamp is stated"
    of_tokens = ("gmpo", "vespo", *_BY_MICRO_BATCH)
    if loss.surrogate in of_tokens and loss.ratio.startswith("sequence"):
        yield f"loss.surrogate is {loss.surrogate!r} and loss.ratio is {loss.ratio!r}"
    if loss.surrogate == "gmpo" and loss.aggregation != "seq-mean-token-mean":
        yield f"loss.surrogate is 'gmpo' and loss.aggregation is {loss.aggregation!r}"
    if min(loss.eps_clip, loss.eps_clip_high or 0.0) < 0:
        yield f"loss.eps_clip, loss.eps_clip_high are {loss.eps_clip:g}, {loss.eps_clip_high}"
    if loss.surrogate == "sapo" and min(loss.sapo_tau_pos, loss.sapo_tau_neg) <= 0:
        yield f"loss.sapo_tau_pos, _neg are {loss.sapo_tau_pos:g}, {loss.sapo_tau_neg:g}"
    if loss.constant_norm is not None and loss.constant_norm <= 0:
        yield f"loss.constant_norm is {loss.constant_norm:g}, expected more than 0"


def _of_values(settings: Settings) -> Iterator[str]:
    for name in ("clip", "huber_delta"):
        found = getattr(settings.value, name)
        if found is not None and found <= 0:
            yield f"value.{name} is {found:g}, expected more than 0"


def _is_range(name: str, bounds: tuple[float, float]) -> bool:
    """Whether an interval can be clipped to or, of a scale, mapped."""
    inside = bounds[0] < float("inf") and bounds[1] > float("-inf")
    return inside and (not name.startswith("scale") or all(abs(one) < 1e38 for one in bounds))


def _reward_needs(settings: Settings, columns: Collection[str]) -> _Needs:
    reward = settings.reward
    by = {"group": ("group_id",), "consumer-batch": ("consumer_batch_id",)}
    cut = ("truncated",) if reward.stop_properly_coef is not None else ()
    whole = ("trajectory_id",) if reward.unit == "trajectory" else ()
    return ("raw_reward", *by.get(reward.grouping, ()), *cut, *whole), ("reward",)


def _kl_needs(settings: Settings, columns: Collection[str]) -> _Needs:
    if settings.kl.coef == 0:
        return (), ("kl",)
    return (LOG_PROB_SOURCES[settings.kl.policy_source], "ref_log_probs"), ("kl",)


def _advantage_needs(settings: Settings, columns: Collection[str]) -> _Needs:
    reads = ["reward"]
    if settings.advantage.kl_in_reward:
        reads.append("kl")
    if settings.advantage.estimator == "gae":
        reads.append(critic_column(columns))
    return tuple(reads), ("advantages", *(("returns",) if "returns" in columns else ()))


def critic_column(columns: Collection[str]) -> str:
    """The critic's values before the update: what GAE was made of."""
    return "old_values" if "old_values" in columns else "values"


def _policy_needs(settings: Settings, columns: Collection[str]) -> _Needs:
    loss = settings.loss
    old = LOG_PROB_SOURCES[loss.old_source]
    reads = dict.fromkeys(["log_probs", "advantages"])
    # On policy the ratio is 1 whatever was stored; REINFORCE has none.
    if loss.ratio != "one" and loss.surrogate != "reinforce":
        reads[old] = None
    if loss.correction != "none" or loss.opsm_delta is not None or loss.kl_loss_weighted:
        reads["old_log_probs"] = None
    if loss.correction != "none":
        reads["rollout_log_probs"] = None
    if loss.kl_loss_coef:
        reads["ref_log_probs"] = None
    if loss.fragments == "shared":
        reads["trajectory_id"] = None
    if loss.surrogate in _BY_MICRO_BATCH:
        reads["micro_batch_id"] = None
    scalars = ["loss", "pg_loss"]
    # Without a bonus the loss does not read the entropy, so a capture may leave it out.
    if loss.entropy_coef != 0 or "entropy" in columns:
        reads["entropy"] = None
        scalars.append("entropy_loss")
    if loss.ratio != "one" and loss.surrogate == "ppo-clip":
        scalars += ["pg_clipfrac", "ppo_kl"]
    if loss.kl_loss_coef:
        scalars.append("kl_loss")
    return tuple(reads), tuple(scalars)


def _value_needs(settings: Settings, columns: Collection[str]) -> _Needs:
    old = ("old_values",) if settings.value.clip is not None else ()
    return ("values", *old, "returns"), ("value_loss",)


_NEEDS: dict[str, Callable[[Settings, Collection[str]], _Needs]] = {
    "reward.raw": lambda settings, columns: (("raw_reward",), ()),
    "reward.post_process": _reward_needs,
    "advantage.kl": _kl_needs,
    "advantage.estimate": _advantage_needs,
    "loss.policy": _policy_needs,
    "loss.value": _value_needs,
}
