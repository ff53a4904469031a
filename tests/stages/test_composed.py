"""Every setting beyond V1: what it makes of a training passes, and under it another does not."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.cohorts import ALL_COLUMNS, ALL_STAGES, capture
from tests.helpers.composed import ComposedTrainer
from tests.helpers.composed_corrections import CURRENT
from tests.helpers.scenes import WAY, drawn, the_cohort, the_stage
from tests.helpers.trainer import Sample
from trajreplay import KlSettings, Lake, LossSettings, RewardSettings, Settings, with_changes
from trajreplay.schema.settings import LOSS_TERMS, PROFILES, SECTIONS, differences
from trajreplay.schema.settings.knobs import kinds
from trajreplay.stages import CohortReport

STAGES = (*ALL_STAGES, "loss.value")
COLUMNS = (
    *(*ALL_COLUMNS, "values", "old_values"),
    *("token_rewards", "teacher_log_probs", "sum_pi_squared", "message_faults"),
)
PLAIN = Settings(
    reward=RewardSettings(n_samples_per_prompt=4),
    kl=KlSettings(coef=0.1),
    loss=LossSettings(entropy_coef=0.01, eps_clip_high=0.28),
)
SCORE, REWARD = "reward.raw", "reward.post_process"
KL, ESTIMATE = "advantage.kl", "advantage.estimate"
POLICY, VALUE = "loss.policy", "loss.value"
LEAVE_ONE_OUT = {"reward.baseline": "leave-one-out"}
BOUNDS = {"loss.correction_bounds": (0.9, 1.05)}
RAW = {"loss.correction": "tis", "loss.correction_bounds": (0.0, math.inf)}
AREAL_CLAMP = {"loss.correction": "tis", "loss.correction_bounds": (-math.inf, 1e-3)}
KEPT = {"loss.rejection": {"token-ratio": (0.97, 1.02)}}
RS = {
    "loss.rejection_reverse": True,
    "loss.rejection_log_clamp": (-20.0, 20.0),
    "loss.rejection_denominator": "kept",
}
SMALL = (-math.inf, 1e-3)
MEAN = {"loss.batch_reduction": "mean"}
BATCHES = {
    "loss.aggregation": "token-mean",
    "loss.mean_over": "micro-batch",
    "loss.micro_batch_weight": "tokens",
    "loss.rejection_denominator": "kept",
    **MEAN,
}
M2 = {"loss.m2_threshold": 1e-4, **BATCHES}
DPPO = {"loss.surrogate": "dppo", "loss.dppo_form": "log-prob", "loss.dppo_ratio_cap": 1.1}
RETURNS = {"advantage.estimator": "reinforce++", "advantage.gamma": 0.9}
GAE = {"advantage.estimator": "gae", "advantage.gamma": 0.99, "advantage.lam": 0.95}
WHITE = {"advantage.whiten": "cohort"}
AREAL_NORM = {
    **WHITE,
    "advantage.whiten_form": "std",
    "advantage.whiten_epsilon": 1e-5,
    "advantage.whiten_short": "keep",
}
OWN = {"advantage.reward_source": "token"}
PARTS = {"reward.weights": {"format": 0.5, "answer": 1.0}}
APART = {**PARTS, "reward.combination": "normalise-then-sum"}
VERL_RS = {**KEPT, "loss.rejection_denominator": "kept"}
# TRL's RLOO: the KL within the reward, then leave-one-out, and the batch over its deviation.
RLOO = {**LEAVE_ONE_OUT, "reward.divide_by_std": False}
RESCALED = {"reward.rescale": "batch", "reward.batch_epsilon": 1e-4}
OVERLONG = {"reward.overlong_max_length": 5, "reward.overlong_buffer": 2}
STEPS = {"reward.unit": "step", "reward.n_samples_per_prompt": 2}
AGENTS = {"reward.grouping": "agent", "reward.n_samples_per_prompt": None}

# Changes to the plain settings, and the first stage whose numbers they change.
CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "leave-one-out": ({**LEAVE_ONE_OUT, "reward.divide_by_std": False}, REWARD),
    "leave-one-out twice": ({**LEAVE_ONE_OUT, "reward.divisor": "leave-one-out-std"}, REWARD),
    "around the baseline": ({**LEAVE_ONE_OUT, "reward.divisor": "std-around-baseline"}, REWARD),
    "length-weighted": ({"reward.baseline": "length-weighted"}, REWARD),
    "weighted by trained tokens": (
        {"reward.baseline": "length-weighted", "reward.baseline_counts": "trained"},
        REWARD,
    ),
    "weighted by kept tokens": (
        {
            "reward.baseline": "length-weighted",
            "reward.baseline_counts": "kept",
            "loss.rejection": {"token-ratio": (0.98, 1.2)},
            "loss.rejection_denominator": "kept",
        },
        REWARD,
    ),
    "batch": ({"reward.grouping": "batch", "reward.n_samples_per_prompt": None}, REWARD),
    "stride": ({"reward.grouping": "stride", "reward.n_samples_per_prompt": 2}, REWARD),
    "std of the batch": ({"reward.std_grouping": "batch"}, REWARD),
    "epsilon": ({"reward.epsilon": 1e-2}, REWARD),
    "over all of the group": ({"reward.ddof": 0}, REWARD),
    "epsilon as floor": ({"reward.epsilon": 0.5, "reward.epsilon_place": "floored"}, REWARD),
    "epsilon inside": ({"reward.epsilon": 0.5, "reward.epsilon_place": "inside"}, REWARD),
    "clipped before": ({"reward.clip_before": (0.25, 0.75)}, REWARD),
    "clipped after": ({"reward.clip_after": (-0.5, 0.5)}, REWARD),
    "overlong": (OVERLONG, REWARD),
    "overlong, less": ({**OVERLONG, "reward.overlong_penalty": 0.25}, REWARD),
    "overlong, floored": (
        {**OVERLONG, "reward.overlong_max_length": 3, "reward.overlong_floored": True},
        REWARD,
    ),
    "overlong trained tokens": (
        {**OVERLONG, "reward.overlong_counts": "trained"},
        REWARD,
    ),
    "overlong first message": (
        {**OVERLONG, "reward.overlong_counts": "first-message"},
        REWARD,
    ),
    "scaled": ({"reward.scale_from": (0.25, 0.75), "reward.scale_to": (-1.0, 2.0)}, REWARD),
    "cut responses": ({"reward.stop_properly_coef": 0.5}, REWARD),
    "cut responses replaced": (
        {"reward.stop_properly_coef": -0.5, "reward.stop_properly_rule": "replace"},
        REWARD,
    ),
    "lengthy and cut responses": ({**OVERLONG, "reward.stop_properly_coef": 0.0}, REWARD),
    "lengthy and cut responses replaced": (
        {
            **OVERLONG,
            "reward.stop_properly_coef": -0.5,
            "reward.stop_properly_rule": "replace",
        },
        REWARD,
    ),
    "greedy": ({"reward.baseline": "greedy", "reward.divide_by_std": False}, REWARD),
    "gpg": ({"reward.rule": "gpg", "reward.divide_by_std": False}, REWARD),
    "gpg over a norm": (
        {"reward.rule": "gpg", "reward.divide_by_std": False, "reward.gpg_norm": 2.0},
        REWARD,
    ),
    "kept": (
        {"reward.baseline": "kept", "reward.grouping": "none", "reward.divide_by_std": False},
        REWARD,
    ),
    "agents": ({**AGENTS, "reward.divide_by_std": False}, REWARD),
    "agents of episodes": ({**AGENTS, "reward.episode_agents": ("solver",)}, REWARD),
    "costs": (
        {
            "reward.costs": {"output": 0.25, "input": 0.1, "turns": 0.1},
            "reward.divide_by_std": False,
        },
        REWARD,
    ),
    "bias and factor": (
        {
            "reward.bias": -0.5,
            "reward.factor": 2.0,
            "reward.grouping": "none",
            "reward.n_samples_per_prompt": None,
        },
        REWARD,
    ),
    "mean of the batch, deviation of the group": (
        {"reward.grouping": "batch", "reward.std_grouping": "group"},
        REWARD,
    ),
    "sums of token rewards": ({"reward.source": "token"}, SCORE),
    "pass@k": ({"reward.rule": "pass@k"}, REWARD),
    "pass@k, plain": ({"reward.rule": "pass@k", "reward.divide_by_std": False}, REWARD),
    "components": (PARTS, SCORE),
    "components, some missing": ({**PARTS, "reward.missing": "exclude"}, SCORE),
    "gdpo": ({**APART, **LEAVE_ONE_OUT, "reward.batch_epsilon": 0.0}, REWARD),
    "gdpo of trl": (
        {
            **APART,
            "reward.missing": "exclude",
            "reward.epsilon": 1e-4,
            "reward.batch_epsilon": 1e-4,
        },
        REWARD,
    ),
    "gdpo of groups alone": (APART, REWARD),
    "kl within the reward": ({**RLOO, "reward.less_kl": True}, REWARD),
    "kl within a divided reward": ({"reward.less_kl": True, "kl.estimator": "k3"}, REWARD),
    "kl of the sampler within the reward": (
        {"reward.less_kl": True, "kl.policy_source": "rollout", "reward.clip_before": (0.2, 0.9)},
        REWARD,
    ),
    "rescaled over the batch": ({**RLOO, **RESCALED}, REWARD),
    "rloo of trl": (
        {
            **RLOO,
            **RESCALED,
            **PARTS,
            "reward.less_kl": True,
            "reward.missing": "exclude",
            "reward.lone": "nan",
        },
        SCORE,
    ),
    "gdpo whose lone components are nan": (
        {**APART, "reward.missing": "exclude", "reward.lone": "nan", "reward.batch_epsilon": 1e-4},
        REWARD,
    ),
    "steps": (STEPS, REWARD),
    "steps discounted": ({**STEPS, "reward.step_gamma": 0.5}, REWARD),
    "k2": ({"kl.estimator": "k2"}, KL),
    "abs": ({"kl.estimator": "abs"}, KL),
    "kl of clamped ratios": ({"kl.log_ratio_clamp": (-0.1, 0.1)}, KL),
    "reinforce++ through": ({**RETURNS, "advantage.masking": "through"}, ESTIMATE),
    "reinforce++ reset": ({**RETURNS, "advantage.masking": "reset"}, ESTIMATE),
    "reinforce++ carry": ({**RETURNS, "advantage.masking": "carry"}, ESTIMATE),
    "reinforce++ at unmasked": ({**RETURNS, "advantage.reward_at": "last-unmasked"}, ESTIMATE),
    "reinforce++ after unmasked": (
        {**RETURNS, "advantage.reward_at": "after-last-unmasked"},
        ESTIMATE,
    ),
    "gae of trl": (
        {
            **GAE,
            **WHITE,
            "advantage.reward_at": "after-last-unmasked",
            "advantage.kl_in_reward": True,
            "value.counts": "response",
        },
        ESTIMATE,
    ),
    "reinforce++ of kept tokens": (
        {
            **RETURNS,
            **VERL_RS,
            **WHITE,
            "advantage.whiten_short": "keep",
            "advantage.masking": "carry",
            "advantage.counts": "kept",
        },
        ESTIMATE,
    ),
    "gae of kept tokens": (
        {**GAE, **VERL_RS, "advantage.masking": "carry", "advantage.counts": "kept"},
        ESTIMATE,
    ),
    "reinforce++ with kl": ({**RETURNS, "advantage.kl_in_reward": True}, ESTIMATE),
    "reinforce++ baseline": (
        {"advantage.estimator": "reinforce++-baseline", "advantage.kl_in_reward": True},
        ESTIMATE,
    ),
    "gae through": ({**GAE, "advantage.masking": "through"}, ESTIMATE),
    "gae carry": ({**GAE, "advantage.masking": "carry"}, ESTIMATE),
    "gae multiply": ({**GAE, "advantage.masking": "multiply"}, ESTIMATE),
    "gae length-adaptive": ({**GAE, "advantage.lam_alpha": 0.5}, ESTIMATE),
    "grpo of tokens": (OWN, ESTIMATE),
    "reinforce++ of tokens": ({**RETURNS, **OWN, "advantage.masking": "carry"}, ESTIMATE),
    "reinforce++ of tokens with kl": (
        {**RETURNS, **OWN, "advantage.kl_in_reward": True},
        ESTIMATE,
    ),
    "gae with kl of masked tokens": (
        {**GAE, "advantage.kl_in_reward": True, "advantage.kl_masked": False},
        ESTIMATE,
    ),
    "gae of tokens": ({**GAE, **OWN}, ESTIMATE),
    "vapo": ({**GAE, "advantage.lam_alpha": 0.5, "advantage.lam_returns": 1.0}, ESTIMATE),
    "gae with a value past the end": (
        {**GAE, "advantage.masking": "carry", "advantage.bootstrap": "last"},
        ESTIMATE,
    ),
    "gae of areal": (
        {**GAE, "advantage.masking": "carry", "advantage.bootstrap": "truncated"},
        ESTIMATE,
    ),
    "remax": ({"advantage.estimator": "remax"}, ESTIMATE),
    "remax of tokens": ({"advantage.estimator": "remax", **OWN}, ESTIMATE),
    "otb": ({"advantage.estimator": "otb", **OWN}, ESTIMATE),
    "otb of long tails": (
        {"advantage.estimator": "otb", **OWN, "advantage.otb_zero_tail": False},
        ESTIMATE,
    ),
    "otb of trained tokens": (
        {"advantage.estimator": "otb", **OWN, "advantage.otb_positions": "trained"},
        ESTIMATE,
    ),
    "otb under weights": (
        {"advantage.estimator": "otb", **OWN, "advantage.otb_weights": "correction", **RAW},
        ESTIMATE,
    ),
    "opd": ({"advantage.estimator": "opd", "advantage.opd_coef": 1.0}, ESTIMATE),
    "opd beside grpo": ({"advantage.opd_coef": 0.5, "loss.opd": True}, ESTIMATE),
    "opd of the sampler": ({"advantage.opd_coef": 0.5, "kl.policy_source": "rollout"}, KL),
    "faulty messages": (
        {"advantage.invalid_tool_call": -1.0, "advantage.malformed_thinking": -0.5},
        ESTIMATE,
    ),
    "whitened by group": ({**RETURNS, "advantage.whiten": "group"}, ESTIMATE),
    "whitened by sample": (
        {**RETURNS, **OWN, "advantage.whiten": "sample", "advantage.whiten_short": "keep"},
        ESTIMATE,
    ),
    "whitened": (WHITE, ESTIMATE),
    "whitened, returns and all": ({**WHITE, "advantage.returns": "whitened"}, ESTIMATE),
    "whitened by rank": ({"advantage.whiten": "rank"}, ESTIMATE),
    "whitened, ddof 0": ({**WHITE, "advantage.whiten_ddof": 0}, ESTIMATE),
    "whitened, floored": ({**WHITE, "advantage.whiten_form": "floored"}, ESTIMATE),
    "whitened, std": ({**WHITE, "advantage.whiten_form": "std"}, ESTIMATE),
    "whitened by chunk": (
        {"advantage.whiten": "consumer-batch", "advantage.whiten_short": "keep"},
        ESTIMATE,
    ),
    "whitened around the mean of a group": (
        {**AREAL_NORM, "advantage.whiten_centre": "group"},
        ESTIMATE,
    ),
    "whitened by group around the mean of all": (
        {
            **AREAL_NORM,
            **RETURNS,
            "advantage.whiten": "group",
            "advantage.whiten_centre": "cohort",
            "advantage.whiten_leave_one_out": True,
        },
        ESTIMATE,
    ),
    "whitened around nothing": ({**AREAL_NORM, "advantage.whiten_centre": "none"}, ESTIMATE),
    "whitened around the others": (
        {**AREAL_NORM, "advantage.whiten_leave_one_out": True},
        ESTIMATE,
    ),
    "centred on the others": (
        {**WHITE, "advantage.whiten_scale": False, "advantage.whiten_leave_one_out": True},
        ESTIMATE,
    ),
    "centred": ({**WHITE, "advantage.whiten_scale": False}, ESTIMATE),
    "advantages clipped": ({"advantage.clip": (-0.5, 0.5)}, ESTIMATE),
    "dual clip": ({"loss.dual_clip": 1.05}, POLICY),
    "ratios clamped": ({"loss.log_ratio_clamp": (-0.05, 0.05)}, POLICY),
    "gspo": ({"loss.ratio": "sequence-mean"}, POLICY),
    "sequence sum": ({"loss.ratio": "sequence-sum"}, POLICY),
    "on policy": ({"loss.ratio": "one"}, POLICY),
    "gspo, clamped": (
        {"loss.ratio": "sequence-mean", "loss.sequence_log_ratio_clamp": (-0.05, 0.05)},
        POLICY,
    ),
    "gspo of areal": (
        {"loss.ratio": "sequence-mean", "loss.advantage_level": "sequence-mean", **RETURNS},
        ESTIMATE,
    ),
    "delta of trl": ({"loss.dual_clip": 1.05, "loss.dual_side": "both"}, POLICY),
    "cispo": ({"loss.surrogate": "cispo"}, POLICY),
    "cispo by sign": ({"loss.surrogate": "cispo", "loss.cispo_bounds": "by-sign"}, POLICY),
    "cispo of trl": ({"loss.surrogate": "cispo", "loss.cispo_bounds": "upper-absolute"}, POLICY),
    "sapo": ({"loss.surrogate": "sapo"}, POLICY),
    "sapo that never clips": (
        {"loss.surrogate": "sapo", "loss.sapo_clipped": "nothing"},
        POLICY,
    ),
    "gmpo": ({"loss.surrogate": "gmpo"}, POLICY),
    "m2po": ({"loss.surrogate": "m2po", "loss.m2po_kl2_budget": 0.02}, POLICY),
    "m2po of all tokens": (
        {
            "loss.surrogate": "m2po",
            "loss.m2po_kl2_budget": 0.02,
            "loss.m2po_counts": "response",
            "loss.m2po_least_low": 0.05,
            "loss.m2po_least_high": 0.1,
        },
        POLICY,
    ),
    "kl-cov": ({"loss.surrogate": "kl-cov", "loss.kl_cov_fraction": 0.3}, POLICY),
    "kl-cov and how far ratios are from 1": (
        {"loss.surrogate": "kl-cov", "loss.kl_cov_ppo_kl": "absolute"},
        POLICY,
    ),
    "vespo": ({"loss.surrogate": "vespo"}, POLICY),
    "reinforce": ({"loss.surrogate": "reinforce"}, POLICY),
    "vespo, other shapes": (
        {"loss.surrogate": "vespo", "loss.vespo_k_pos": 1.0, "loss.vespo_lambda_neg": 1.0},
        POLICY,
    ),
    "vespo, the other shapes": (
        {"loss.surrogate": "vespo", "loss.vespo_lambda_pos": 1.0, "loss.vespo_k_neg": 1.0},
        POLICY,
    ),
    "sapo at other temperatures": (
        {"loss.surrogate": "sapo", "loss.sapo_tau_pos": 2.0, "loss.sapo_tau_neg": 4.0},
        POLICY,
    ),
    "kl-cov at another price": (
        {"loss.surrogate": "kl-cov", "loss.kl_cov_fraction": 0.3, "loss.kl_cov_coef": 1.0},
        POLICY,
    ),
    "dppo of heavier terms": (
        {
            "loss.surrogate": "dppo",
            "loss.old_source": "rollout",
            "loss.dppo_adv_tau": 0.5,
            "loss.dppo_kl_tau": 0.1,
        },
        POLICY,
    ),
    "vespo with weights": ({"loss.surrogate": "vespo", **RAW}, POLICY),
    "dro": ({"loss.surrogate": "dro", "loss.dro_beta": 0.5}, POLICY),
    "dppo": ({"loss.surrogate": "dppo", "loss.old_source": "rollout"}, POLICY),
    "ipo": (
        {"loss.surrogate": "dppo", "loss.old_source": "rollout", "loss.dppo_rule": "absolute"},
        POLICY,
    ),
    "dppo-tv of verl": ({**DPPO, "loss.log_ratio_clamp": (-20.0, 20.0)}, POLICY),
    "dppo-kl of verl": ({**DPPO, "loss.dppo_measure": "binary-kl", "loss.eps_clip": 0.01}, POLICY),
    "proximal policy": ({**RAW, "loss.ratio": "token"}, POLICY),
    "proximal policy between": ({**RAW, "loss.proximal": "interpolated"}, POLICY),
    "interpolated, without weights": ({"loss.proximal": "interpolated"}, POLICY),
    "likelihood of good samples": ({"loss.nll_coef": 0.1}, POLICY),
    "likelihood beside a token mean": (
        {"loss.nll_coef": 0.1, "loss.aggregation": "token-mean", **MEAN},
        POLICY,
    ),
    "half a count more": ({"loss.count_epsilon": 0.5, **MEAN}, POLICY),
    "half a count more everywhere": (
        {
            "loss.count_epsilon": 0.5,
            "loss.ratio": "sequence-mean",
            "loss.advantage_level": "sequence-mean",
            "loss.correction": "geometric-tis",
            **BOUNDS,
            **MEAN,
        },
        POLICY,
    ),
    "half a count more of tokens": (
        {"loss.count_epsilon": 0.5, "loss.aggregation": "token-mean", **MEAN},
        POLICY,
    ),
    "tis": ({"loss.correction": "tis", **BOUNDS}, POLICY),
    "icepop": ({"loss.correction": "icepop", **BOUNDS}, POLICY),
    "sequence tis": ({"loss.correction": "sequence-tis", **BOUNDS}, POLICY),
    "clamped where k2 is large": (
        {**AREAL_CLAMP, "loss.correction_criterion": "token-k2"},
        POLICY,
    ),
    "clamped where the mean k1 is large": (
        {
            **AREAL_CLAMP,
            "loss.correction_criterion": "mean-k1",
            "loss.correction_bounds": (-math.inf, 1e-3),
        },
        POLICY,
    ),
    "samples clamped by their worst ratio": (
        {
            "loss.correction": "geometric-tis",
            "loss.correction_criterion": "max-ratio",
            "loss.correction_bounds": (0.0, 1.02),
        },
        POLICY,
    ),
    "zero where k3 is large": (
        {**AREAL_CLAMP, "loss.correction": "icepop", "loss.correction_criterion": "sum-k3"},
        POLICY,
    ),
    "on policy, weights and all": (
        {**RAW, "loss.correction_bounds": (0.9, 1.05), "loss.proximal": "current"},
        POLICY,
    ),
    "on policy beside recorded weights": ({**RAW, "loss.ratio": "one"}, POLICY),
    "on policy and rejecting": (
        {**VERL_RS, "loss.proximal": "current", "loss.opsm_delta": 1e-4},
        POLICY,
    ),
    "bypass of verl": (
        {
            **VERL_RS,
            "loss.proximal": "current",
            "loss.old_source": "rollout",
            "loss.log_ratio_clamp": (-20.0, 20.0),
        },
        POLICY,
    ),
    "bypass of verl, reinforce": (
        {**VERL_RS, **RAW, "loss.proximal": "current", "loss.surrogate": "reinforce"},
        POLICY,
    ),
    "gspo on policy": (
        {"loss.ratio": "sequence-mean", "loss.proximal": "current", "loss.kl_loss_coef": 0.1},
        POLICY,
    ),
    "sequence mask": ({"loss.correction": "sequence-mask", **BOUNDS}, POLICY),
    "geometric mask": ({"loss.correction": "geometric-mask", **BOUNDS}, POLICY),
    "geometric tis": ({"loss.correction": "geometric-tis", **BOUNDS}, POLICY),
    "geometric icepop": ({"loss.correction": "geometric-icepop", **BOUNDS}, POLICY),
    "weights of clamped logarithms": ({**RAW, "loss.correction_log_clamp": (-0.01, 0.01)}, POLICY),
    "weights by their mean": ({**RAW, "loss.correction_norm": "token"}, POLICY),
    "weights by the mean of a batch": (
        {**RAW, "loss.correction_norm": "sequence", "loss.correction_norm_over": "micro-batch"},
        POLICY,
    ),
    "rejected tokens": (KEPT, POLICY),
    "rejected samples": ({"loss.rejection": {"mean-ratio": (0.97, 1.02)}}, POLICY),
    "rejected by k1, as verl": ({**RS, "loss.rejection": {"token-k1": (-0.02, 0.01)}}, POLICY),
    "rejected by k2 of a sample": ({**RS, "loss.rejection": {"sum-k2": SMALL}}, POLICY),
    "rejected by the worst k3": ({**RS, "loss.rejection": {"max-k3": SMALL}}, POLICY),
    "rejected by any of three": (
        {
            **RS,
            "loss.rejection": {"token-k1": (-0.04, 0.03), "mean-k2": SMALL, "max-k3": SMALL},
        },
        POLICY,
    ),
    "samples by their mean factor": (
        {
            "loss.rejection": {"mean-factor": (-math.inf, 1.03)},
            "loss.rejection_denominator": "kept",
            "loss.denominator_rows": "kept",
            **MEAN,
        },
        POLICY,
    ),
    "tokens by their factor": ({"loss.rejection": {"max-factor": (-math.inf, 1.04)}}, POLICY),
    "mis with veto": ({**KEPT, **RAW, "loss.veto": 0.95}, POLICY),
    "veto": ({"loss.veto": 0.98}, POLICY),
    "weights of samples beside rejected tokens": (
        {
            "loss.correction": "sequence-tis",
            "loss.correction_bounds": (0.0, 1.02),
            "loss.correction_norm": "sequence",
            "loss.rejection_denominator": "kept",
            **KEPT,
        },
        POLICY,
    ),
    "m2po of areal": (M2, POLICY),
    "opsm": ({"loss.opsm_delta": 1e-4}, POLICY),
    "opsm against the rollout": (
        {"loss.opsm_delta": 1e-4, "loss.opsm_source": "rollout"},
        POLICY,
    ),
    "kl loss": ({"loss.kl_loss_coef": 0.1, "loss.kl_loss_estimator": "k3"}, POLICY),
    "kl loss of clamped ratios": (
        {
            "loss.kl_loss_coef": 0.1,
            "loss.kl_loss_log_ratio_clamp": (-0.1, 0.1),
            "loss.kl_loss_clamp": (-0.05, 0.05),
        },
        POLICY,
    ),
    "kl loss weighted": ({"loss.kl_loss_coef": 0.1, "loss.kl_loss_weighted": True}, POLICY),
    "kl loss against the rollout": (
        {"loss.kl_loss_coef": 0.1, "loss.kl_loss_weighted": True, "loss.kl_loss_weight": "rollout"},
        POLICY,
    ),
    "kl loss by the ratio": (
        {
            "loss.kl_loss_coef": 0.1,
            "loss.kl_loss_weighted": True,
            "loss.kl_loss_weight": "ratio",
            "loss.ratio": "sequence-mean",
        },
        POLICY,
    ),
    "token mean": ({"loss.aggregation": "token-mean", "loss.batch_reduction": "mean"}, POLICY),
    "token sum": ({"loss.aggregation": "token-mean"}, POLICY),
    "sequence sums": (
        {"loss.aggregation": "seq-mean-token-sum", "loss.batch_reduction": "mean"},
        POLICY,
    ),
    "constant norm": ({"loss.aggregation": "constant-norm", "loss.constant_norm": 16.0}, POLICY),
    "constant norm and samples": (
        {
            "loss.aggregation": "constant-norm",
            "loss.constant_norm": 16.0,
            "loss.constant_norm_by_rows": True,
        },
        POLICY,
    ),
    "tokens by micro-batch": (
        {"loss.aggregation": "token-mean", "loss.mean_over": "micro-batch", **MEAN},
        POLICY,
    ),
    "samples by micro-batch": (
        {"loss.mean_over": "micro-batch", "loss.micro_batch_weight": "tokens", **MEAN},
        POLICY,
    ),
    "sums by micro-batch": (
        {
            "loss.aggregation": "seq-mean-token-sum",
            "loss.mean_over": "micro-batch",
            "loss.micro_batch_weight": "rows",
            **MEAN,
        },
        POLICY,
    ),
    "kl of tokens beside gspo": (
        {
            "loss.ratio": "sequence-mean",
            "loss.kl_loss_coef": 0.1,
            "loss.kl_loss_aggregation": "token-mean",
            "loss.metrics_aggregation": "token-mean",
            **MEAN,
        },
        POLICY,
    ),
    "entropy of samples beside tokens": (
        {
            "loss.aggregation": "token-mean",
            "loss.entropy_aggregation": "seq-mean-token-mean",
            **MEAN,
        },
        POLICY,
    ),
    "terms by micro-batch": (
        {
            "loss.kl_loss_coef": 0.1,
            "loss.kl_loss_mean_over": "micro-batch",
            "loss.entropy_mean_over": "micro-batch",
            **MEAN,
        },
        POLICY,
    ),
    "terms of the scope beside micro-batches": (
        {
            "loss.mean_over": "micro-batch",
            "loss.entropy_mean_over": "scope",
            "loss.entropy_aggregation": "token-mean",
            **MEAN,
        },
        POLICY,
    ),
    "entropy of trl beside samples": (
        {
            "loss.entropy_aggregation": "token-mean",
            "loss.entropy_mean_over": "micro-batch",
            "loss.kl_loss_coef": 0.1,
            **MEAN,
        },
        POLICY,
    ),
    "entropy of trl beside a constant": (
        {
            "loss.aggregation": "constant-norm",
            "loss.constant_norm": 16.0,
            "loss.constant_norm_by_rows": True,
            "loss.entropy_aggregation": "token-mean",
            "loss.entropy_mean_over": "micro-batch",
            "loss.kl_loss_coef": 0.1,
            **MEAN,
        },
        POLICY,
    ),
    "sums of tokens beside means": ({"loss.entropy_aggregation": "token-mean"}, POLICY),
    "value of tokens": ({"value.aggregation": "token-mean", **MEAN}, VALUE),
    "value by micro-batch": (
        {"value.aggregation": "token-mean", "value.mean_over": "micro-batch", **MEAN},
        VALUE,
    ),
    "value over a norm": (
        {"value.aggregation": "constant-norm", "loss.constant_norm": 16.0},
        VALUE,
    ),
    "an empty sample is a token": (
        {"loss.aggregation": "token-mean", "loss.token_count": "at-least-one", **MEAN},
        POLICY,
    ),
    "fragments share their tokens": ({"loss.fragments": "shared"}, POLICY),
    "trajectories with tokens": (
        {"loss.fragments": "shared", "loss.denominator_rows": "with-tokens", **MEAN},
        POLICY,
    ),
    "rows with tokens": (
        {"loss.denominator_rows": "with-tokens", "loss.batch_reduction": "mean"},
        POLICY,
    ),
    "value unclipped": ({"value.clip": None}, VALUE),
    "value halved": ({"value.factor": 0.5}, VALUE),
    "value huber": ({"value.huber_delta": 0.1}, VALUE),
    "value of kept tokens": ({**VERL_RS, "value.counts": "kept"}, POLICY),
    "value of the whole response": ({"value.counts": "response"}, VALUE),
    "value clipped by loss": ({"value.counted": "loss"}, VALUE),
}


def _shares(seed: int = 0) -> dict[int, list[Sample]]:
    """Two whole groups, one a rank, every kind of column, one sample without trained tokens."""
    numbers = np.random.default_rng(seed)
    samples = drawn(WAY, seed=seed)
    samples[1].mask = [0] * samples[1].length
    for one in samples:
        for name in ("rollout_log_probs", "old_log_probs", "ref_log_probs", "log_probs"):
            one.columns[name] = one.columns[name].clamp(max=-0.01)  # a probability is at most 1
        for name, spread in (("old_values", 0.5), ("values", 0.6), ("token_rewards", 0.5)):
            drift = numbers.normal(0.0, spread, one.length)
            one.columns[name] = torch.tensor(drift, dtype=torch.float32)
        base = one.columns["old_log_probs"].numpy()
        drift = base + numbers.normal(0.0, 0.3, one.length)
        one.columns["teacher_log_probs"] = torch.tensor(drift, dtype=torch.float32)
        squares = numbers.uniform(0.0, 1.0, one.length)
        one.columns["sum_pi_squared"] = torch.tensor(squares, dtype=torch.float32)
        faults = numbers.integers(0, 3, one.length)
        one.columns["message_faults"] = torch.tensor(faults, dtype=torch.uint8)
    for row, one in enumerate(samples):
        one.greedy_reward = 0.25 + row // 4
        one.trajectory_id, one.fragment_index = f"t-{row // 2}", 1 - row % 2
        one.agent_id, one.episode_id = ("proposer", "solver", "solver")[row % 3], f"e-{row // 2}"
        one.last_value, one.truncated = 0.4 + 0.1 * row, row % 2 == 0
        cut = one.length // 2
        one.weight_versions = [(0, cut, row % 3 + 2), (cut, one.length - 1, 5)]
        one.consumer_batch_id, one.first_message_length = str(row // 3), one.length - row % 3
        one.turns, one.kept_baseline = 1 + row % 3, 0.3 + 0.1 * (row % 3)
    return {0: samples[:4], 1: samples[4:]}


def _record(lake: Lake, shares: dict[int, list[Sample]], made: Settings, told: Settings) -> None:
    """A training that computes as `made` says and tells `told`."""
    if told.reward.weights:
        _take_apart(shares, missing=told.reward.missing == "exclude")
    trainer = ComposedTrainer(made, shares)
    trainer.score()
    trainer.estimate()
    policy, value = trainer.policy_scalars(), trainer.value_scalars()
    expected = {rank: [*policy[rank], *value[rank]] for rank in shares}
    capture(
        lake,
        shares,
        WAY,
        step_id=0,
        stages=STAGES,
        columns=COLUMNS,
        settings=told,
        expected=expected,
        versions={"log_probs": CURRENT},
    )


def _take_apart(shares: dict[int, list[Sample]], *, missing: bool) -> None:
    """Give every sample components; if asked, one lacks one and another all of them."""
    samples = [one for own in shares.values() for one in own]
    for row, one in enumerate(samples):
        one.components = {"answer": one.raw_reward + row % 3 / 4, "format": float(row % 2)}
    if missing:
        samples[2].components = {"answer": 1.0}
        samples[5].components = {"format": math.nan}


def _replayed(lake: Lake) -> CohortReport:
    return the_cohort(lake.replay())


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CHANGES)
def test_what_a_setting_makes_passes(lake: Lake, name: str, seed: int) -> None:
    settings = with_changes(PLAIN, CHANGES[name][0])
    _record(lake, _shares(seed), settings, settings)
    cohort = _replayed(lake)
    assert cohort.verdict in ("pass", "precision"), cohort.to_json()
    assert {one.stage: one.verdict for one in cohort.stages}.keys() >= set(STAGES)
    assert all(one.compared for one in cohort.stages)


# The deviation around a leave-one-out mean is larger by the factor by which the distance is.
EQUAL = {"around the baseline"}
# Settings that no training of these covers, and what does.
ELSEWHERE = {
    "reward.constant_groups": "tests/stages/test_constant_groups.py",
    "reward.constant_within": "tests/stages/test_constant_groups.py",
    "loss.undefined_weight": "test_a_weight_that_float32_does_not_hold_becomes_what_is_stated",
    "advantage.whiten_one_pass": "test_a_small_spread_whitened_in_one_pass_is_no_fault",
    "loss.kl_loss_source": "only inspected where it is not the default",
    **dict.fromkeys((f"loss.{one}" for one in LOSS_TERMS if one != "opd"), "no arithmetic"),
}
SECTIONS_COVERED = ("reward", "kl", "advantage", "loss", "value")


def test_every_setting_is_that_of_some_training() -> None:
    stated = {name for changes, _ in CHANGES.values() for name in changes}
    stated |= {name for base, changes, _ in BESIDE.values() for name in (*base, *changes)}
    stated |= differences(Settings(), PLAIN).keys()
    every = {f"{one}.{name}" for one in SECTIONS_COVERED for name in kinds(SECTIONS[one])}
    assert every - stated == set(ELSEWHERE)


@pytest.mark.parametrize("name", sorted(CHANGES.keys() - EQUAL))
def test_what_another_setting_made_is_found_at_its_stage(lake: Lake, name: str) -> None:
    changes, stage = CHANGES[name]
    reduction = {k: v for k, v in changes.items() if k == "loss.batch_reduction"}
    made = with_changes(PLAIN, reduction)  # which the capture states itself
    _record(lake, _shares(), made, with_changes(PLAIN, changes))
    cohort = _replayed(lake)
    assert cohort.verdict in ("diverged", "unverified"), cohort.to_json()
    found = the_stage(cohort, stage)
    if found.verdict == "unverified":  # a scalar that the setting brings was not recorded
        assert "kl_loss" in found.message
    else:
        assert cohort.first_divergent_stage == stage


# What both have, and what one of them has besides: the first stage that shows it.
CLIPPED = {**GAE, "advantage.masking": "carry", **VERL_RS}
BESIDE: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "what counts as clipped in sapo": (
        {"loss.surrogate": "sapo", "loss.sapo_tau_pos": 9.0},
        {"loss.sapo_clipped": "nothing"},
        POLICY,
    ),
    "what ppo_kl is beside kl-cov": (
        {"loss.surrogate": "kl-cov"},
        {"loss.kl_cov_ppo_kl": "absolute"},
        POLICY,
    ),
    "which estimators are clamped": (
        {"kl.estimator": "k1", "kl.value_clamp": (-0.01, 0.01)},
        {"kl.clamped": "k3"},
        KL,
    ),
    "which estimators are clamped in the loss": (
        {"loss.kl_loss_coef": 0.1, "loss.kl_loss_clamp": (-0.01, 0.01)},
        {"loss.kl_loss_clamped": "k3"},
        POLICY,
    ),
    "the kl of a reward": ({**RLOO}, {"reward.less_kl": True}, REWARD),
    "a second normalisation": ({**RLOO, "reward.less_kl": True}, RESCALED, REWARD),
    "who is alone in it": (
        {**RLOO, **RESCALED, "reward.missing": "exclude"},
        {"reward.clip_before": (0.2, 0.9)},
        REWARD,
    ),
    "the token of a reward": (
        {**RETURNS, "advantage.reward_at": "last-unmasked"},
        {"advantage.reward_at": "after-last-unmasked"},
        ESTIMATE,
    ),
    "returns that are whitened advantages": (
        {**WHITE, "advantage.estimator": "reinforce++-baseline"},
        {"advantage.returns": "whitened"},
        ESTIMATE,
    ),
    "what an advantage counts": (CLIPPED | WHITE, {"advantage.counts": "kept"}, ESTIMATE),
    "what an advantage counts by micro-batch": (
        {**CLIPPED, **WHITE, **M2, "loss.mean_over": "scope"},
        {"advantage.counts": "kept"},
        ESTIMATE,
    ),
    "what a value loss counts": (CLIPPED, {"value.counts": "kept"}, VALUE),
    "the tokens that are masked of a value loss": (CLIPPED, {"value.counts": "response"}, VALUE),
    "how a kl becomes one number": (
        {"loss.kl_loss_coef": 0.1, **MEAN},
        {"loss.kl_loss_aggregation": "token-mean"},
        POLICY,
    ),
    "what a kl is averaged over": (
        {"loss.kl_loss_coef": 0.1, "loss.aggregation": "token-mean", **MEAN},
        {"loss.kl_loss_mean_over": "micro-batch"},
        POLICY,
    ),
    "how a clip fraction becomes one number": (
        MEAN,
        {"loss.metrics_aggregation": "token-mean"},
        POLICY,
    ),
    "how values become one number": (MEAN, {"value.aggregation": "token-mean"}, VALUE),
    "what values are averaged over": (
        {"loss.aggregation": "token-mean", **MEAN},
        {"value.mean_over": "micro-batch"},
        VALUE,
    ),
    "the samples that are masked": (
        {
            "loss.rejection": {"mean-factor": (-math.inf, 1.03)},
            "loss.rejection_denominator": "kept",
            **MEAN,
        },
        {"loss.denominator_rows": "kept"},
        POLICY,
    ),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", BESIDE)
def test_one_setting_beside_others_is_found_at_its_stage(
    lake: Lake, tmp_path: Path, name: str, seed: int
) -> None:
    base, changes, stage = BESIDE[name]
    plain = with_changes(PLAIN, base)
    changed = with_changes(plain, changes)
    for number, (made, told) in enumerate([(plain, changed), (changed, plain)]):
        other = Lake.create(tmp_path / f"{number}")
        _record(other, _shares(seed), made, told)
        cohort = _replayed(other)
        assert cohort.first_divergent_stage == stage, (made, told, cohort.to_json())
    _record(lake, _shares(seed), changed, changed)
    assert _replayed(lake).verdict in ("pass", "precision")


@pytest.mark.parametrize("correction", ["tis", "sequence-tis"])
def test_a_weight_that_float32_does_not_hold_becomes_what_is_stated(
    tmp_path: Path, correction: str
) -> None:
    changes = {"loss.correction": correction, "loss.correction_bounds": (0.0, 5.0)}
    told = with_changes(PLAIN, {**changes, "loss.undefined_weight": 0.0})
    verdicts = []
    for number, undefined in enumerate([0.0, None]):
        made = with_changes(PLAIN, {**changes, "loss.undefined_weight": undefined})
        shares = _shares()
        shares[0][0].columns["rollout_log_probs"][0] = -120.0
        lake = Lake.create(tmp_path / f"{number}")
        _record(lake, shares, made, told)
        verdicts.append(the_stage(_replayed(lake), POLICY).verdict)
    assert verdicts[0] in ("pass", "precision")
    assert verdicts[1] == "diverged"


@pytest.mark.parametrize(
    ("changes", "stage", "named"),
    [
        ({"reward.less_kl": True, "kl.coef": 0.0}, REWARD, "kl.coef is 0"),
        (
            {**RETURNS, "reward.less_kl": True, "advantage.kl_in_reward": True},
            REWARD,
            "pays the KL twice",
        ),
        ({**STEPS, "reward.less_kl": True}, REWARD, "reward.unit is 'step'"),
        ({**APART, "reward.less_kl": True}, REWARD, "reward.less_kl is True"),
        ({**APART, **RESCALED}, REWARD, "reward.rescale is 'batch'"),
        ({"reward.rescale": "batch"}, REWARD, "reward.batch_epsilon is not stated"),
        ({**RESCALED, "reward.grouping": "none"}, REWARD, "reward.grouping is 'none'"),
        ({"reward.rescale": "group", "reward.batch_epsilon": 0.0}, REWARD, "'group'"),
        ({"advantage.counts": "kept"}, ESTIMATE, "the loss rejects nothing"),
        ({"value.counts": "kept", **KEPT}, VALUE, "rejection_denominator is 'original'"),
        (
            {"value.counts": "kept", **VERL_RS, "loss.proximal": "interpolated"},
            VALUE,
            "loss.proximal is not 'recorded'",
        ),
        ({"loss.denominator_rows": "kept", **KEPT, **MEAN}, POLICY, "denominator_rows are 'kept'"),
        (
            {"loss.entropy_aggregation": "token-mean", "loss.fragments": "shared"},
            POLICY,
            "loss.fragments are 'shared'",
        ),
        ({"loss.entropy_mean_over": "micro-batch"}, POLICY, "batch_reduction is 'sum'"),
        ({"value.mean_over": "micro-batch"}, VALUE, "value.mean_over is 'micro-batch'"),
        ({"value.aggregation": "constant-norm"}, VALUE, "loss.constant_norm is not stated"),
        (
            {
                "loss.aggregation": "constant-norm",
                "loss.constant_norm": 4.0,
                "loss.metrics_aggregation": "token-mean",
            },
            POLICY,
            "'constant-norm'",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused_by_name(
    lake: Lake, changes: dict[str, Any], stage: str, named: str
) -> None:
    _record(lake, _shares(), PLAIN, with_changes(PLAIN, changes))
    cohort = _replayed(lake)
    found = the_stage(cohort, stage)
    assert (found.verdict, found.compared) == ("refused", 0)
    assert named in found.message, found.message


@pytest.mark.parametrize("name", PROFILES)
def test_a_training_of_a_profile_passes(tmp_path: Path, name: str) -> None:
    settings = with_changes(
        PROFILES[name].settings,
        {"reward.n_samples_per_prompt": 4, "loss.entropy_coef": 0.01, "kl.coef": 0.1},
    )
    lake = Lake.create(tmp_path / "lake")
    _record(lake, _shares(), settings, settings)
    cohort = _replayed(lake)
    if name == "nemo-rl":  # whose values of a row's end, which count, no column holds
        assert "value.counts is 'unshifted'" in the_stage(cohort, VALUE).message
        verdicts = {one.verdict for one in cohort.stages if one.stage != VALUE}
        assert verdicts <= {"pass", "precision"}, cohort.to_json()
    else:
        assert cohort.verdict in ("pass", "precision"), cohort.to_json()


@pytest.mark.parametrize(
    ("changes", "stage"),
    [(WHITE, ESTIMATE), ({"reward.std_grouping": "batch"}, REWARD)],
)
def test_a_part_of_a_cohort_is_no_batch(lake: Lake, changes: dict[str, Any], stage: str) -> None:
    settings = with_changes(PLAIN, changes)
    _record(lake, _shares(), settings, settings)
    cohort = the_cohort(lake.replay(groups=["g-0"]))
    found = the_stage(cohort, stage)
    assert (found.verdict, found.compared) == ("skipped", 0)
    assert "--closure cohort" in found.message
    whole = the_cohort(lake.replay(groups=["g-0"], closure="cohort"))
    assert the_stage(whole, stage).verdict in ("pass", "precision")


@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "token-mean"])
@pytest.mark.parametrize("stated", [None, "counted", "odd"])
def test_a_mean_over_the_cohort_divides_by_what_it_counts(
    lake: Lake, aggregation: str, stated: str | None
) -> None:
    """Rank 0 records the scalars of all ranks; a divisor that counts nothing is not believed."""
    changes = {"loss.aggregation": aggregation, "loss.batch_reduction": "mean"}
    settings, shares = with_changes(PLAIN, changes), _shares()
    trainer = ComposedTrainer(settings, shares)
    trainer.score()
    trainer.estimate()
    single = ComposedTrainer(settings, {0: [one for own in shares.values() for one in own]})
    (scalars,) = single.policy_scalars()[0]
    scalars.meaning = {"scope": "global", "reduction": "mean"}
    if stated is not None:
        tokens = sum(sum(one.mask) for one in single.samples)
        count = len(single.samples) if aggregation == "seq-mean-token-mean" else tokens
        scalars.meaning["denominator"] = float(count + (stated == "odd"))
        if stated == "odd":
            scalars.values = {
                name: value * count / (count + 1) for name, value in scalars.values.items()
            }
    capture(
        lake, shares, WAY, step_id=0, columns=COLUMNS, settings=settings, expected={0: [scalars]}
    )
    cohort = the_cohort(lake.replay())
    assert cohort.verdict == ("unverified" if stated == "odd" else "pass"), cohort.to_json()
