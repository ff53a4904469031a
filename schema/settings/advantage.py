"""Settings of the stages advantage.kl and advantage.estimate."""

from __future__ import annotations

from dataclasses import dataclass

from trajreplay.schema.settings.knobs import Interval, count, flag, interval, name, number

WHITENED_SETS = ("cohort", "rank", "context-rank", "group", "sample", "consumer-batch")
KL_ESTIMATORS = ("k1", "k2", "k3", "low_var_kl", "abs")
LOW_VAR_KL_CLAMP = (-10.0, 10.0)  # slime and Relax clamp low_var_kl, not k3


@dataclass(frozen=True)
class KlSettings:
    """KL of policy against reference.

    Args:
        estimator: `k1`, `k2`, `k3`, `abs`, or `low_var_kl` (k3 with its output clamped).
        coef: Its coefficient; 0 makes the recorded KL all zeros and needs no reference. That of an
            adaptive controller is stated capture by capture; how it came about is not checked.
        policy_source: Which log-probs stand for the policy: `old` or `rollout`.
        value_clamp: Bounds of the estimate; low_var_kl brings (-10, 10).
        log_ratio_clamp: Bounds of the log ratio that it is made of.
        clamped: Which estimators these bounds hold for: `every` one, or `k3` and low_var_kl alone
            (verl, where the two are one).
    """

    estimator: str = name(*KL_ESTIMATORS)
    coef: float = number(0.0)
    policy_source: str = name("old", "rollout")
    value_clamp: Interval | None = interval(None)
    log_ratio_clamp: Interval | None = interval(None)
    clamped: str = name("every", "k3")

    def __post_init__(self) -> None:
        if self.value_clamp is None:
            object.__setattr__(self, "value_clamp", own_clamp(self.estimator))

    @property
    def bounds(self) -> tuple[Interval | None, Interval | None]:
        """Bounds of the estimate and of its log ratio, where they hold for the estimator."""
        return held_bounds(self.estimator, self.clamped, self.value_clamp, self.log_ratio_clamp)


def own_clamp(estimator: str) -> Interval | None:
    """The bounds that an estimate of the KL brings with it."""
    return LOW_VAR_KL_CLAMP if estimator == "low_var_kl" else None


def held_bounds(
    estimator: str, clamped: str, value: Interval | None, log_ratio: Interval | None
) -> tuple[Interval | None, Interval | None]:
    """Bounds of an estimate and of its log ratio, None for both where they do not hold for it."""
    holds = clamped == "every" or estimator in ("k3", "low_var_kl")
    return (value, log_ratio) if holds else (None, None)


@dataclass(frozen=True)
class AdvantageSettings:
    """Advantage estimation.

    Args:
        estimator: `grpo` gives every response token the reward of its sample;
            `reinforce++-baseline` that less the KL penalty of the token; `reinforce++` the
            discounted return of the token rewards; `gae` the generalised advantage over a critic;
            `remax` their plain return less the reward of the greedy response; `otb` that less the
            optimal token baseline of its group (verl); `opd` the distillation term alone.
        reward_source: What token rewards are: the `sample`'s reward at one token, or the `token`'s
            own as captured; `grpo` takes those as they are.
        gamma: Discount a token.
        lam: Lambda of GAE.
        lam_alpha: Where stated, lambda is 1 - 1 / max(alpha n, 1) instead, with n the response
            tokens of the sample (VAPO).
        lam_returns: Lambda of the returns that the critic is fitted to, 1 in VAPO; None for that
            of the advantages.
        bootstrap: The value past the last token: `none`, 0; `last`, that of the critic, as
            captured in last_value; or `truncated`, that where the response was cut off and 0
            where it ended by itself (AReaL).
        masking: How returns and GAE pass masked tokens: `through` them as any other, `reset` to 0
            at each (verl's REINFORCE++), `carry` past them, or `multiply`, whose rewards and
            values count as 0, as with `remax` and `otb` they always do.
        reward_at: The token that gets the reward of the sample: the `last` of the response; the
            `last-unmasked`; or `after-last-unmasked`, the next one where there is one (TRL's PPO,
            whose critic has a value past the end).
        kl_in_reward: Whether -kl.coef times the KL of each token is part of its reward; where it
            is, `reinforce++-baseline` pays it too.
        kl_masked: Whether masked tokens pay no KL; with the GAE of slime and Relax they do.
        counts: Which tokens returns and statistics are of: the `trained` ones, or those of them
            that the loss `kept` (verl, which rejects before it estimates).
        otb_zero_tail: Whether the one longest sample of a group has no baseline beyond the second.
        otb_positions: Whether the positions at which samples share a baseline count `all` tokens
            of a response, or the `trained` ones alone (verl's tir_optimal_token_baseline).
        otb_weights: Importance weights that the baseline takes in: `none`, or those of the
            `correction` of the loss (verl).
        opd_coef: What a nat of the policy over its teacher costs each token (on-policy
            distillation), before whitening; the policy is that of `kl.policy_source`.
        whiten: Which tokens share statistics when advantages are whitened: `none` at all, those of
            the `cohort`, of a `rank`, those that one `context-rank` holds over all data-parallel
            ones (Relax, which reduces over these alone), of a `group`, of a `sample`, or of a
            `consumer-batch` (NeMo-RL's SingleController, which whitens every chunk as it comes).
        whiten_centre: Which tokens share the mean that is taken off, where they are others than
            share the deviation, which is one around that mean: `same`; `none`, no mean is taken
            off; or those of what whiten may name (AReaL's mean_level beside its std_level).
        whiten_leave_one_out: Whether the mean of a token is that of the others (AReaL).
        whiten_scale: Whether they are divided by the deviation, or only centred.
        whiten_ddof: Delta degrees of freedom of that deviation.
        whiten_epsilon: Keeps the division finite.
        whiten_form: Where epsilon is: `added` to the variance, the variance `floored` at it, or
            added to the deviation (`std`).
        whiten_one_pass: Whether the variance is taken as E[x^2] - E[x]^2 (slime, Relax).
        whiten_short: What is done where too few tokens count for a deviation: `raise`, and the
            cohort is refused; `biased`, a single token is divided by their number; `keep`, whose
            deviation is 1, and which leaves a set without any as it is; or `nan`.
        returns: Returns of what has none of its own, which are its advantages (`grpo`,
            `reinforce++-baseline`): as `estimated`, or as `whitened` (verl).
        invalid_tool_call: Advantage of the tokens of a message with an invalid tool call, whatever
            was estimated; None leaves it (NeMo-RL).
        malformed_thinking: The same of a message with malformed thinking.
        clip: Bounds of the advantages, after all of that.
    """

    estimator: str = name(
        "grpo", "reinforce++", "reinforce++-baseline", "gae", "remax", "otb", "opd"
    )
    reward_source: str = name("sample", "token")
    gamma: float = number(1.0)
    lam: float = number(1.0)
    lam_alpha: float | None = number(None)
    lam_returns: float | None = number(None)
    bootstrap: str = name("none", "last", "truncated")
    masking: str = name("through", "reset", "carry", "multiply")
    reward_at: str = name("last", "last-unmasked", "after-last-unmasked")
    kl_in_reward: bool = flag(False)
    kl_masked: bool = flag(True)
    counts: str = name("trained", "kept")
    otb_zero_tail: bool = flag(True)
    otb_positions: str = name("all", "trained")
    otb_weights: str = name("none", "correction")
    opd_coef: float = number(0.0)
    whiten: str = name("none", *WHITENED_SETS)
    whiten_centre: str = name("same", "none", *WHITENED_SETS)
    whiten_leave_one_out: bool = flag(False)
    whiten_scale: bool = flag(True)
    whiten_ddof: int = count(1)
    whiten_epsilon: float = number(1e-8)
    whiten_form: str = name("added", "floored", "std")
    whiten_one_pass: bool = flag(False)
    whiten_short: str = name("raise", "biased", "keep", "nan")
    returns: str = name("estimated", "whitened")
    invalid_tool_call: float | None = number(None)
    malformed_thinking: float | None = number(None)
    clip: Interval | None = interval(None)
