"""The statistics of a mismatch, declared once: name, formula, origin, how it is finished.

`d` is the difference of a token, trainer minus sampler; M a mean over valid tokens, S over
sequences; everything is in nats or without a unit. Each is finished from `partial_sums`.
"""

from __future__ import annotations

from trajreplay.query.mismatch.statistic import (
    Statistic,
    effective,
    exp,
    mean_of,
    ratio,
    spread,
    value_of,
)

STATISTICS: tuple[Statistic, ...] = (
    Statistic(
        "generation_kl",
        "M(exp(d) - 1 - d), k3, no clamp",
        "NeMo-RL gen_kl_error, verl rollout_corr/k3_kl, prime-rl mismatch_kl",
        mean_of("k3"),
        over_steps=True,
    ),
    Statistic("valid_tokens", "tokens with loss_mask 1", "", value_of("n"), is_count=True),
    Statistic(
        "abs_delta_max", "max |d|", "TRL sampling/sampling_logp_difference/max", value_of("a_high")
    ),
    Statistic(
        "abs_delta",
        "M(|d|)",
        "slime train_rollout_logprob_abs_diff, TRL sampling/sampling_logp_difference/mean",
        mean_of("a"),
        over_steps=True,
    ),
    Statistic(
        "generation_kl_k1",
        "M(-d), k1",
        "verl rollout_corr/kl, OpenRLHF vllm_kl",
        lambda sums: -ratio(sums["d"], sums["n"]),
        over_steps=True,
    ),
    Statistic(
        "generation_kl_k2",
        "M(d^2 / 2), k2",
        "NeMo-RL gen_kl_error with type k2",
        lambda sums: ratio(sums["dd"], sums["n"]) / 2,
        over_steps=True,
    ),
    Statistic(
        "policy_kl",
        "M(exp(-d) - 1 + d), k3 with the roles swapped",
        "NeMo-RL policy_kl_error",
        mean_of("reverse"),
        over_steps=True,
    ),
    Statistic(
        "js_divergence",
        "M(log cosh(d / 2)), which is (k3(old|mix) + k3(rollout|mix)) / 2",
        "NeMo-RL js_divergence_error",
        mean_of("js"),
        over_steps=True,
    ),
    Statistic(
        "token_mult_prob_error",
        "M(exp(|d|))",
        "NeMo-RL token_mult_prob_error",
        lambda sums: ratio(sums["n"] + sums["a"] + sums["worse"], sums["n"]),
        over_steps=True,
    ),
    Statistic(
        "importance_ratio",
        "M(exp(d)), before any truncation",
        "NeMo-RL sampling_importance_ratio without truncation, slime tis",
        mean_of("w"),
        over_steps=True,
    ),
    Statistic(
        "importance_ratio_min",
        "min exp(d)",
        "verl rollout_is_min",
        lambda sums: exp(sums["d_low"]),
    ),
    Statistic(
        "importance_ratio_max",
        "max exp(d)",
        "verl rollout_is_max",
        lambda sums: exp(sums["d_high"]),
    ),
    Statistic(
        "importance_ratio_std",
        "deviation of exp(d), |d| at most 20, divisor n",
        "verl rollout_is_std of raw weights",
        spread,
    ),
    Statistic(
        "importance_ratio_truncated",
        "M(min(exp(d), C)), C = --cap",
        "verl rollout_is_mean, NeMo-RL sampling_importance_ratio with truncation",
        mean_of("w_cut"),
    ),
    Statistic(
        "truncated_share",
        "share of tokens with exp(d) > C",
        "verl rollout_is_ratio_fraction_high, slime tis_clipfrac",
        mean_of("w_high"),
    ),
    Statistic(
        "ess",
        "1 / M((u / M(u))^2), u = exp(d) within [1/C, C]",
        "verl rollout_is_eff_sample_size",
        lambda sums: effective(sums, sums["w_box"], sums["w_box2"]),
    ),
    Statistic(
        "ess_raw",
        "M(exp(d))^2 / M(exp(2 d)), |d| at most 20",
        "Kong 1992, as a share of the tokens",
        lambda sums: effective(sums, sums["v"], sums["v2"]),
    ),
    Statistic(
        "chi2_token",
        "M(exp(2 d)) - 1, |d| at most 20",
        "verl rollout_corr/chi2_token",
        mean_of("vv"),
    ),
    Statistic("equal_tokens", "tokens with d = 0", "", value_of("equal"), is_count=True),
    Statistic(
        "non_finite_tokens", "valid tokens, d not finite", "", value_of("odd"), is_count=True
    ),
    Statistic(
        "sequences",
        "samples with a valid token",
        "",
        value_of("sequences"),
        level="sequence",
        is_count=True,
    ),
    Statistic(
        "training_ppl",
        "S(exp(-mean_t old))",
        "verl rollout_corr/training_ppl",
        mean_of("ppl_x", over="sequences"),
        level="sequence",
    ),
    Statistic(
        "rollout_ppl",
        "S(exp(-mean_t rollout))",
        "verl rollout_corr/rollout_ppl",
        mean_of("ppl_r", over="sequences"),
        level="sequence",
    ),
    Statistic(
        "log_ppl_diff",
        "S(-mean_t d)",
        "verl rollout_corr/log_ppl_diff",
        mean_of("lp", over="sequences"),
        level="sequence",
    ),
    Statistic(
        "log_ppl_abs_diff",
        "S(|mean_t d|)",
        "verl rollout_corr/log_ppl_abs_diff",
        mean_of("lp_abs", over="sequences"),
        level="sequence",
    ),
    Statistic(
        "log_ppl_diff_min",
        "min over sequences of -mean_t d",
        "verl rollout_corr/log_ppl_diff_min",
        value_of("lp_low"),
        level="sequence",
    ),
    Statistic(
        "log_ppl_diff_max",
        "max over sequences of -mean_t d",
        "verl rollout_corr/log_ppl_diff_max",
        value_of("lp_high"),
        level="sequence",
    ),
    Statistic(
        "ppl_ratio",
        "S(exp(-mean_t d))",
        "verl rollout_corr/ppl_ratio, slime mis_ppl_ratio",
        mean_of("ppl_ratio", over="sequences"),
        level="sequence",
    ),
    Statistic(
        "sequence_ratio",
        "S(exp(sum_t d))",
        "NeMo-RL sampling_importance_ratio of sequences, TRL sequence modes",
        mean_of("s", over="sequences"),
        level="sequence",
    ),
    Statistic(
        "sequence_ratio_min",
        "min exp(sum_t d)",
        "TRL sampling/importance_sampling_ratio/min",
        value_of("s_low"),
        level="sequence",
    ),
    Statistic(
        "sequence_ratio_max",
        "max exp(sum_t d)",
        "TRL sampling/importance_sampling_ratio/max",
        value_of("s_high"),
        level="sequence",
    ),
    Statistic(
        "chi2_seq",
        "S(exp(2 sum_t d)) - 1, |sum_t d| at most 20",
        "verl rollout_corr/chi2_seq, slime mis_chi2_seq",
        mean_of("s2", over="sequences", plus=-1.0),
        level="sequence",
    ),
    Statistic(
        "chi2_token_seq",
        "S(mean_t exp(2 d) - 1), |d| at most 20",
        "slime mis_chi2_token",
        mean_of("chi", over="sequences"),
        level="sequence",
    ),
    Statistic(
        "seq_mult_prob_error",
        "S(mean_t exp(|d|))",
        "NeMo-RL mean_seq_mult_prob_error",
        mean_of("error", over="sequences"),
        level="sequence",
    ),
    Statistic(
        "seq_mult_prob_error_min",
        "min mean_t exp(|d|)",
        "NeMo-RL min_seq_mult_prob_error",
        value_of("error_low"),
        level="sequence",
    ),
    Statistic(
        "seq_mult_prob_error_max",
        "max mean_t exp(|d|)",
        "NeMo-RL max_seq_mult_prob_error",
        value_of("error_high"),
        level="sequence",
    ),
)
QUANTILES = {"abs_delta_p50": 0.5, "abs_delta_p99": 0.99, "abs_delta_p999": 0.999}
# Compared between runs by their means over steps.
COMPARED = tuple(one.name for one in STATISTICS if one.over_steps)
