"""The stages advantage.kl and advantage.estimate of a block."""

from __future__ import annotations

import torch
from torch import Tensor

from trajreplay.stages.block import Block
from trajreplay.stages.capability import LOG_PROB_SOURCES
from trajreplay.stages.compare import Compared, compare_elements
from trajreplay.stages.kernels import approx_kl, approx_kl_error, grpo_advantages, half_ulp
from trajreplay.stages.rewards import warn_of_batch_rewards


def replay_advantage_kl(block: Block) -> None:
    """Recompute the KL of policy against reference token by token."""
    settings = block.settings.kl
    recorded = block.packed.tokens("kl")
    dtype = block.dtypes.get("kl", "float32")
    if settings.coef == 0:
        inputs: tuple[str, ...] = ()
        recomputed = torch.zeros_like(recorded)

        def slack(tokens: Tensor) -> Tensor:
            return torch.zeros(len(tokens)).double()
    else:
        inputs = (LOG_PROB_SOURCES[settings.policy_source], "ref_log_probs")
        policy, reference = (block.packed.tokens(name) for name in inputs)
        estimator = "k3" if settings.estimator == "low_var_kl" else settings.estimator
        clamp = settings.value_clamp
        recomputed = approx_kl(policy, reference, estimator=estimator, value_clamp=clamp)

        def slack(tokens: Tensor) -> Tensor:
            error = approx_kl_error(
                policy[tokens], reference[tokens], estimator=estimator, value_clamp=clamp
            )
            return error + half_ulp(recomputed[tokens], dtype)

    compared = compare_elements(
        recorded,
        recomputed,
        block.packed.token_bounds,
        block.tolerance("advantage.kl", "kl"),
        slack=slack,
        describe=lambda one, old, new: block.token_divergence("kl", one, old, new),
        active=block.active,
    )
    if compared.disagree is not None:
        block.chained["kl"] = torch.where(compared.disagree, recomputed, recorded)
    block.record("advantage.kl", compared.looks, inputs=inputs, outputs=("kl",), noun="tokens")


def replay_advantage_estimate(block: Block) -> None:
    """Give every response token the processed reward of its sample, and compare."""
    if "reward.post_process" not in block.stages:
        warn_of_batch_rewards(block)
    lengths = block.packed.lengths
    names = [one for one in ("advantages", "returns") if one in block.packed.table.column_names]
    isolated = grpo_advantages(block.packed.scalars("reward"), lengths)
    looks = [_against(block, name, isolated) for name in names]
    chained = None
    final = isolated
    if "reward" in block.chained:
        final = grpo_advantages(block.chained["reward"], lengths)
        chained = [_against(block, name, final) for name in names]
    for name, result in zip(names, chained or looks, strict=True):
        if result.disagree is not None:
            recorded = block.packed.tokens(name)
            block.chained[name] = torch.where(result.disagree, final, recorded)
    block.record(
        "advantage.estimate",
        _merged(looks),
        None if chained is None else _merged(chained),
        inputs=("reward",),
        outputs=tuple(names),
        after="reward.post_process",
        replaced=("reward",) if "reward" in block.chained else (),
        noun="tokens",
    )


def _against(block: Block, name: str, recomputed: Tensor) -> Compared:
    dtype = block.dtypes.get(name, "float32")
    return compare_elements(
        block.packed.tokens(name),
        recomputed,
        block.packed.token_bounds,
        block.tolerance("advantage.estimate", name),
        slack=lambda tokens: half_ulp(recomputed[tokens], dtype),
        describe=lambda one, old, new: block.token_divergence(name, one, old, new),
        active=block.active,
    )


def _merged(columns: list[Compared]) -> list:  # type: ignore[type-arg]
    looks = columns[0].looks
    for other in columns[1:]:
        looks = [one.merged(two) for one, two in zip(looks, other.looks, strict=True)]
    return looks
