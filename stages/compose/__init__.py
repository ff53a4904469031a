"""The arithmetic that settings describe, put together from kernels: pure functions of tensors."""

from trajreplay.stages.compose.advantage_errors import estimate_advantages_error
from trajreplay.stages.compose.advantage_inputs import AdvantageInputs
from trajreplay.stages.compose.advantages import Estimate, estimate_advantages, kl_tokens
from trajreplay.stages.compose.bounded import plain_errors, plain_terms
from trajreplay.stages.compose.bounds import SHARE, moved_bounds, moved_value_bounds
from trajreplay.stages.compose.corrections import kept_tokens, rollout_weights
from trajreplay.stages.compose.losses import (
    PolicyTerms,
    policy_terms,
    undecided_terms,
    value_terms,
    value_tokens,
)
from trajreplay.stages.compose.reward_errors import processed_rewards_error, summed_rewards_error
from trajreplay.stages.compose.reward_inputs import RewardInputs
from trajreplay.stages.compose.rewards import (
    equal_rewards,
    processed_rewards,
    summed_components,
    summed_tokens,
)
from trajreplay.stages.compose.rounding import evaluation_slack
from trajreplay.stages.compose.surrogates import LossInputs

__all__ = [
    "SHARE",
    "AdvantageInputs",
    "Estimate",
    "LossInputs",
    "PolicyTerms",
    "RewardInputs",
    "equal_rewards",
    "estimate_advantages",
    "estimate_advantages_error",
    "evaluation_slack",
    "kept_tokens",
    "kl_tokens",
    "moved_bounds",
    "moved_value_bounds",
    "plain_errors",
    "plain_terms",
    "policy_terms",
    "processed_rewards",
    "processed_rewards_error",
    "rollout_weights",
    "summed_components",
    "summed_rewards_error",
    "summed_tokens",
    "undecided_terms",
    "value_terms",
    "value_tokens",
]
