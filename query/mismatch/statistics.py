"""The statistics of a mismatch, declared once: name, formula, origin, how it is finished.

`d` is the difference of a token, trainer minus sampler; M a mean over valid tokens, S over
sequences; everything is in nats or without a unit. Each is finished from sums that DuckDB takes
over the tokens of one sample (`TOKEN_SUMS`), and over sequences (`SEQUENCE_SUMS`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

Sums = Mapping[str, float]


@dataclass(frozen=True)
class Statistic:
    """One declared statistic.

    Args:
        name: Its column.
        formula: What it is.
        origin: Who computes it under which name.
        finish: From sums to the statistic.
        over_steps: Whether it is taken for each step, and the column is the unweighted mean over
            steps, beside which `_step_min` and `_step_max` over steps and the token-weighted mean
            `_token_mean` stand.
        level: What it is over: tokens, or whole sequences.
        is_count: Whether it is a whole number.
    """

    name: str
    formula: str
    origin: str
    finish: Callable[[Sums], float]
    over_steps: bool = False
    level: Literal["token", "sequence"] = "token"
    is_count: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it makes."""
        beside = ("_step_min", "_step_max", "_token_mean") if self.over_steps else ()
        return tuple(self.name + ending for ending in ("", *beside))


def _mean(name: str, *, over: str = "n", plus: float = 0.0) -> Callable[[Sums], float]:
    return lambda sums: _ratio(sums[name], sums[over]) + plus


def _value(name: str) -> Callable[[Sums], float]:
    return lambda sums: sums[name]


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _ratio(above: float, below: float) -> float:
    return above / below if below else math.nan


def _ess(sums: Sums, first: float, second: float) -> float:
    return _ratio(first * first, sums["n"] * second)


def _spread(sums: Sums) -> float:
    mean = _ratio(sums["w"], sums["n"])
    return math.sqrt(max(0.0, 1 + _ratio(sums["vv"], sums["n"]) - mean * mean))


STATISTICS: tuple[Statistic, ...] = (
    Statistic(
        "generation_kl",
        "M(exp(d) - 1 - d), k3, no clamp",
        "NeMo-RL gen_kl_error, verl rollout_corr/k3_kl, prime-rl mismatch_kl",
        _mean("k3"),
        over_steps=True,
    ),
    Statistic("valid_tokens", "tokens with loss_mask 1", "", _value("n"), is_count=True),
    Statistic(
        "abs_delta_max", "max |d|", "TRL sampling/sampling_logp_difference/max", _value("a_high")
    ),
    Statistic(
        "abs_delta",
        "M(|d|)",
        "slime train_rollout_logprob_abs_diff, TRL sampling/sampling_logp_difference/mean",
        _mean("a"),
        over_steps=True,
    ),
    Statistic(
        "generation_kl_k1",
        "M(-d), k1",
        "verl rollout_corr/kl, OpenRLHF vllm_kl",
        lambda sums: -_ratio(sums["d"], sums["n"]),
        over_steps=True,
    ),
    Statistic(
        "generation_kl_k2",
        "M(d^2 / 2), k2",
        "NeMo-RL gen_kl_error with type k2",
        lambda sums: _ratio(sums["dd"], sums["n"]) / 2,
        over_steps=True,
    ),
    Statistic(
        "policy_kl",
        "M(exp(-d) - 1 + d), k3 with the roles swapped",
        "NeMo-RL policy_kl_error",
        _mean("reverse"),
        over_steps=True,
    ),
    Statistic(
        "js_divergence",
        "M(log cosh(d / 2)), which is (k3(old|mix) + k3(rollout|mix)) / 2",
        "NeMo-RL js_divergence_error",
        _mean("js"),
        over_steps=True,
    ),
    Statistic(
        "token_mult_prob_error",
        "M(exp(|d|))",
        "NeMo-RL token_mult_prob_error",
        lambda sums: _ratio(sums["n"] + sums["a"] + sums["worse"], sums["n"]),
        over_steps=True,
    ),
    Statistic(
        "importance_ratio",
        "M(exp(d)), before any truncation",
        "NeMo-RL sampling_importance_ratio without truncation, slime tis",
        _mean("w"),
        over_steps=True,
    ),
    Statistic(
        "importance_ratio_min",
        "min exp(d)",
        "verl rollout_is_min",
        lambda sums: _exp(sums["d_low"]),
    ),
    Statistic(
        "importance_ratio_max",
        "max exp(d)",
        "verl rollout_is_max",
        lambda sums: _exp(sums["d_high"]),
    ),
    Statistic(
        "importance_ratio_std",
        "deviation of exp(d), |d| at most 20, divisor n",
        "verl rollout_is_std of raw weights",
        _spread,
    ),
    Statistic(
        "importance_ratio_truncated",
        "M(min(exp(d), C)), C = --cap",
        "verl rollout_is_mean, NeMo-RL sampling_importance_ratio with truncation",
        _mean("w_cut"),
    ),
    Statistic(
        "truncated_share",
        "share of tokens with exp(d) > C",
        "verl rollout_is_ratio_fraction_high, slime tis_clipfrac",
        _mean("w_high"),
    ),
    Statistic(
        "ess",
        "1 / M((u / M(u))^2), u = exp(d) within [1/C, C]",
        "verl rollout_is_eff_sample_size",
        lambda sums: _ess(sums, sums["w_box"], sums["w_box2"]),
    ),
    Statistic(
        "ess_raw",
        "M(exp(d))^2 / M(exp(2 d)), |d| at most 20 in the square",
        "Kong 1992, as a share of the tokens",
        lambda sums: _ess(sums, sums["w"], sums["v2"]),
    ),
    Statistic(
        "chi2_token",
        "M(exp(2 d)) - 1, |d| at most 20",
        "verl rollout_corr/chi2_token",
        _mean("vv"),
    ),
    Statistic("equal_tokens", "tokens with d = 0", "", _value("equal"), is_count=True),
    Statistic(
        "non_finite_tokens", "valid tokens whose d is not finite", "", _value("odd"), is_count=True
    ),
    Statistic(
        "sequences",
        "samples with a valid token",
        "",
        _value("sequences"),
        level="sequence",
        is_count=True,
    ),
    Statistic(
        "training_ppl",
        "S(exp(-mean_t old))",
        "verl rollout_corr/training_ppl",
        _mean("ppl_x", over="sequences"),
        level="sequence",
    ),
    Statistic(
        "rollout_ppl",
        "S(exp(-mean_t rollout))",
        "verl rollout_corr/rollout_ppl",
        _mean("ppl_r", over="sequences"),
        level="sequence",
    ),
    Statistic(
        "log_ppl_diff",
        "S(-mean_t d)",
        "verl rollout_corr/log_ppl_diff",
        _mean("lp", over="sequences"),
        level="sequence",
    ),
    Statistic(
        "log_ppl_abs_diff",
        "S(|mean_t d|)",
        "verl rollout_corr/log_ppl_abs_diff",
        _mean("lp_abs", over="sequences"),
        level="sequence",
    ),
    Statistic(
        "log_ppl_diff_min",
        "min over sequences of -mean_t d",
        "verl rollout_corr/log_ppl_diff_min",
        _value("lp_low"),
        level="sequence",
    ),
    Statistic(
        "log_ppl_diff_max",
        "max over sequences of -mean_t d",
        "verl rollout_corr/log_ppl_diff_max",
        _value("lp_high"),
        level="sequence",
    ),
    Statistic(
        "ppl_ratio",
        "S(exp(-mean_t d))",
        "verl rollout_corr/ppl_ratio, slime mis_ppl_ratio",
        _mean("ppl_ratio", over="sequences"),
        level="sequence",
    ),
    Statistic(
        "sequence_ratio",
        "S(exp(sum_t d))",
        "NeMo-RL sampling_importance_ratio of sequences, TRL sequence modes",
        _mean("s", over="sequences"),
        level="sequence",
    ),
    Statistic(
        "sequence_ratio_min",
        "min exp(sum_t d)",
        "TRL sampling/importance_sampling_ratio/min",
        _value("s_low"),
        level="sequence",
    ),
    Statistic(
        "sequence_ratio_max",
        "max exp(sum_t d)",
        "TRL sampling/importance_sampling_ratio/max",
        _value("s_high"),
        level="sequence",
    ),
    Statistic(
        "chi2_seq",
        "S(exp(2 sum_t d)) - 1, |sum_t d| at most 20",
        "verl rollout_corr/chi2_seq, slime mis_chi2_seq",
        _mean("s2", over="sequences", plus=-1.0),
        level="sequence",
    ),
    Statistic(
        "chi2_token_seq",
        "S(mean_t exp(2 d) - 1), |d| at most 20",
        "slime mis_chi2_token",
        _mean("chi", over="sequences"),
        level="sequence",
    ),
    Statistic(
        "seq_mult_prob_error",
        "S(mean_t exp(|d|))",
        "NeMo-RL mean_seq_mult_prob_error",
        _mean("error", over="sequences"),
        level="sequence",
    ),
    Statistic(
        "seq_mult_prob_error_min",
        "min mean_t exp(|d|)",
        "NeMo-RL min_seq_mult_prob_error",
        _value("error_low"),
        level="sequence",
    ),
    Statistic(
        "seq_mult_prob_error_max",
        "max mean_t exp(|d|)",
        "NeMo-RL max_seq_mult_prob_error",
        _value("error_high"),
        level="sequence",
    ),
)
QUANTILES = {"abs_delta_p50": 0.5, "abs_delta_p99": 0.99, "abs_delta_p999": 0.999}
# Compared between runs by their means over steps.
COMPARED = tuple(one.name for one in STATISTICS if one.over_steps)
