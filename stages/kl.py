"""The stage advantage.kl of a block."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from trajreplay.stages.block import Block
from trajreplay.stages.capability import LOG_PROB_SOURCES, is_plain
from trajreplay.stages.compare import Compared, compare_elements
from trajreplay.stages.compose import evaluation_slack, kl_tokens
from trajreplay.stages.kernels import approx_kl_error, half_ulp


def replay_advantage_kl(block: Block) -> None:
    """Recompute the KL of policy against reference token by token."""
    inputs, recomputed, compare = computed_kl(block)
    compared = compare()
    if compared.disagree is not None:
        recorded = block.packed.tokens("kl")
        block.chained["kl"] = torch.where(compared.disagree, recomputed, recorded)
    block.record("advantage.kl", compared.looks, inputs=inputs, outputs=("kl",), noun="tokens")


def computed_kl(block: Block) -> tuple[tuple[str, ...], Tensor, Callable[[], Compared]]:
    """The columns that the KL is made of, the KL of each token, and how the recorded ones compare.

    Returns:
        Names, (N,) float64, and what makes the comparison.
    """
    settings, kernel = block.settings.kl, block.kernel("advantage.kl")
    dtype = block.dtypes.get("kl", "float32")
    if settings.coef == 0 and kernel is None:
        inputs: tuple[str, ...] = ()
        recomputed = torch.zeros_like(block.packed.tokens("kl"))

        def slack(tokens: Tensor) -> Tensor:
            return torch.zeros(len(tokens)).double()

        def in_float32() -> Tensor:
            return recomputed
    else:
        inputs = (LOG_PROB_SOURCES[settings.policy_source], "ref_log_probs")
        policy, reference = (block.packed.tokens(name) for name in inputs)
        if kernel is None:
            recomputed = kl_tokens(settings, policy, reference)
        else:
            recomputed = kernel.kl(block.settings, policy, reference)

        def in_float32() -> Tensor:
            if kernel is not None:
                return kernel.kl(block.settings, policy.float(), reference.float())
            return kl_tokens(settings, policy.float(), reference.float())

        def slack(tokens: Tensor) -> Tensor:
            mine, theirs = policy[tokens], reference[tokens]
            rounding = half_ulp(recomputed[tokens], dtype)
            if kernel is not None:
                return rounding + evaluation_slack(recomputed, in_float32())[tokens]
            if is_plain("advantage.kl", block.settings):
                estimator = "k3" if settings.estimator == "low_var_kl" else settings.estimator
                return rounding + approx_kl_error(
                    mine, theirs, estimator=estimator, value_clamp=settings.value_clamp
                )
            rounded = kl_tokens(settings, mine.float(), theirs.float())
            return rounding + evaluation_slack(recomputed[tokens], rounded)

    def compare() -> Compared:
        return compare_elements(
            block.packed.tokens("kl"),
            recomputed,
            block.packed.token_bounds,
            block.tolerance("advantage.kl", "kl"),
            slack=slack,
            describe=lambda one, old, new: block.token_divergence("kl", one, old, new),
            ranks=block.ranks_of_tokens,
            active=block.active,
            exact=block.as_recorded("kl", in_float32()) if block.exact else None,
        )

    return inputs, recomputed, compare
