"""What the V2 matrix says of advantages: what contradicts itself, and what they read."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from trajreplay.schema.settings import CORRECTIONS, Settings
from trajreplay.stages.capability.ability import LOG_PROB_SOURCES, Needs
from trajreplay.stages.capability.rejections import rejected

# Estimators whose advantages are all that they give.
OF_NO_RETURNS = ("grpo", "reinforce++-baseline", "opd")
# Estimators that sum up rewards as they are, masked ones as 0.
_OF_PLAIN_RETURNS = ("remax", "otb")


def advantage_contradictions(settings: Settings) -> Iterator[str]:
    """Why advantages cannot be estimated as stated."""
    advantage = settings.advantage
    if advantage.kl_in_reward and advantage.estimator == "grpo":
        yield (
            "advantage.kl_in_reward is true and advantage.estimator is 'grpo', which has no token "
            "rewards"
        )
    found = advantage.estimator
    if (found == "otb" or advantage.opd_coef) and settings.kl.policy_source not in LOG_PROB_SOURCES:
        known = ", ".join(map(repr, LOG_PROB_SOURCES))
        yield f"kl.policy_source is {settings.kl.policy_source!r}; v2 recomputes {known}"
    if advantage.kl_in_reward and found == "opd":
        yield "advantage.kl_in_reward is true and advantage.estimator is 'opd'"
    if found == "opd" and not advantage.opd_coef:
        yield "advantage.estimator is 'opd' and advantage.opd_coef is 0"
    if advantage.reward_source == "token" and found in ("reinforce++-baseline", "opd"):
        yield f"advantage.reward_source is 'token' and advantage.estimator is {found!r}"
    yield from _of_critics(settings)
    if found == "otb" and advantage.otb_weights == "correction":
        yield from _of_weights(settings)
    yield from _of_centres(settings)
    if found == "remax" and settings.reward.baseline == "greedy":
        yield (
            "advantage.estimator is 'remax' and reward.baseline is 'greedy', which takes the "
            "greedy reward off twice"
        )
    if advantage.whiten != "none" and advantage.whiten_epsilon < 0:
        yield f"advantage.whiten_epsilon is {advantage.whiten_epsilon:g}, expected 0 or more"
    if advantage.whiten != "none" and advantage.whiten_ddof not in (0, 1):
        yield f"advantage.whiten_ddof is {advantage.whiten_ddof}; v2 recomputes 0 or 1"
    if advantage.counts == "kept":
        yield from rejected("advantage.counts", settings)
    if advantage.kl_in_reward and settings.kl.coef == 0:
        yield "advantage.kl_in_reward is true and kl.coef is 0"


def _of_centres(settings: Settings) -> Iterator[str]:
    """What a mean that is of other tokens than the deviation does not go with."""
    advantage = settings.advantage
    apart = advantage.whiten_centre != "same"
    what = f"advantage.whiten_centre is {advantage.whiten_centre!r}"
    if not apart and not advantage.whiten_leave_one_out:
        return
    if not apart:
        what = "advantage.whiten_leave_one_out is true"
    if advantage.whiten == "none":
        yield f"{what} and advantage.whiten is 'none'"
    if advantage.whiten_one_pass:
        yield f"{what} and advantage.whiten_one_pass is true, which knows one mean only"
    if apart and not advantage.whiten_scale:
        yield f"{what} and advantage.whiten_scale is false: state advantage.whiten alone"
    if advantage.whiten_centre == "none" and advantage.whiten_leave_one_out:
        yield f"{what} and advantage.whiten_leave_one_out is true"


def _of_critics(settings: Settings) -> Iterator[str]:
    """What returns, values and a token baseline do not go with."""
    advantage = settings.advantage
    found = advantage.estimator
    if found in _OF_PLAIN_RETURNS and advantage.gamma != 1:
        yield f"advantage.estimator is {found!r} and advantage.gamma is {advantage.gamma:g}"
    if found in _OF_PLAIN_RETURNS and advantage.masking not in ("through", "multiply"):
        yield f"advantage.estimator is {found!r} and advantage.masking is {advantage.masking!r}"
    if advantage.estimator == "gae" and advantage.masking == "reset":
        yield "advantage.masking is 'reset' and advantage.estimator is 'gae', which has no resets"
    if advantage.lam_alpha is not None and advantage.lam_alpha <= 0:
        yield f"advantage.lam_alpha is {advantage.lam_alpha:g}, expected more than 0"
    for name, plain, owner in (
        ("lam_returns", None, "gae"),
        ("bootstrap", "none", "gae"),
        ("otb_weights", "none", "otb"),
        ("otb_positions", "all", "otb"),
    ):
        stated = getattr(advantage, name)
        if stated != plain and found != owner:
            yield f"advantage.{name} is {stated!r} and advantage.estimator is not {owner!r}"


def _of_weights(settings: Settings) -> Iterator[str]:
    """Why the weights of a token baseline cannot be those of the loss."""
    loss = settings.loss
    if loss.correction not in CORRECTIONS or loss.correction_bounds is None:
        yield (
            f"advantage.otb_weights is 'correction' and loss.correction is {loss.correction!r}, "
            f"loss.correction_bounds {loss.correction_bounds}"
        )
    if loss.correction_norm != "none" and loss.correction_norm_over != "cohort":
        yield "advantage.otb_weights is 'correction' and loss.correction_norm_over is not 'cohort'"
    if loss.proximal != "recorded":
        yield "advantage.otb_weights is 'correction' and loss.proximal is not 'recorded'"


def takes_whole(settings: Settings) -> bool:
    """Whether samples of other groups enter the advantages of one."""
    advantage = settings.advantage
    by_batch = advantage.counts == "kept" and settings.loss.m2_threshold is not None
    sets = {*_whitening_sets(settings)} - {"sample"}
    return bool(sets) or advantage.estimator == "otb" or by_batch


def _whitening_sets(settings: Settings) -> tuple[str, ...]:
    """What advantages are whitened over, by deviation and by mean."""
    advantage = settings.advantage
    if advantage.whiten == "none":
        return ()
    own = () if advantage.whiten_centre in ("same", "none") else (advantage.whiten_centre,)
    return (advantage.whiten, *own)


def advantage_needs(settings: Settings, columns: Collection[str]) -> Needs:
    """What advantage.estimate reads and writes."""
    advantage = settings.advantage
    estimator, policy = advantage.estimator, LOG_PROB_SOURCES.get(settings.kl.policy_source, "")
    sets = _whitening_sets(settings)
    by_group = estimator == "otb" or "group" in sets
    asked = (
        ("reward", advantage.reward_source == "sample" and estimator != "opd"),
        ("token_rewards", advantage.reward_source == "token"),
        ("kl", advantage.kl_in_reward),
        (critic_column(columns), estimator == "gae"),
        ("greedy_reward", estimator == "remax"),
        ("last_value", advantage.bootstrap != "none"),
        ("truncated", advantage.bootstrap == "truncated"),
        ("sum_pi_squared", estimator == "otb"),
        ("group_id", by_group),
        ("consumer_batch_id", "consumer-batch" in sets),
        (policy, estimator == "otb" or advantage.opd_coef != 0),
        ("old_log_probs", advantage.otb_weights != "none"),
        ("rollout_log_probs", advantage.otb_weights != "none"),
        ("teacher_log_probs", advantage.opd_coef != 0),
        ("message_faults", bool(message_faults(settings))),
        ("old_log_probs", advantage.counts == "kept"),
        ("rollout_log_probs", advantage.counts == "kept"),
        ("micro_batch_id", advantage.counts == "kept" and settings.loss.m2_threshold is not None),
    )
    reads = tuple(dict.fromkeys(name for name, on in asked if on))
    return reads, ("advantages", *(("returns",) if "returns" in columns else ()))


def message_faults(settings: Settings) -> dict[int, float]:
    """The advantages that tokens of faulty messages get, by the number of the fault."""
    given = (settings.advantage.invalid_tool_call, settings.advantage.malformed_thinking)
    return {kind: one for kind, one in enumerate(given, 1) if one is not None}


def critic_column(columns: Collection[str]) -> str:
    """The critic's values before the update: what GAE was made of."""
    return "old_values" if "old_values" in columns else "values"
