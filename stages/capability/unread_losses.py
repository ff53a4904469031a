"""Where the settings of policy and value loss are read."""

from __future__ import annotations

from collections.abc import Callable

from trajreplay.schema.settings import Settings
from trajreplay.stages.capability.losses import reads_old
from trajreplay.stages.capability.means import means_over_micro_batches, means_over_samples
from trajreplay.stages.capability.read_where import Read

# Surrogates that are bounded by eps_clip and eps_clip_high.
_CLIPPED = ("ppo-clip", "cispo", "gmpo", "dppo")


def _has_ratio(settings: Settings) -> bool:
    return settings.loss.surrogate != "reinforce"


def _moves(settings: Settings) -> bool:
    """Whether there is a ratio that may be another than 1."""
    loss = settings.loss
    by_itself = loss.proximal == "current" and loss.old_source == "old"
    return _has_ratio(settings) and loss.ratio != "one" and not by_itself


def _takes_kl(settings: Settings) -> bool:
    return settings.loss.kl_loss_coef != 0


def _bounded_below(settings: Settings) -> bool:
    loss = settings.loss
    absolute = loss.surrogate == "cispo" and loss.cispo_bounds == "upper-absolute"
    return _moves(settings) and loss.surrogate in _CLIPPED and not absolute


def _bounded_above(settings: Settings) -> bool:
    loss = settings.loss
    stated = loss.eps_clip_high != loss.eps_clip  # else it follows that
    absolute = loss.surrogate == "cispo" and loss.cispo_bounds == "upper-absolute"
    return not stated or ((_moves(settings) or absolute) and loss.surrogate in _CLIPPED)


def _weighs_undefined(settings: Settings) -> bool:
    loss = settings.loss
    by_rollout = loss.kl_loss_weighted and loss.kl_loss_weight == "rollout"
    return loss.correction != "none" or (_takes_kl(settings) and by_rollout)


def _weighs_samples(settings: Settings) -> bool:
    """Whether the weight of a sample in vespo may be another than 1."""
    return _moves(settings) or settings.loss.correction != "none"


def _drops_drifted(settings: Settings) -> bool:
    """Whether current log-probs can have drifted from those that a mask is told by."""
    loss = settings.loss
    itself = loss.proximal == "current" and loss.opsm_source == "old"
    return not itself or (loss.opsm_delta is not None and loss.opsm_delta < 0)


def _weighs_kl(settings: Settings) -> bool:
    """Whether the weight of the KL in the loss may be another than 1."""
    weight = settings.loss.kl_loss_weight
    itself = settings.loss.proximal == "current" and weight == "old"
    return _takes_kl(settings) and not itself and (weight != "ratio" or _moves(settings))


def _always(settings: Settings) -> bool:
    return True


# What each surrogate alone has, and where that acts: mostly where a ratio is not 1 anyway.
_OF_EACH: tuple[tuple[str, tuple[str, ...], Callable[[Settings], bool]], ...] = (
    ("cispo", ("cispo_bounds",), _always),
    ("sapo", ("sapo_tau_pos", "sapo_tau_neg"), _always),
    ("sapo", ("sapo_clipped",), _moves),
    (
        "vespo",
        ("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        _weighs_samples,
    ),
    (
        "m2po",
        ("m2po_kl2_budget", "m2po_counts", "m2po_least_low", "m2po_least_high"),
        _moves,
    ),
    ("kl-cov", ("kl_cov_fraction", "kl_cov_coef", "kl_cov_ppo_kl"), _moves),
    ("dppo", ("dppo_form", "dppo_adv_tau"), _always),
    ("dppo", ("dppo_measure", "dppo_rule"), _moves),
    ("dro", ("dro_beta",), _moves),
)
_OF_SURROGATES = tuple(
    Read(
        "loss",
        fields,
        lambda one, surrogate=surrogate, acts=acts: (  # type: ignore[misc]
            one.loss.surrogate == surrogate and acts(one)
        ),
        f"by the surrogate {surrogate!r}" + ("" if acts is _always else " where a ratio moves"),
    )
    for surrogate, fields, acts in _OF_EACH
)
OF_LOSSES = (
    *_OF_SURROGATES,
    Read(
        "loss",
        ("ratio",),
        lambda one: _has_ratio(one) or one.loss.ratio == "one",
        "by surrogates that have a ratio",
    ),
    Read(
        "loss",
        ("old_source",),
        lambda one: _has_ratio(one) and one.loss.ratio != "one",
        "by surrogates that have a ratio, which is not one",
    ),
    Read(
        "loss",
        ("proximal",),
        lambda one: reads_old(one.loss),
        "where old log-probs are: in a ratio, weights, rejections",
    ),
    Read(
        "loss",
        ("eps_clip",),
        _bounded_below,
        f"by the surrogates {', '.join(_CLIPPED)} where a ratio moves, not as absolute bounds",
    ),
    Read(
        "loss",
        ("eps_clip_high",),
        _bounded_above,
        f"by the surrogates {', '.join(_CLIPPED)} where a ratio moves, or as an absolute bound",
    ),
    Read(
        "loss",
        ("log_ratio_clamp",),
        lambda one: _has_ratio(one) and one.loss.ratio != "one",
        "by surrogates that have a ratio, which is not one",
    ),
    Read(
        "loss",
        ("metrics_aggregation",),
        _moves,
        "by surrogates that have a ratio, which moves",
    ),
    Read(
        "loss",
        ("dppo_kl_tau",),
        lambda one: one.loss.surrogate == "dppo" and one.loss.dppo_form == "ratio" and _moves(one),
        "by the surrogate 'dppo' in the form 'ratio' where that moves",
    ),
    Read(
        "loss",
        ("undefined_weight",),
        _weighs_undefined,
        "by weights against the rollout",
    ),
    Read("loss", ("dual_clip",), _moves, "where a ratio moves"),
    Read(
        "loss",
        ("dual_side",),
        lambda one: one.loss.dual_clip is not None and _moves(one),
        "beside loss.dual_clip, where a ratio moves",
    ),
    Read(
        "loss",
        ("correction_bounds", "correction_criterion"),
        lambda one: one.loss.correction != "none",
        "beside loss.correction",
    ),
    Read(
        "loss",
        ("correction_norm_over",),
        lambda one: one.loss.correction_norm != "none",
        "beside loss.correction_norm",
    ),
    Read(
        "loss",
        ("rejection_reverse", "rejection_log_clamp"),
        lambda one: bool(one.loss.rejection),
        "beside loss.rejection",
    ),
    Read("loss", ("opsm_delta",), _drops_drifted, "where current log-probs are not the old ones"),
    Read(
        "loss",
        ("opsm_source",),
        lambda one: one.loss.opsm_delta is not None,
        "beside loss.opsm_delta",
    ),
    Read(
        "loss",
        (
            "kl_loss_source",
            "kl_loss_estimator",
            "kl_loss_clamp",
            "kl_loss_log_ratio_clamp",
        ),
        _takes_kl,
        "where loss.kl_loss_coef is not 0",
    ),
    Read(
        "loss",
        ("kl_loss_weighted",),
        _weighs_kl,
        "where loss.kl_loss_coef is not 0, by a ratio that moves",
    ),
    Read(
        "loss",
        ("kl_loss_clamped",),
        lambda one: (
            _takes_kl(one)
            and (one.loss.kl_loss_clamp, one.loss.kl_loss_log_ratio_clamp) != (None, None)
        ),
        "beside bounds of the KL in the loss",
    ),
    Read(
        "loss",
        ("kl_loss_weight",),
        lambda one: one.loss.kl_loss_weighted and _takes_kl(one),
        "where loss.kl_loss_weighted is true",
    ),
    Read(
        "loss",
        ("constant_norm",),
        lambda one: "constant-norm" in (one.loss.aggregation, one.value.aggregation),
        "by the aggregation 'constant-norm'",
    ),
    Read(
        "loss",
        ("kl_loss_aggregation", "kl_loss_mean_over"),
        _takes_kl,
        "where loss.kl_loss_coef is not 0",
    ),
    Read(
        "loss",
        ("entropy_aggregation", "entropy_mean_over"),
        lambda one: one.loss.entropy_coef != 0,
        "of an entropy bonus, or an entropy that is recorded",
    ),
    Read("loss", ("denominator_rows",), means_over_samples, "by means over samples"),
    Read("loss", ("micro_batch_weight",), means_over_micro_batches, "by means over micro-batches"),
)
OF_VALUES = (
    Read("value", ("counted",), lambda one: one.value.clip is not None, "beside value.clip"),
)
