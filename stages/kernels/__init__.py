"""The arithmetic of the stages, and what float32 may cost it: pure functions of packed tensors."""

from trajreplay.stages.kernels.advantages import grpo_advantages
from trajreplay.stages.kernels.aggregate import (
    MaskedMean,
    MeanError,
    policy_loss,
    policy_loss_error,
    scatter_sum_error,
    seq_mean_token_mean,
    seq_mean_token_mean_error,
)
from trajreplay.stages.kernels.clipping import (
    CispoLoss,
    ClipLoss,
    cispo_loss,
    clip_loss,
    policy_gradient_loss,
)
from trajreplay.stages.kernels.components import decoupled_rewards, summed_rewards
from trajreplay.stages.kernels.correction import (
    BoundedWeights,
    bound_weights,
    importance_weights,
    normalised_weights,
)
from trajreplay.stages.kernels.dppo import dppo_gate, dppo_loss
from trajreplay.stages.kernels.estimators import (
    distillation_advantages,
    gpg_rewards,
    override_advantages,
    pass_at_k_rewards,
)
from trajreplay.stages.kernels.gae import Gae, gae_advantages, length_adaptive_lambda
from trajreplay.stages.kernels.gates import GatedLoss, kl_cov_loss, sapo_loss
from trajreplay.stages.kernels.groups import constant_groups
from trajreplay.stages.kernels.kl import approx_kl, approx_kl_error
from trajreplay.stages.kernels.kl_loss import weighted_kl
from trajreplay.stages.kernels.m2po import M2poLoss, m2po_keep, m2po_loss
from trajreplay.stages.kernels.masked import sample_values
from trajreplay.stages.kernels.normalise import normalise_rewards
from trajreplay.stages.kernels.off_policy import OffPolicyKeep, off_policy_keep, proximal_log_probs
from trajreplay.stages.kernels.optimal_baseline import optimal_token_advantages
from trajreplay.stages.kernels.penalties import cost_penalised_rewards, kl_penalised_rewards
from trajreplay.stages.kernels.policy import PpoClip, PpoClipError, ppo_clip, ppo_clip_error
from trajreplay.stages.kernels.precision import UNIT_ROUNDOFF, accumulation_factor, half_ulp
from trajreplay.stages.kernels.ratio import log_ratio, sequence_log_ratio
from trajreplay.stages.kernels.rejection import DivergenceKeep, divergence_keep, veto
from trajreplay.stages.kernels.returns import (
    discounted_returns,
    kl_penalised_advantages,
    remax_advantages,
    token_rewards,
)
from trajreplay.stages.kernels.rewards import group_rewards, group_rewards_error
from trajreplay.stages.kernels.sample_losses import GmpoLoss, VespoLoss, gmpo_loss, vespo_loss
from trajreplay.stages.kernels.segments import (
    check_segments,
    check_shapes,
    scatter_sum,
    segment_max,
    segment_sum,
)
from trajreplay.stages.kernels.shaping import (
    overlong_penalty,
    scale_rewards,
    truncation_rewards,
)
from trajreplay.stages.kernels.step_returns import step_returns
from trajreplay.stages.kernels.value import ValueLoss, value_loss
from trajreplay.stages.kernels.whitening import whiten

__all__ = [
    "UNIT_ROUNDOFF",
    "BoundedWeights",
    "CispoLoss",
    "ClipLoss",
    "DivergenceKeep",
    "Gae",
    "GatedLoss",
    "GmpoLoss",
    "M2poLoss",
    "MaskedMean",
    "MeanError",
    "OffPolicyKeep",
    "PpoClip",
    "PpoClipError",
    "ValueLoss",
    "VespoLoss",
    "accumulation_factor",
    "approx_kl",
    "approx_kl_error",
    "bound_weights",
    "check_segments",
    "check_shapes",
    "cispo_loss",
    "clip_loss",
    "constant_groups",
    "cost_penalised_rewards",
    "decoupled_rewards",
    "discounted_returns",
    "distillation_advantages",
    "divergence_keep",
    "dppo_gate",
    "dppo_loss",
    "gae_advantages",
    "gmpo_loss",
    "gpg_rewards",
    "group_rewards",
    "group_rewards_error",
    "grpo_advantages",
    "half_ulp",
    "importance_weights",
    "kl_cov_loss",
    "kl_penalised_advantages",
    "kl_penalised_rewards",
    "length_adaptive_lambda",
    "log_ratio",
    "m2po_keep",
    "m2po_loss",
    "normalise_rewards",
    "normalised_weights",
    "off_policy_keep",
    "optimal_token_advantages",
    "overlong_penalty",
    "override_advantages",
    "pass_at_k_rewards",
    "policy_gradient_loss",
    "policy_loss",
    "policy_loss_error",
    "ppo_clip",
    "ppo_clip_error",
    "proximal_log_probs",
    "remax_advantages",
    "sample_values",
    "sapo_loss",
    "scale_rewards",
    "scatter_sum",
    "scatter_sum_error",
    "segment_max",
    "segment_sum",
    "seq_mean_token_mean",
    "seq_mean_token_mean_error",
    "sequence_log_ratio",
    "step_returns",
    "summed_rewards",
    "token_rewards",
    "truncation_rewards",
    "value_loss",
    "vespo_loss",
    "veto",
    "weighted_kl",
    "whiten",
]
