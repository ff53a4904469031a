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
from trajreplay.stages.kernels.components import decoupled_rewards, summed_rewards
from trajreplay.stages.kernels.estimators import (
    broadcast_advantages,
    distillation_advantages,
    gpg_rewards,
    override_advantages,
    pass_at_k_rewards,
)
from trajreplay.stages.kernels.gae import Gae, gae_advantages, length_adaptive_lambda
from trajreplay.stages.kernels.groups import constant_groups
from trajreplay.stages.kernels.kl import approx_kl, approx_kl_error
from trajreplay.stages.kernels.normalise import normalise_rewards
from trajreplay.stages.kernels.optimal_baseline import optimal_token_advantages
from trajreplay.stages.kernels.policy import PpoClip, PpoClipError, ppo_clip, ppo_clip_error
from trajreplay.stages.kernels.precision import UNIT_ROUNDOFF, accumulation_factor, half_ulp
from trajreplay.stages.kernels.returns import (
    discounted_returns,
    kl_penalised_advantages,
    remax_advantages,
    token_rewards,
)
from trajreplay.stages.kernels.rewards import group_rewards, group_rewards_error
from trajreplay.stages.kernels.segments import (
    check_segments,
    check_shapes,
    scatter_sum,
    segment_max,
    segment_mean,
    segment_sum,
)
from trajreplay.stages.kernels.shaping import (
    clip_rewards,
    cost_penalised_rewards,
    overlong_penalty,
    scale_rewards,
    truncation_rewards,
)
from trajreplay.stages.kernels.whitening import clip_advantages, whiten

__all__ = [
    "UNIT_ROUNDOFF",
    "Gae",
    "MaskedMean",
    "MeanError",
    "PpoClip",
    "PpoClipError",
    "accumulation_factor",
    "approx_kl",
    "approx_kl_error",
    "broadcast_advantages",
    "check_segments",
    "check_shapes",
    "clip_advantages",
    "clip_rewards",
    "constant_groups",
    "cost_penalised_rewards",
    "decoupled_rewards",
    "discounted_returns",
    "distillation_advantages",
    "gae_advantages",
    "gpg_rewards",
    "group_rewards",
    "group_rewards_error",
    "grpo_advantages",
    "half_ulp",
    "kl_penalised_advantages",
    "length_adaptive_lambda",
    "normalise_rewards",
    "optimal_token_advantages",
    "overlong_penalty",
    "override_advantages",
    "pass_at_k_rewards",
    "policy_loss",
    "policy_loss_error",
    "ppo_clip",
    "ppo_clip_error",
    "remax_advantages",
    "scale_rewards",
    "scatter_sum",
    "scatter_sum_error",
    "segment_max",
    "segment_mean",
    "segment_sum",
    "seq_mean_token_mean",
    "seq_mean_token_mean_error",
    "summed_rewards",
    "token_rewards",
    "truncation_rewards",
    "whiten",
]
