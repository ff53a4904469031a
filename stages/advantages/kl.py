"""The stage advantage.kl of a block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from trajreplay.stages.block import Block
from trajreplay.stages.capability import LOG_PROB_SOURCES, is_plain
from trajreplay.stages.compare import Compared, compare_elements
from trajreplay.stages.compose import evaluation_slack, kl_tokens
from trajreplay.stages.kernels import approx_kl_error, half_ulp


def replay_advantage_kl(block: Block) -> None:
    """Recompute the KL of policy against reference token by token."""
    found = computed_kl(block)
    compared = found.compare()
    if compared.disagree is not None:
        recorded = block.packed.tokens("kl")
        block.chained["kl"] = torch.where(compared.disagree, found.values, recorded)
    block.record(
        "advantage.kl", compared.looks, inputs=found.inputs, outputs=("kl",), noun="tokens"
    )


@dataclass(frozen=True)
class ComputedKl:
    """The KL of each token as it should be.

    Args:
        inputs: The columns that it is made of.
        values: (N,) float64.
        compare: Holds the recorded ones against it.
        evaluated: (N,) float64. From a dtype to the bits that it has by the arithmetic of that.
    """

    inputs: tuple[str, ...]
    values: Tensor
    compare: Callable[[], Compared]
    evaluated: Callable[[torch.dtype], Tensor]


def computed_kl(block: Block) -> ComputedKl:
    """Recompute the KL of policy against reference token by token."""
    settings, kernel = block.settings.kl, block.kernel("advantage.kl")
    own_dtype = block.dtypes.get("kl", "float32")
    if settings.coef == 0 and kernel is None:
        inputs: tuple[str, ...] = ()
        recomputed = torch.zeros_like(block.packed.tokens("kl"))

        def slack(tokens: Tensor) -> Tensor:
            return torch.zeros(len(tokens)).double()

        def in_dtype(dtype: torch.dtype) -> Tensor:
            return recomputed
    else:
        inputs = (LOG_PROB_SOURCES[settings.policy_source], "ref_log_probs")
        policy, reference = (block.packed.tokens(name) for name in inputs)

        def in_dtype(dtype: torch.dtype) -> Tensor:
            if kernel is not None:
                return kernel.kl(block.settings, policy.to(dtype), reference.to(dtype))
            return kl_tokens(settings, policy.to(dtype), reference.to(dtype))

        recomputed = in_dtype(torch.float64)

        def slack(tokens: Tensor) -> Tensor:
            mine, theirs = policy[tokens], reference[tokens]
            rounding = half_ulp(recomputed[tokens], own_dtype)
            if kernel is not None:
                return rounding + evaluation_slack(recomputed, in_dtype(torch.float32))[tokens]
            if is_plain("advantage.kl", block.settings):
                estimator = "k3" if settings.estimator == "low_var_kl" else settings.estimator
                return rounding + approx_kl_error(
                    mine, theirs, estimator=estimator, value_clamp=settings.value_clamp
                )
            rounded = kl_tokens(settings, mine.float(), theirs.float())
            return rounding + evaluation_slack(recomputed[tokens], rounded)

    def evaluated(dtype: torch.dtype) -> Tensor:
        return block.as_recorded("kl", in_dtype(dtype))

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
            exact=evaluated(torch.float32) if block.exact else None,
        )

    return ComputedKl(inputs, recomputed, compare, evaluated)
