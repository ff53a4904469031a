"""Settings of the stages loss.policy and loss.value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from trajreplay.schema.settings.advantage import KL_ESTIMATORS, held_bounds, own_clamp
from trajreplay.schema.settings.knobs import Interval, flag, interval, intervals, name, number

# Terms of the loss that a V1 capture could only name, not describe.
LOSS_TERMS = ("use_kl_loss", "tis", "opsm", "opd", "per_token")
SURROGATES = ("cispo", "sapo", "gmpo", "vespo", "m2po", "kl-cov", "reinforce", "dro", "dppo")
CORRECTIONS = (
    "tis",
    "icepop",
    "sequence-tis",
    "sequence-mask",
    "geometric-tis",
    "geometric-icepop",
    "geometric-mask",
)
# What train against rollout probabilities are judged by: a metric, of each token or over a sample.
CRITERIA = tuple(
    f"{level}-{metric}"
    for level in ("token", "sum", "mean", "max")
    for metric in ("ratio", "factor", "k1", "k2", "k3")
)

_AGGREGATIONS = ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum")


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
        entropy_aggregation: The same of the entropy in the loss: `same` as its surrogate, or of its
            own (OpenRLHF, TRL, and verl beside GSPO or SAPO: `token-mean`).
        entropy_mean_over: As mean_over, of the entropy (TRL, verl's legacy actor: `micro-batch`).
        kl_loss_aggregation, kl_loss_mean_over: The same two of the KL in the loss, which TRL adds
            to its surrogate token by token.
        metrics_aggregation: The same of what is recorded of the ratio: clip fractions and ppo_kl
            (OpenRLHF and verl: `token-mean`).
        batch_reduction: How sample means become one number: `sum` or `mean`.
        old_source: Denominator of the ratio: `old` log-probs, which are those of the proximal
            policy where the loss is decoupled (AReaL), or `rollout`.
        proximal: Whether those old log-probs are as `recorded`; `interpolated` between the
            rollout's and the current ones by the weights that made each token (AReaL's loglinear);
            or the `current` ones themselves, in weights against the sampler and rejections, too
            (NeMo-RL's force_on_policy_ratio; verl's bypass mode, which has no old ones, and whose
            ratio, where it has one, is to those of old_source `rollout`).
        nll_coef: Coefficient of the mean of -log pi over the trained tokens of samples whose raw
            reward is above 0, one such mean a micro-batch (VAPO as in NeMo-RL).
        use_kl_loss, tis, opsm, opd, per_token: Whether this term was in force: true, false, or
            None where the producer does not say. Where a field below says more, it decides.
        surrogate: `ppo-clip`; `cispo`; `sapo`; `gmpo`, the geometric mean of the ratios of a
            sample, clipped in log space; `vespo`; `m2po`, whose bounds hold the second
            moment of a micro-batch (Relax); `kl-cov`, which penalises the tokens of a micro-batch
            that covary most; `reinforce`, -A log pi without a ratio (GPG, RLOO); `dro`, that and
            a penalty on the squared log ratio; `dppo`, the
            ratio on tokens whose probability has not moved further than eps_clip in the direction
            of the advantage.
        ratio: Ratio of `token` probabilities; `sequence-mean`, the exponential of the masked mean
            of the log ratios of a sample (GSPO); `sequence-sum`; or `one`, on policy,
            while all else that asks for old log-probs has those of `proximal` (verl).
        log_ratio_clamp: Bounds of the log ratio before the exponential.
        sequence_log_ratio_clamp: Bounds of that of a sample (verl's GSPO: at most 10).
        advantage_level: Advantages of each `token`, or their masked `sequence-mean` (AReaL's GSPO).
        dual_clip: Bound of the loss at negative advantages, in units of |A|; None for none.
        dual_side: Whether it bounds the loss at `negative` advantages, or the ratio at `both`
            (TRL's delta).
        cispo_bounds: `two-sided`; `by-sign` of the advantage (Relax); or `upper-absolute`, where
            eps_clip_high is the bound itself (TRL).
        sapo_tau_pos, sapo_tau_neg: Temperatures at positive and other advantages.
        sapo_clipped: What counts as clipped in `sapo`: a gate of less than 0.9 of its steepest
            `slope` (Relax), or `nothing` (verl, AReaL, which record 0).
        vespo_k_pos, vespo_lambda_pos: Shape and rate of the weight of a sample in `vespo`.
        vespo_k_neg, vespo_lambda_neg: The same at negative advantages.
        m2po_kl2_budget: Highest second moment of harmful log ratios in `m2po`. Squared nat.
        m2po_counts: Which tokens may be harmful there: the `trained` ones, or those of the whole
            `response`, masked ones too, as in earlier versions of Relax.
        m2po_least_low, m2po_least_high: How far below and above 1 its bounds lie at least.
        kl_cov_fraction: Share of the trained tokens that `kl-cov` penalises.
        kl_cov_coef: What that costs them. Per nat.
        kl_cov_ppo_kl: What is recorded as ppo_kl beside `kl-cov`: the `signed` log ratio of old to
            current, or its `absolute` value (verl).
        dppo_measure: What moves in `dppo`: the `difference` of probabilities, or the `binary-kl`
            between them (verl's dppo_kl).
        dppo_rule: Whether the bound is looked at `by-sign` of the advantage, or both are,
            `absolute` (prime-rl's ipo).
        dppo_form: What a token scores: `ratio` times advantage, and the squared log ratio
            (prime-rl), or `log-prob` times the ratio, which gets no gradient (verl).
        dppo_ratio_cap: Highest ratio of the form `log-prob`; None for none.
        dppo_adv_tau: Weight of the advantages in `dppo`.
        dppo_kl_tau: Weight of the squared log ratio in `dppo`.
        dro_beta: Twice the weight of the squared log ratio in `dro`.
        correction: Weight of train against rollout probabilities: `none`; `tis`, clipped; `icepop`,
            0 outside the bounds; of the product over the sample, `sequence-tis` and
            `sequence-mask`; of the geometric mean, `geometric-tis` and `geometric-icepop`;
            `geometric-mask`, the weight of the token, 0 where the geometric mean
            of its sample is outside. In `vespo` the weight of a sample takes them in.
        correction_bounds: Its bounds; infinite for none.
        correction_criterion: What they are held against: the `weight` itself, or what `rejection`
            knows by name; a weight whose criterion is outside is clipped, or 0, and any other
            stays (AReaL's action clamp).
        correction_log_clamp: Bounds of the logarithm of a weight (verl, MIS: -20 and 20).
        undefined_weight: What a weight against the sampler becomes that float32 does not hold, in
            the correction and of the KL against the rollout: 0 in NeMo-RL; None leaves it.
        correction_norm: Whether weights are divided by their mean: `none`, that over the trained
            `token`s, or over the mean of each `sequence`.
        correction_norm_over: Whose mean: of the `cohort` (verl), or the `micro-batch`.
        rejection: What is kept of what train against rollout probabilities are judged by, infinite
            for no bound; a token that is outside one of these drops out of every term. The ratio of
            each token, `token-ratio`, or that of the `sum-ratio`, `mean-ratio` or `max-ratio` of
            the logarithms over its sample; and so `token-k1`, `sum-k1`, `mean-k1`, `max-k1`,
            `token-k2`, `sum-k2`, `mean-k2`, `max-k2`, `token-k3`, `sum-k3`, `mean-k3`, `max-k3`. A
            factor is a ratio or its inverse, the one that is at least 1: `token-factor`,
            `sum-factor`, `max-factor` and `mean-factor` (NeMo-RL's seq_logprob_error_threshold).
        rejection_reverse: Whether it is rollout against train (verl, whose k1 bounds are
            logarithms).
        rejection_log_clamp: Bounds of the log ratio of a token that is judged.
        veto: Samples with a trained token of a lower weight drop out (MIS); None for none.
        m2_threshold: The tokens of largest squared log weight drop out of a micro-batch until the
            mean of the others is less (AReaL's M2PO); None for none. Squared nat.
        rejection_denominator: What dropped out still counts, `original` (MIS, AReaL); or the mask
            itself is changed, `kept` (verl, AReaL's M2PO), and everything is of what is left but
            the weights against the sampler, which are made of all trained tokens.
        opsm_delta: Tokens of a sample with A < 0 are dropped where the mean of old - current
            log-probs is above it; None for no such mask.
        opsm_source: Those `old` log-probs, or those of the `rollout` (TRL).
        kl_loss_coef: Coefficient of the KL in the loss.
        kl_loss_source: Which log-probs of the current policy that KL is of: those of the `loss`, or
            `unfiltered` ones, over the whole vocabulary where the sampler has top-p or top-k
            (NeMo-RL), which no column holds.
        kl_loss_estimator: As `kl.estimator`.
        kl_loss_clamp: Bounds of that estimate.
        kl_loss_log_ratio_clamp: Bounds of the log ratio that it is made of.
        kl_loss_clamped: As `kl.clamped`.
        kl_loss_weighted: Whether it is multiplied by a ratio of probabilities.
        kl_loss_weight: Which: current to `old` (slime), to `rollout` (NeMo-RL), or the `ratio` of
            the loss (TRL).
        count_epsilon: Added to every count of tokens or samples that a mean divides by, 1e-8 in
            verl and NeMo-RL; 0 takes a count as at least 1.
        fragments: What the mean over the tokens of a sample divides by: its `own` trained tokens,
            or those of all fragments of its trajectory, `shared`; a mean over samples then divides
            by trajectories.
        mean_over: Whether a mean is taken over its whole `scope`, or over each `micro-batch` and
            then over these (verl's legacy actor, TRL bnpo).
        micro_batch_weight: What each of these counts: `equal`, by its `rows`, or its `tokens`.
        token_count: What a mean over tokens divides by: the `trained` ones, or of each sample
            `at-least-one` (slime).
        denominator_rows: Samples that count in a mean over samples: `all`; those `with-tokens`; or
            `kept`, all but those of which every trained token was rejected (NeMo-RL).
        constant_norm: What `constant-norm` divides by.
        constant_norm_by_rows: Whether also by the samples (verl 0.9, TRL).
    """

    eps_clip: float = number(0.2)
    eps_clip_high: float | None = number(None)
    entropy_coef: float = number(0.0)
    aggregation: str = name(*_AGGREGATIONS, "constant-norm")
    entropy_aggregation: str = name("same", *_AGGREGATIONS)
    entropy_mean_over: str = name("same", "scope", "micro-batch")
    kl_loss_aggregation: str = name("same", *_AGGREGATIONS)
    kl_loss_mean_over: str = name("same", "scope", "micro-batch")
    metrics_aggregation: str = name("same", *_AGGREGATIONS)
    batch_reduction: str = name("sum", "mean")
    old_source: str = name("old", "rollout")
    proximal: str = name("recorded", "interpolated", "current")
    nll_coef: float = number(0.0)
    use_kl_loss: bool | None = flag(None)
    tis: bool | None = flag(None)
    opsm: bool | None = flag(None)
    opd: bool | None = flag(None)
    per_token: bool | None = flag(None)
    surrogate: str = name("ppo-clip", *SURROGATES)
    ratio: str = name("token", "sequence-mean", "sequence-sum", "one")
    log_ratio_clamp: Interval | None = interval(None)
    sequence_log_ratio_clamp: Interval | None = interval(None)
    advantage_level: str = name("token", "sequence-mean")
    dual_clip: float | None = number(None)
    dual_side: str = name("negative", "both")
    cispo_bounds: str = name("two-sided", "by-sign", "upper-absolute")
    sapo_tau_pos: float = number(1.0)
    sapo_tau_neg: float = number(1.05)
    sapo_clipped: str = name("slope", "nothing")
    vespo_k_pos: float = number(2.0)
    vespo_lambda_pos: float = number(3.0)
    vespo_k_neg: float = number(3.0)
    vespo_lambda_neg: float = number(2.0)
    m2po_kl2_budget: float = number(0.01)
    m2po_counts: str = name("trained", "response")
    m2po_least_low: float = number(0.3)
    m2po_least_high: float = number(0.5)
    kl_cov_fraction: float = number(0.0002)
    kl_cov_coef: float = number(0.1)
    kl_cov_ppo_kl: str = name("signed", "absolute")
    dppo_measure: str = name("difference", "binary-kl")
    dppo_rule: str = name("by-sign", "absolute")
    dppo_form: str = name("ratio", "log-prob")
    dppo_ratio_cap: float | None = number(None)
    dppo_adv_tau: float = number(1.0)
    dppo_kl_tau: float = number(1e-3)
    dro_beta: float = number(0.1)
    correction: str = name("none", *CORRECTIONS)
    correction_bounds: Interval | None = interval(None)
    correction_criterion: str = name("weight", *CRITERIA)
    correction_log_clamp: Interval | None = interval(None)
    undefined_weight: float | None = number(None)
    correction_norm: str = name("none", "token", "sequence")
    correction_norm_over: str = name("cohort", "micro-batch")
    rejection: Mapping[str, Interval] = intervals(*CRITERIA)
    rejection_reverse: bool = flag(False)
    rejection_log_clamp: Interval | None = interval(None)
    veto: float | None = number(None)
    m2_threshold: float | None = number(None)
    rejection_denominator: str = name("original", "kept")
    opsm_delta: float | None = number(None)
    opsm_source: str = name("old", "rollout")
    kl_loss_coef: float = number(0.0)
    kl_loss_source: str = name("loss")
    kl_loss_estimator: str = name(*KL_ESTIMATORS)
    kl_loss_clamp: Interval | None = interval(None)
    kl_loss_log_ratio_clamp: Interval | None = interval(None)
    kl_loss_clamped: str = name("every", "k3")
    kl_loss_weighted: bool = flag(False)
    kl_loss_weight: str = name("old", "rollout", "ratio")
    count_epsilon: float = number(0.0)
    fragments: str = name("own", "shared")
    mean_over: str = name("scope", "micro-batch")
    micro_batch_weight: str = name("equal", "rows", "tokens")
    token_count: str = name("trained", "at-least-one")
    denominator_rows: str = name("all", "with-tokens", "kept")
    constant_norm: float | None = number(None)
    constant_norm_by_rows: bool = flag(False)

    def __post_init__(self) -> None:
        if self.eps_clip_high is None:
            object.__setattr__(self, "eps_clip_high", self.eps_clip)
        if self.aggregation == "sum-of-sample-mean":
            object.__setattr__(self, "aggregation", "seq-mean-token-mean")
            object.__setattr__(self, "batch_reduction", "sum")
        if isinstance(self.rejection, Mapping):  # what it is otherwise is refused by its kind
            ordered = dict(sorted(self.rejection.items(), key=lambda item: str(item[0])))
            object.__setattr__(self, "rejection", ordered)
        if self.kl_loss_clamp is None:
            object.__setattr__(self, "kl_loss_clamp", own_clamp(self.kl_loss_estimator))

    @property
    def kl_loss_bounds(self) -> tuple[Interval | None, Interval | None]:
        """Bounds of the KL and of its log ratio, where they hold for its estimator."""
        estimator, clamped = self.kl_loss_estimator, self.kl_loss_clamped
        return held_bounds(estimator, clamped, self.kl_loss_clamp, self.kl_loss_log_ratio_clamp)


@dataclass(frozen=True)
class ValueSettings:
    """The value loss, aggregated as the policy loss is unless it says otherwise.

    Args:
        clip: How far the value may move from the old one before the loss ignores it; None for no
            clip.
        factor: Of the squared error: 1 in slime and Relax, 0.5 elsewhere.
        huber_delta: Errors from which on the loss grows linearly; None for squares throughout.
        counts: Which tokens it is of: the `trained` ones; those of them that the policy loss `kept`
            (verl, whose rejection changes the mask of both); those of the whole `response` (TRL's
            PPO, whose critic has a value past the end); or, by a mask that is `unshifted` against
            the values, the ones after trained tokens (NeMo-RL), the last of them past the end.
        aggregation: As loss.aggregation: `same`, or of its own (verl's critic).
        mean_over: As loss.mean_over: `same`, or of its own.
        counted: What counts as clipped: a `value` that moved further than clip (slime, Relax), or
            a token whose clipped `loss` is the larger.
    """

    clip: float | None = number(0.2, optional=True)
    factor: float = number(1.0)
    huber_delta: float | None = number(None)
    counts: str = name("trained", "kept", "response")
    aggregation: str = name("same", *_AGGREGATIONS, "constant-norm")
    mean_over: str = name("same", "scope", "micro-batch")
    counted: str = name("value", "loss")
