"""What the V2 matrix says of losses: what contradicts itself, and what they read and write."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from math import isfinite

from trajreplay.schema.settings import LossSettings, RewardSettings, Settings
from trajreplay.stages.capability.ability import LOG_PROB_SOURCES, Needs
from trajreplay.stages.capability.means import (
    mean_contradictions,
    over_micro_batches,
    own_mean_contradictions,
    value_over_micro_batches,
)
from trajreplay.stages.capability.rejections import (
    rejected,
    rejection_contradictions,
    rejects,
)

# Names that are looked at and never recomputed, with the reason.
INSPECTED = {
    "loss.surrogate": {"clip-cov": "which chooses tokens at random"},
    "loss.kl_loss_source": {"unfiltered": "log-probs that no column holds"},
    "value.counts": {"unshifted": "values past the end among them, which no column holds"},
}
_OF_BATCHES = ("m2po", "kl-cov")
_OF_SAMPLES = ("gmpo", "vespo")


def _by_micro_batch(loss: LossSettings, columns: Collection[str]) -> str:
    """The setting that acts on micro-batches; empty if none does."""
    if loss.surrogate in _OF_BATCHES:
        return f"loss.surrogate is {loss.surrogate!r}"
    if loss.m2_threshold is not None:
        return "loss.m2_threshold is stated"
    if loss.nll_coef:
        return "loss.nll_coef is stated"
    normed = loss.correction != "none" and loss.correction_norm != "none"
    if normed and loss.correction_norm_over == "micro-batch":
        return "loss.correction_norm_over is 'micro-batch'"
    return over_micro_batches(loss, columns)


def only_inspected(stage: str, settings: Settings, columns: Collection[str]) -> str:
    """Why a loss can be looked at and not recomputed; empty if it can."""
    policy, loss = stage == "loss.policy", settings.loss
    held = {"loss.surrogate": loss.surrogate} if policy else {"value.counts": settings.value.counts}
    if policy and loss.kl_loss_coef:
        held["loss.kl_loss_source"] = loss.kl_loss_source
    for label, value in held.items():
        if reason := INSPECTED[label].get(value):
            return f"{label} is {value!r}, {reason}"
    acting = _by_micro_batch(loss, columns) if policy else value_over_micro_batches(settings)
    if acting and "micro_batch_id" not in columns:
        return f"{acting}, and the micro-batch of samples was not captured"
    return ""


def reads_old(loss: LossSettings) -> bool:
    """Whether a loss asks for the log-probs of the policy before the update."""
    by_ratio = loss.ratio != "one" and loss.surrogate != "reinforce" and loss.old_source == "old"
    weighted = loss.kl_loss_coef != 0 and loss.kl_loss_weighted and loss.kl_loss_weight == "old"
    drops = loss.opsm_delta is not None and loss.opsm_source == "old"
    return by_ratio or weighted or drops or loss.correction != "none" or rejects(loss)


def takes_whole(stage: str, loss: LossSettings) -> bool:
    """Whether samples of other groups enter the loss of one."""
    normed = loss.correction != "none" and loss.correction_norm != "none"
    by_others = loss.surrogate in _OF_BATCHES or loss.m2_threshold is not None
    by_others |= normed or loss.nll_coef != 0
    return (stage == "loss.policy" and by_others) or loss.fragments == "shared"


def value_takes_whole(settings: Settings) -> bool:
    """Whether samples of other groups enter the value loss of one by what is kept of them."""
    return settings.value.counts == "kept" and settings.loss.m2_threshold is not None


def loss_contradictions(settings: Settings) -> Iterator[str]:
    """Why a policy loss cannot be in force as stated."""
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
    if loss.opd is not None and loss.opd != (settings.advantage.opd_coef != 0):
        yield f"loss.opd is {loss.opd} and advantage.opd_coef is {settings.advantage.opd_coef:g}"
    no_ratio = loss.surrogate == "reinforce" and loss.kl_loss_weight == "ratio"
    if loss.kl_loss_coef and loss.kl_loss_weighted and no_ratio:
        yield "loss.kl_loss_weight is 'ratio' and loss.surrogate is 'reinforce', which has none"
    yield from _of_surrogates(loss)
    yield from _of_corrections(loss)
    yield from _of_sources(settings)
    yield from mean_contradictions(loss)
    yield from own_mean_contradictions(loss)


def _of_sources(settings: Settings) -> Iterator[str]:
    """What an interpolated policy and the likelihood of good samples do not go with."""
    loss, reward = settings.loss, settings.reward
    if loss.proximal == "interpolated" and loss.old_source != "old":
        yield f"loss.proximal is {loss.proximal!r} and loss.old_source is {loss.old_source!r}"
    if not loss.nll_coef:
        return
    if loss.mean_over != "scope" or loss.fragments != "own":
        yield "loss.nll_coef is stated and loss.mean_over or loss.fragments is not the default"
    plain = RewardSettings()
    for name in ("weights", "source", "scale_from", "overlong_max_length", "stop_properly_coef"):
        if getattr(reward, name) != getattr(plain, name):
            yield f"loss.nll_coef is stated and reward.{name} is {getattr(reward, name)!r}"
    if (reward.bias, reward.factor) != (plain.bias, plain.factor):
        yield "loss.nll_coef is stated and reward.bias or reward.factor"


def _of_surrogates(loss: LossSettings) -> Iterator[str]:
    if loss.dual_clip is not None and loss.surrogate != "ppo-clip":
        yield f"loss.dual_clip is {loss.dual_clip:g} and loss.surrogate is {loss.surrogate!r}"
    plain_ratio = loss.dppo_form == "ratio" and loss.log_ratio_clamp is not None
    if loss.surrogate == "dppo" and (loss.ratio != "token" or plain_ratio):
        yield "loss.surrogate is 'dppo', and loss.ratio or loss.log_ratio_clamp is stated"
    if loss.dppo_ratio_cap is not None and (
        loss.surrogate != "dppo" or loss.dppo_form != "log-prob" or loss.dppo_ratio_cap <= 0
    ):
        yield (
            f"loss.dppo_ratio_cap is {loss.dppo_ratio_cap:g}; it bounds from above 0 the ratio of "
            "'dppo' in the form 'log-prob'"
        )
    of_sequences = loss.ratio.startswith("sequence")
    if loss.surrogate in (*_OF_SAMPLES, *_OF_BATCHES) and of_sequences:
        yield f"loss.surrogate is {loss.surrogate!r} and loss.ratio is {loss.ratio!r}"
    if loss.sequence_log_ratio_clamp is not None and not of_sequences:
        yield f"loss.sequence_log_ratio_clamp is stated and loss.ratio is {loss.ratio!r}"
    if loss.surrogate == "gmpo" and loss.aggregation != "seq-mean-token-mean":
        yield f"loss.surrogate is 'gmpo' and loss.aggregation is {loss.aggregation!r}"
    if loss.surrogate == "gmpo" and loss.fragments == "shared":
        yield "loss.surrogate is 'gmpo' and loss.fragments are 'shared'"
    yield from _of_numbers(loss)


def _of_numbers(loss: LossSettings) -> Iterator[str]:
    """Numbers of a surrogate that no kernel goes by."""
    if loss.dual_clip is not None and not loss.dual_clip > 1:
        yield f"loss.dual_clip is {loss.dual_clip:g}, expected more than 1"
    if min(loss.eps_clip, loss.eps_clip_high or 0.0) < 0:
        yield f"loss.eps_clip, loss.eps_clip_high are {loss.eps_clip:g}, {loss.eps_clip_high}"
    if min(loss.m2po_least_low, loss.m2po_least_high) < 0:
        yield f"loss.m2po_least_low, _high are {loss.m2po_least_low:g}, {loss.m2po_least_high:g}"
    if loss.surrogate == "m2po" and not loss.m2po_kl2_budget > 0:
        yield f"loss.m2po_kl2_budget is {loss.m2po_kl2_budget:g}, expected more than 0"
    if loss.surrogate == "kl-cov" and not 0 < loss.kl_cov_fraction <= 1:
        yield f"loss.kl_cov_fraction is {loss.kl_cov_fraction:g}, expected more than 0, at most 1"
    if loss.surrogate == "sapo" and min(loss.sapo_tau_pos, loss.sapo_tau_neg) <= 0:
        yield f"loss.sapo_tau_pos, _neg are {loss.sapo_tau_pos:g}, {loss.sapo_tau_neg:g}"


def _of_corrections(loss: LossSettings) -> Iterator[str]:
    off = loss.correction == "none"
    if not off and loss.correction_bounds is None:
        yield f"loss.correction is {loss.correction!r} and loss.correction_bounds are not stated"
    if loss.correction_criterion != "weight":
        yield from _of_criteria(loss)
    if off and (loss.correction_norm != "none" or loss.correction_log_clamp is not None):
        yield "loss.correction_norm or loss.correction_log_clamp is stated and loss.correction not"
    if loss.surrogate == "vespo" and loss.correction.startswith(("sequence", "geometric")):
        yield (
            f"loss.surrogate is 'vespo', which takes weights of tokens, and loss.correction is "
            f"{loss.correction!r}"
        )
    if loss.surrogate == "gmpo" and loss.correction in ("tis", "icepop", "geometric-mask"):
        yield (
            f"loss.surrogate is 'gmpo', whose samples take the geometric mean of their weights, "
            f"and loss.correction is {loss.correction!r}, of tokens"
        )
    yield from rejection_contradictions(loss)


def _of_criteria(loss: LossSettings) -> Iterator[str]:
    """What weights that are bounded by something else than themselves do not go with."""
    what = f"loss.correction_criterion is {loss.correction_criterion!r}"
    if loss.correction in ("none", "geometric-mask"):
        yield f"{what} and loss.correction is {loss.correction!r}, which has none or its own"
    if loss.correction_log_clamp is not None:
        yield f"{what} and loss.correction_log_clamp is stated"
    if loss.correction_bounds is not None and not any(map(isfinite, loss.correction_bounds)):
        yield f"{what} and loss.correction_bounds are {loss.correction_bounds}, which bound nothing"


def value_contradictions(settings: Settings) -> Iterator[str]:
    """Why a value loss cannot be in force as stated."""
    for name in ("clip", "huber_delta"):
        found = getattr(settings.value, name)
        if found is not None and found <= 0:
            yield f"value.{name} is {found:g}, expected more than 0"
    if settings.value.counts == "kept":
        yield from rejected("value.counts", settings)
    own, loss = settings.value, settings.loss
    if (own.aggregation, own.mean_over) == ("same", "same"):
        yield from mean_contradictions(loss)
        return
    if loss.fragments == "shared":
        yield "value.aggregation or value.mean_over is stated and loss.fragments are 'shared'"
    kind = loss.aggregation if own.aggregation == "same" else own.aggregation
    over = loss.mean_over if own.mean_over == "same" else own.mean_over
    if kind == "constant-norm" and not loss.constant_norm:
        yield "value.aggregation is 'constant-norm' and loss.constant_norm is not stated"
    if over == "micro-batch" and (kind == "constant-norm" or loss.batch_reduction != "mean"):
        yield (
            f"value.mean_over is {over!r}, the aggregation {kind!r} and loss.batch_reduction "
            f"{loss.batch_reduction!r}"
        )


def policy_needs(settings: Settings, columns: Collection[str]) -> Needs:
    """Columns that a policy loss reads, and the scalars that it is held against."""
    loss = settings.loss
    reads = dict.fromkeys(["log_probs", "advantages"])
    # On policy the ratio is 1 whatever was stored; REINFORCE has none.
    if loss.ratio != "one" and loss.surrogate != "reinforce":
        reads[LOG_PROB_SOURCES[loss.old_source]] = None
    if loss.correction != "none" or rejects(loss):
        reads |= dict.fromkeys(("old_log_probs", "rollout_log_probs"))
    if loss.opsm_delta is not None:
        reads[LOG_PROB_SOURCES[loss.opsm_source]] = None
    if loss.kl_loss_coef and loss.kl_loss_weighted and loss.kl_loss_weight != "ratio":
        reads[LOG_PROB_SOURCES[loss.kl_loss_weight]] = None
    if loss.kl_loss_coef:
        reads["ref_log_probs"] = None
    if loss.nll_coef:
        reads["raw_reward"] = None
    if loss.proximal != "recorded" and "old_log_probs" in reads:
        del reads["old_log_probs"]
        if loss.proximal == "interpolated":
            reads |= dict.fromkeys(("rollout_log_probs", "weight_versions"))
    if loss.fragments == "shared":
        reads["trajectory_id"] = None
    if _by_micro_batch(loss, columns):
        reads["micro_batch_id"] = None
    # Without a bonus the loss does not read the entropy, so a capture may leave it out.
    if loss.entropy_coef != 0 or ("entropy" in columns and _averages_entropy(loss, columns)):
        reads["entropy"] = None
    return tuple(reads), _scalars(loss, "entropy" in reads)


def _averages_entropy(loss: LossSettings, columns: Collection[str]) -> bool:
    """Whether a mean of the entropy can be taken where nothing asks for it."""
    batches = loss.entropy_mean_over != "micro-batch" or "micro_batch_id" in columns
    own = loss.entropy_aggregation not in ("same", loss.aggregation)
    return batches and not (own and loss.fragments == "shared")


def _scalars(loss: LossSettings, bonus: bool) -> tuple[str, ...]:
    """The scalars that a policy loss is held against."""
    scalars = ["loss", "pg_loss", *(["entropy_loss"] if bonus else [])]
    moves = loss.ratio != "one" and (loss.proximal, loss.old_source) != ("current", "old")
    if moves and loss.surrogate == "ppo-clip":
        scalars += ["pg_clipfrac", "ppo_kl"]
    return (*scalars, *(["kl_loss"] if loss.kl_loss_coef else []))


def value_needs(settings: Settings, columns: Collection[str]) -> Needs:
    """Columns that a value loss reads, and the scalars that it is held against."""
    old = ("old_values",) if settings.value.clip is not None else ()
    batch = ("micro_batch_id",) if value_over_micro_batches(settings) else ()
    shared = ("trajectory_id",) if settings.loss.fragments == "shared" else ()
    kept: tuple[str, ...] = ()
    if settings.value.counts == "kept":
        kept = ("old_log_probs", "rollout_log_probs")
        batch = batch or (("micro_batch_id",) if settings.loss.m2_threshold is not None else ())
    return ("values", *old, "returns", *batch, *shared, *kept), ("value_loss",)
