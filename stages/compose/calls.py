"""What a kernel is called with under some settings; the bound of its float32 error likewise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from trajreplay.schema import AdvantageSettings, RewardSettings
from trajreplay.stages.capability import OF_NO_RETURNS
from trajreplay.stages.compose.advantage_inputs import AdvantageInputs
from trajreplay.stages.compose.reward_inputs import RewardInputs
from trajreplay.stages.kernels.segments import segment_sum

Call = dict[str, Any]


def component_weights(settings: RewardSettings) -> Tensor:
    """(K,) float64. In the order of their names."""
    return torch.tensor(list(settings.weights.values()), dtype=torch.float64)


def gpg(settings: RewardSettings, given: RewardInputs) -> Call:
    """Of `gpg_rewards`."""
    return {
        "group_index": given.group,
        "batch_index": given.batch,
        "f_norm": settings.gpg_norm,
        "lone": settings.lone,
    }


def pass_at_k(settings: RewardSettings, given: RewardInputs) -> Call:
    """Of `pass_at_k_rewards`."""
    return {
        "group_index": given.group,
        "divide_by_std": settings.divide_by_std,
        "ddof": settings.ddof,
        "epsilon": settings.epsilon,
    }


def decoupled(settings: RewardSettings, given: RewardInputs) -> Call:
    """Of `decoupled_rewards`."""
    return {
        "weights": component_weights(settings),
        "group_index": given.group,
        "batch_index": given.batch,
        "batch_epsilon": settings.batch_epsilon,
        "missing": settings.missing,
        "baseline": settings.baseline,
        "divisor": _divisor(settings),
        "ddof": settings.ddof,
        "epsilon": settings.epsilon,
        "lone": settings.lone,
    }


def normalised(settings: RewardSettings, given: RewardInputs) -> Call:
    """Of `normalise_rewards`, within groups."""
    counts = {"response": given.lengths, "trained": given.trained, "kept": given.remaining}
    return {
        "group_index": given.group,
        "baseline": settings.baseline,
        "divisor": _divisor(settings),
        "divisor_index": divisor_index(settings, given),
        "ddof": settings.ddof,
        "epsilon": settings.epsilon,
        "epsilon_place": settings.epsilon_place,
        "lone": settings.lone,
        "missing": settings.missing,
        "lengths": counts[settings.baseline_counts],
        "greedy_rewards": given.greedy,
    }


def rescaled(settings: RewardSettings, given: RewardInputs) -> Call:
    """Of `normalise_rewards`, over a batch once more."""
    assert settings.batch_epsilon is not None  # the capability matrix asks for it
    return {
        "group_index": given.batch,
        "divisor": "std",
        "ddof": settings.ddof,
        "epsilon": settings.batch_epsilon,
        "missing": settings.missing,
    }


def overlong(settings: RewardSettings, given: RewardInputs) -> Call:
    """Of `overlong_penalty`."""
    counts = {
        "response": given.lengths,
        "trained": given.trained,
        "first-message": given.first_message,
    }
    return {
        "lengths": counts[settings.overlong_counts],
        "max_length": settings.overlong_max_length,
        "buffer": settings.overlong_buffer,
        "penalty": settings.overlong_penalty,
        "floored": settings.overlong_floored,
    }


def divisor_index(settings: RewardSettings, given: RewardInputs) -> Tensor | None:
    """(S,) int64. Which samples share a deviation; None where those that share a baseline do."""
    return {"batch": given.batch, "group": given.prompt}.get(settings.std_grouping)


def _divisor(settings: RewardSettings) -> str:
    return settings.divisor if settings.divide_by_std else "none"


def returns_whitened(settings: AdvantageSettings) -> bool:
    """Whether the returns are the advantages, and as whitened."""
    return settings.returns == "whitened" and settings.estimator in OF_NO_RETURNS


def whitening(settings: AdvantageSettings, given: AdvantageInputs) -> Call:
    """Of `whiten`."""
    centre = "leave-one-out" if settings.whiten_leave_one_out else "mean"
    return {
        "loss_mask": given.mask,
        "set_index": given.whitened_with,
        "centre_index": None if settings.whiten_centre == "same" else given.centred_with,
        "centre": "none" if settings.whiten_centre == "none" else centre,
        "ddof": settings.whiten_ddof,
        "epsilon": settings.whiten_epsilon,
        "form": settings.whiten_form,
        "scale": settings.whiten_scale,
        "one_pass": settings.whiten_one_pass,
        "short": settings.whiten_short,
    }


def token_rewards(
    settings: AdvantageSettings, given: AdvantageInputs
) -> tuple[Call, Tensor | None]:
    """Of `token_rewards`, and the tokens' own rewards where those count and no sample's does."""
    own = given.token_rewards if settings.reward_source == "token" else None
    rewards = given.reward if own is None else own.new_zeros(given.offsets.numel() - 1)
    assert rewards is not None
    call = {
        "rewards": rewards,
        "loss_mask": given.mask if given.trained is None else given.trained,
        "offsets": given.offsets,
        "reward_at": settings.reward_at,
        "kl": given.kl,
        "kl_coef": given.kl_coef if settings.kl_in_reward else 0.0,
        "kl_masked": settings.kl_masked,
    }
    return call, own


def returns(settings: AdvantageSettings, given: AdvantageInputs) -> Call:
    """Of `discounted_returns`: those of ReMax and OTB are plain sums of what counts."""
    plain = settings.estimator != "reinforce++"
    return {
        "loss_mask": given.mask,
        "offsets": given.offsets,
        "gamma": 1.0 if plain else settings.gamma,
        "masking": "multiply" if plain else settings.masking,
    }


def gae(settings: AdvantageSettings, given: AdvantageInputs) -> Call:
    """Of `gae_advantages`, but for gamma and lambda."""
    assert given.values is not None
    return {
        "values": given.values,
        "loss_mask": given.mask,
        "offsets": given.offsets,
        "masking": settings.masking,
        "bootstrap": given.bootstrap,
    }


def optimal_baseline(
    settings: AdvantageSettings, given: AdvantageInputs
) -> tuple[Call, Tensor | None]:
    """Of `optimal_token_advantages`, and among which tokens; None for all of them."""
    assert given.group is not None  # the capability matrix asks for them
    columns = {
        "log_probs": given.policy,
        "sum_pi_squared": given.sum_pi_squared,
        "loss_mask": given.mask,
        "weights": given.weights,
    }
    among = given.mask if settings.otb_positions == "trained" else None
    offsets = given.offsets
    if among is not None:
        columns = {name: None if one is None else one[among] for name, one in columns.items()}
        counts = segment_sum(among.double(), offsets).long()
        offsets = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    own = {"group_index": given.group, "offsets": offsets, "zero_tail": settings.otb_zero_tail}
    return columns | own, among
