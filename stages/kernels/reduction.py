"""Means of a loss over tokens, samples, micro-batches and steps, with what they divide by."""

from typing import NamedTuple

import torch
from torch import Tensor

from trajreplay.stages.kernels.counts import trained_tokens
from trajreplay.stages.kernels.masked import masked_sum
from trajreplay.stages.kernels.options import check_option
from trajreplay.stages.kernels.segments import check_shapes, scatter_sum

EMPTY = ("zero", "nan")
SAMPLES = ("all", "trained")


class Reduction(NamedTuple):
    """The mean of each set, with what it was divided from."""

    value: Tensor
    numerator: Tensor
    denominator: Tensor


def token_mean(
    values: Tensor,
    mask: Tensor,
    offsets: Tensor,
    index: Tensor,
    size: int,
    *,
    denominator: Tensor | None = None,
    epsilon: float = 0.0,
    empty: str = "zero",
) -> Reduction:
    """Average the trained tokens of each set of samples.

        x_k = sum_{s in k} sum_t m_t x_t / D_k      D_k = sum_{s in k} sum_t m_t + epsilon

    Args:
        values: (N,) bool, integer or float. The tokens of all samples, packed.
        mask: (N,) bool, integer or float. Not 0 where a token counts.
        offsets: (S+1,) int64. Where each sample begins, and N.
        index: (S,) int64 in 0..size-1. The set of each sample: a step, a rank, a micro-batch.
        size: How many sets there are.
        denominator: (size,) float. What to divide by if not the count. Token.
        epsilon: What is added to the denominator. Token.
        empty: What a denominator of 0 gives, `zero` or `nan`.

    Returns:
        Three (size,) tensors in the dtype of `values` if that is floating, else float64: value and
        numerator in the unit of `values`, denominator in tokens.

    Raises:
        StageError: The inputs differ in length, `offsets` do not cover them, an index lies
            outside, or `empty` is neither.

    Conventions:
        Over the step: NeMo-RL (adds 1e-8), prime-rl, slime `calculate_per_token_loss`, OpenRLHF
        token_level, AReaL, TRL dapo, cispo and vespo, verl's engine workers. Over each
        micro-batch, then `set_mean`: verl's legacy actor, TRL bnpo. slime counts a sample without
        trained tokens as one token: give `trained_tokens(..., least=1)`. TRL dr_grpo divides by
        samples times the longest completion, verl's `seq-mean-token-sum-norm` by a constant with
        no regard to samples (since 0.9 by the samples too): give that. Without trained tokens verl
        and OpenRLHF get NaN, the others 0. Sums run in float64; masked tokens never enter.

    Source:
        Yu et al. 2025, DAPO, equation 8, arXiv:2503.14476; a constant: Liu et al. 2025, Dr. GRPO,
        arXiv:2503.20783.

    >>> values, offsets = torch.tensor([1.0, 2.0, 6.0, torch.nan]), torch.tensor([0, 2, 4])
    >>> token_mean(values, torch.tensor([1, 1, 1, 0]), offsets, torch.tensor([0, 0]), 1).value
    tensor([3.])
    """
    check_option("token_mean", "empty", empty, EMPTY)
    sums = masked_sum(values, mask, offsets)
    numerator = scatter_sum(sums, index, size)
    if denominator is None:
        denominator = trained_tokens(mask, offsets, index, size)
    return _reduction("token_mean", values, numerator, denominator, epsilon, empty)


def sequence_mean(
    values: Tensor,
    mask: Tensor,
    offsets: Tensor,
    index: Tensor,
    size: int,
    *,
    token_denominator: Tensor | None = None,
    token_epsilon: float = 0.0,
    samples: str = "all",
    denominator: Tensor | None = None,
    empty: str = "zero",
) -> Reduction:
    """Average the means, or the sums, of the samples of each set.

        x_k = sum_{s in k} (sum_t m_t x_t / d_s) / D_k      d_s = max(sum_t m_t, 1)

    Args:
        values: (N,) bool, integer or float. The tokens of all samples, packed.
        mask: (N,) bool, integer or float. Not 0 where a token counts.
        offsets: (S+1,) int64. Where each sample begins, and N.
        index: (S,) int64 in 0..size-1. The set of each sample.
        size: How many sets there are.
        token_denominator: (S,) float. d if not the count of the sample: ones to sum tokens,
            `shared_tokens` where fragments count as one. Token.
        token_epsilon: What is added to the count; 0 divides by at least 1. Token.
        samples: What D counts, `all` samples or those with `trained` tokens.
        denominator: (size,) float. D if not such a count. Sample.
        empty: What a denominator of 0 gives, `zero` or `nan`.

    Returns:
        Three (size,) tensors in the dtype of `values` if that is floating, else float64: value and
        numerator in the unit of `values` (times tokens where they are summed), denominator in
        samples.

    Raises:
        StageError: The inputs differ in length, `offsets` do not cover them, an index lies
            outside, or an option has another value.

    Conventions:
        D counts all samples in TRL (grpo, sapo), NeMo-RL (those not masked as a whole) and slime
        and Relax (rollouts, or the global batch size: give it); samples with trained tokens in
        verl and OpenRLHF. verl adds 1e-8 to d. In slime d is the count of all samples that share a
        rollout, in Relax of those that share sample indices. Sums of tokens: verl
        `seq-mean-token-sum` over samples with trained tokens, TRL luspo over all. Sums run in
        float64; masked tokens never enter.

    Source:
        Shao et al. 2024, DeepSeekMath, equation 3, arXiv:2402.03300.

    >>> values, offsets = torch.tensor([1.0, 3.0, 6.0]), torch.tensor([0, 2, 3, 3])
    >>> sequence_mean(values, torch.ones(3), offsets, torch.zeros(3).long(), 1, samples="trained")
    Reduction(value=tensor([4.]), numerator=tensor([8.]), denominator=tensor([2.]))
    """
    check_option("sequence_mean", "empty", empty, EMPTY)
    check_option("sequence_mean", "samples", samples, SAMPLES)
    sums = masked_sum(values, mask, offsets)
    count = masked_sum(torch.ones_like(mask, dtype=torch.bool), mask, offsets)
    if token_denominator is None:
        token_denominator = count + token_epsilon if token_epsilon else count.clamp(min=1.0)
    check_shapes("sequence_mean", offsets=(count, "S"), token_denominator=(token_denominator, "S"))
    means = sums / token_denominator.double()
    numerator = scatter_sum(means, index, size)
    if denominator is None:
        counted = count > 0.0 if samples == "trained" else torch.ones_like(count)
        denominator = scatter_sum(counted, index, size)
    return _reduction("sequence_mean", values, numerator, denominator, 0.0, empty)


def set_mean(
    values: Tensor,
    index: Tensor,
    size: int,
    *,
    weights: Tensor | None = None,
    denominator: Tensor | None = None,
    empty: str = "zero",
) -> Reduction:
    """Average what smaller sets have over larger ones, micro-batches over steps.

        x_k = sum_{j in k} w_j x_j / D_k      D_k = sum_{j in k} w_j

    Args:
        values: (J,) bool, integer or float. One value a micro-batch, rank or sample.
        index: (J,) int64 in 0..size-1. The step of each.
        size: How many steps there are.
        weights: (J,) float. What each counts; None for 1. Any unit.
        denominator: (size,) float. D if not the sum of weights. Unit of `weights`.
        empty: What a denominator of 0 gives, `zero` or `nan`.

    Returns:
        Three (size,) tensors in the dtype of `values` if that is floating, else float64: value in
        the unit of `values`, numerator in that times `weights`, denominator in that of `weights`.

    Raises:
        StageError: The inputs differ in length, an index lies outside, or `empty` is neither.

    Conventions:
        Micro-batches count alike in TRL and in verl's legacy actor, or by their rows where verl
        sizes them by tokens. By their tokens the result is the token mean of the step, as in
        AReaL. The mean of sample losses, GMPO's, is this with samples. A weight of 0 keeps a NaN
        out. Sums run in float64.

    Source:
        The definition.

    >>> micro_batches, steps = torch.tensor([2.5, 15.0]), torch.tensor([0, 0])
    >>> set_mean(micro_batches, steps, 1).value
    tensor([8.7500])
    """
    check_option("set_mean", "empty", empty, EMPTY)
    counted = torch.ones_like(values, dtype=torch.float64) if weights is None else weights.double()
    check_shapes("set_mean", values=(values, "J"), weights=(counted, "J"), index=(index, "J"))
    terms = torch.where(counted != 0.0, values.double() * counted, 0.0)
    numerator = scatter_sum(terms, index, size)
    if denominator is None:
        denominator = scatter_sum(counted, index, size)
    return _reduction("set_mean", values, numerator, denominator, 0.0, empty)


def _reduction(
    kernel: str,
    values: Tensor,
    numerator: Tensor,
    denominator: Tensor,
    epsilon: float,
    empty: str,
) -> Reduction:
    check_shapes(kernel, index=(numerator, "K"), denominator=(denominator, "K"))
    divisor = denominator.double() + epsilon
    value = numerator / divisor
    if empty == "zero":
        value = torch.where(divisor == 0.0, 0.0, value)
    dtype = values.dtype if values.dtype.is_floating_point else torch.float64
    return Reduction(value.to(dtype), numerator.to(dtype), divisor.to(dtype))
