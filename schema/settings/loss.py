"""Settings of the stages loss.policy and loss.value."""

from __future__ import annotations

from dataclasses import dataclass

from trajreplay.schema.settings.knobs import Interval, flag, interval, name, number

# Terms of the loss that a V1 capture could only name, not describe.
LOSS_TERMS = ("use_kl_loss", "tis", "opsm", "opd", "per_token")


@dataclass(frozen=True)
class LossSettings:
    """The policy loss.

    Args:
        eps_clip: The ratio is clipped below at 1 - eps_clip.
        eps_clip_high: The ratio is clipped above at 1 + eps_clip_high; equals eps_clip if None.
        entropy_coef: Coefficient of the entropy bonus.
        aggregation: How tokens become the value of a sample or scope: `seq-mean-token-mean`,
            `token-mean`, `seq-mean-token-sum`, or `constant-norm`, a sum over a constant;
            `sum-of-sample-mean` is the first with batch_reduction sum.
        batch_reduction: How sample means become one number: `sum` or `mean`.
        old_source: Denominator of the ratio: `old` or `rollout` log-probs.
        use_kl_loss, tis, opsm, opd, per_token: Whether this term was in force: true, false, or
            None where the producer does not say. Where a field below says more, it decides.
        surrogate: `ppo-clip`; `cispo`; `sapo`; `gmpo`, the geometric mean of the ratios of a
            sample, clipped in log space; `vespo`; `m2po`, whose bounds hold the second
            moment of a micro-batch (Relax); `kl-cov`, which penalises the tokens of a micro-batch
            that covary most; `reinforce`, -A log pi without a ratio; `dppo`, the
            ratio on tokens whose probability has not moved further than eps_clip in the direction
            of the advantage.
        ratio: Ratio of `token` probabilities; `sequence-mean`, the exponential of the masked mean
            of the log ratios of a sample (GSPO); `sequence-sum`; or `one`, on policy.
        log_ratio_clamp: Bounds of the log ratio before the exponential.
        dual_clip: Bound of the loss at negative advantages, in units of |A|; None for none.
        cispo_bounds: `two-sided`; `by-sign` of the advantage (Relax); or `upper-absolute`, where
            eps_clip_high is the bound itself (TRL).
        sapo_tau_pos, sapo_tau_neg: Temperatures at positive and other advantages.
        m2po_kl2_budget: Highest second moment of harmful log ratios in `m2po`. Squared nat.
        kl_cov_fraction: Share of the trained tokens that `kl-cov` penalises.
        kl_cov_coef: What that costs them. Per nat.
        dppo_kl_tau: Weight of the squared log ratio in `dppo`.
        correction: Weight of train against rollout probabilities: `none`; `tis`, clipped; `icepop`,
            0 outside the bounds; of the product over the sample, `sequence-tis` and
            `sequence-mask`; `geometric-mask`, the weight of the token, 0 where the geometric mean
            of its sample is outside.
        correction_bounds: Its bounds.
        opsm_delta: Tokens of a sample with A < 0 are dropped where the mean of old - current
            log-probs is above it; None for no such mask.
        kl_loss_coef: Coefficient of the KL in the loss.
        kl_loss_estimator: As `kl.estimator`.
        kl_loss_clamp: Bounds of that estimate.
        kl_loss_log_ratio_clamp: Bounds of the log ratio that it is made of.
        kl_loss_weighted: Whether it is multiplied by the ratio of current to old probabilities.
        fragments: What the mean over the tokens of a sample divides by: its `own` trained tokens,
            or those of all fragments of its trajectory, `shared`; a mean over samples then divides
            by trajectories.
        denominator_rows: Samples that count in a mean over samples: `all`, or those
            `with-tokens`.
        constant_norm: What `constant-norm` divides by.
    """

    eps_clip: float = number(0.2)
    eps_clip_high: float | None = number(None)
    entropy_coef: float = number(0.0)
    aggregation: str = name(
        "seq-mean-token-mean", "token-mean", "seq-mean-token-sum", "constant-norm"
    )
    batch_reduction: str = name("sum", "mean")
    old_source: str = name("old", "rollout")
    use_kl_loss: bool | None = flag(None)
    tis: bool | None = flag(None)
    opsm: bool | None = flag(None)
    opd: bool | None = flag(None)
    per_token: bool | None = flag(None)
    surrogate: str = name(
        "ppo-clip", "cispo", "sapo", "gmpo", "vespo", "m2po", "kl-cov", "reinforce", "dppo"
    )
    ratio: str = name("token", "sequence-mean", "sequence-sum", "one")
    log_ratio_clamp: Interval | None = interval(None)
    dual_clip: float | None = number(None)
    cispo_bounds: str = name("two-sided", "by-sign", "upper-absolute")
    sapo_tau_pos: float = number(1.0)
    sapo_tau_neg: float = number(1.05)
    m2po_kl2_budget: float = number(0.01)
    kl_cov_fraction: float = number(0.0002)
    kl_cov_coef: float = number(0.1)
    dppo_kl_tau: float = number(1e-3)
    correction: str = name(
        "none", "tis", "icepop", "sequence-tis", "sequence-mask", "geometric-mask"
    )
    correction_bounds: Interval | None = interval(None)
    opsm_delta: float | None = number(None)
    kl_loss_coef: float = number(0.0)
    kl_loss_estimator: str = name("k1", "k2", "k3", "low_var_kl", "abs")
    kl_loss_clamp: Interval | None = interval(None)
    kl_loss_log_ratio_clamp: Interval | None = interval(None)
    kl_loss_weighted: bool = flag(False)
    fragments: str = name("own", "shared")
    denominator_rows: str = name("all", "with-tokens")
    constant_norm: float | None = number(None)

    def __post_init__(self) -> None:
        if self.eps_clip_high is None:
            object.__setattr__(self, "eps_clip_high", self.eps_clip)
        if self.aggregation == "sum-of-sample-mean":
            object.__setattr__(self, "aggregation", "seq-mean-token-mean")
            object.__setattr__(self, "batch_reduction", "sum")
        if self.kl_loss_estimator == "low_var_kl" and self.kl_loss_clamp is None:
            object.__setattr__(self, "kl_loss_clamp", (-10.0, 10.0))


@dataclass(frozen=True)
class ValueSettings:
    """The value loss, aggregated as the policy loss is.

    Args:
        clip: How far the value may move from the old one before the loss ignores it; None for no
            clip.
        factor: Of the squared error: 1 in slime and Relax, 0.5 elsewhere.
        huber_delta: Errors from which on the loss grows linearly; None for squares throughout.
        counted: What counts as clipped: a `value` that moved further than clip (slime, Relax), or
            a token whose clipped `loss` is the larger.
    """

    clip: float | None = number(0.2, optional=True)
    factor: float = number(1.0)
    huber_delta: float | None = number(None)
    counted: str = name("value", "loss")
