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
from trajreplay.stages.kernels.groups import constant_groups
from trajreplay.stages.kernels.kl import approx_kl, approx_kl_error
from trajreplay.stages.kernels.policy import PpoClip, PpoClipError, ppo_clip, ppo_clip_error
from trajreplay.stages.kernels.precision import UNIT_ROUNDOFF, accumulation_factor, half_ulp
from trajreplay.stages.kernels.rewards import group_rewards, group_rewards_error
from trajreplay.stages.kernels.segments import (
    check_segments,
    check_shapes,
    scatter_sum,
    segment_max,
    segment_mean,
    segment_sum,
)

__all__ = [
    "UNIT_ROUNDOFF",
    "MaskedMean",
    "MeanError",
    "PpoClip",
    "PpoClipError",
    "accumulation_factor",
    "approx_kl",
    "approx_kl_error",
    "check_segments",
    "check_shapes",
    "constant_groups",
    "group_rewards",
    "group_rewards_error",
    "grpo_advantages",
    "half_ulp",
    "policy_loss",
    "policy_loss_error",
    "ppo_clip",
    "ppo_clip_error",
    "scatter_sum",
    "scatter_sum_error",
    "segment_max",
    "segment_mean",
    "segment_sum",
    "seq_mean_token_mean",
    "seq_mean_token_mean_error",
]
