"""From token values to what a trainer records: masked means of samples, and sums of them."""

from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from trajreplay.stages.kernels.precision import (
    FLOAT32_TINY,
    accumulation_factor,
    finite_or_nan,
)
from trajreplay.stages.kernels.segments import (
    check_segments,
    check_shapes,
    scatter_sum,
    sum_checked,
)

# Roundings of a term besides those of its sum: a coefficient or the inverse of a count, the product
# with it, and a scale.
MEAN_ROUNDINGS = 3


class MaskedMean(NamedTuple):
    """The masked mean of each sample, with what it was divided from."""

    mean: Tensor
    numerator: Tensor
    denominator: Tensor


class MeanError(NamedTuple):
    """The bound of a float32 evaluation, and the sum of absolute terms that further sums need."""

    error: Tensor
    absolute: Tensor


def seq_mean_token_mean(
    values: Tensor, loss_mask: Tensor, offsets: Tensor, *, denominator: Tensor | None = None
) -> MaskedMean:
    """Average the trained tokens of each sample.

        x_s = sum_t m_t x_t / max(sum_t m_t, 1)      over the tokens t of sample s

    Args:
        values: (N,) bool, integer or float. The tokens of all samples, packed.
        loss_mask: (N,) bool, integer or float. 1 where a token counts. Converted only if its
            dtype is not that of `values`: convert it once for several calls.
        offsets: (S+1,) int64. Where each sample begins, and N.
        denominator: (S,) float. What to divide by if not the count; give that of an earlier call
            with the same mask to count once. Token.

    Returns:
        Three (S,) tensors in the dtype of `values` if that is floating, else float64: mean and
        numerator in the unit of `values`, denominator in tokens.

    Raises:
        StageError: The inputs differ in length, or `offsets` do not cover them.

    Conventions:
        A masked token is left out, not multiplied by 0: its NaN or infinity never enters, one on
        a trained token always does. A sample without trained tokens has mean 0 and denominator 1
        (verl adds 1e-8 to the count instead, OpenRLHF divides 0 by 0). Sums run in float64. The
        loss of a rank or step is the sum of the means, `scatter_sum`; that divided by the number
        of samples is the mean that slime, TRL and NeMo-RL report, verl divides by the number of
        samples that have trained tokens; the numerators over the sum of the denominators are the
        token mean.

    Source:
        Shao et al. 2024, DeepSeekMath, equation 3, arXiv:2402.03300.

    >>> values, offsets = torch.tensor([1.0, 2.0, torch.nan, 5.0]), torch.tensor([0, 3, 4])
    >>> seq_mean_token_mean(values, torch.tensor([1, 1, 0, 0]), offsets).mean
    tensor([1.5000, 0.0000])
    """
    check_shapes("seq_mean_token_mean", values=(values, "N"), loss_mask=(loss_mask, "N"))
    length = check_segments("seq_mean_token_mean", values, offsets)
    values = values if values.dtype.is_floating_point else values.double()
    weights = loss_mask.to(values.dtype)
    if denominator is None:
        denominator = sum_checked(weights, offsets, length).clamp_(min=1.0)
    numerator = sum_checked(values * weights, offsets, length)
    # The product is exact and a fifth of the cost of a choice, but makes NaN of a masked NaN.
    if not isfinite(float(numerator.detach().sum())):
        trained = torch.where(weights != 0.0, values * weights, 0.0)
        numerator = sum_checked(trained, offsets, length)
    return MaskedMean(numerator / denominator, numerator, denominator)


def seq_mean_token_mean_error(
    values: Tensor, errors: Tensor | None, loss_mask: Tensor, offsets: Tensor
) -> MeanError:
    """Bound how far a float32 evaluation of `seq_mean_token_mean` may lie from the exact mean.

        a_s = sum_t m_t (|x_t| + e_t) / max(n_s, 1)      n_s = sum_t m_t
        e_s = sum_t m_t e_t / max(n_s, 1) + f(n_s + 2) a_s      f: `accumulation_factor`

    Args:
        values: (N,) bool, integer or float. The exact tokens.
        errors: (N,) bool or float, not negative. How far each token may be off; None if none is.
            For clip fractions, the tokens whose comparison is undecided.
        loss_mask: (N,) bool, integer or float. 1 where a token counts.
        offsets: (S+1,) int64. Where each sample begins, and N.

    Returns:
        Two (S,) float64 tensors in the unit of `values`: error, the bound; and absolute, the mean
        of absolute terms, for `scatter_sum_error`.

    Raises:
        StageError: The inputs differ in length, or `offsets` do not cover them.

    Conventions:
        Any order of the terms, the division before or after the sum, a product with the inverse
        count. Masked tokens are left out. A NaN or infinity on a trained token makes the bound
        NaN: agreement is `difference <= bound`, never `not difference > bound`.

    Source:
        Higham & Mary 2019, as of `accumulation_factor`.

    >>> values, offsets = torch.tensor([1.0, -1.0, 3.0]), torch.tensor([0, 3])
    >>> bound = seq_mean_token_mean_error(values, None, torch.tensor([1, 1, 0]), offsets)
    >>> bound.error / 2.0**-24, bound.absolute
    (tensor([4.0000], dtype=torch.float64), tensor([1.], dtype=torch.float64))
    """
    off = torch.zeros_like(values, dtype=torch.float64) if errors is None else errors.double()
    check_shapes("seq_mean_token_mean_error", values=(values, "N"), errors=(off, "N"))
    mask = loss_mask.double()
    terms = values.double().abs() + off
    token_error, _, denominator = seq_mean_token_mean(off, mask, offsets)
    absolute = seq_mean_token_mean(terms, mask, offsets, denominator=denominator).mean
    error = token_error + _sum_error(absolute, denominator)
    return MeanError(finite_or_nan(error), finite_or_nan(absolute))


def policy_loss(pg_loss: Tensor, entropy_loss: Tensor, *, entropy_coef: float) -> Tensor:
    """Take the entropy bonus off the policy-gradient loss.

        loss = pg_loss - entropy_coef * entropy_loss

    Args:
        pg_loss: (...) float. Of tokens, samples or sums of them alike. Dimensionless.
        entropy_loss: (...) float. Of the same. Nat.
        entropy_coef: Weight of the entropy. Per nat.

    Returns:
        (...) in the dtype of the inputs. Dimensionless.

    Conventions:
        No KL term. A coefficient of 0 still passes on a NaN of the entropy, as in slime.

    Source:
        Mnih et al. 2016, A3C, section 4, arXiv:1602.01783.

    >>> policy_loss(torch.tensor(0.5), torch.tensor(2.0), entropy_coef=0.125)
    tensor(0.2500)
    """
    return pg_loss - entropy_coef * entropy_loss


def policy_loss_error(pg: MeanError, entropy: MeanError, *, entropy_coef: float) -> MeanError:
    """Bound how far a float32 evaluation of `policy_loss` may lie from the exact value.

        a = a_pg + |coef| a_entropy      e = e_pg + |coef| e_entropy + f(3) a

    Args:
        pg: Bounds of the policy-gradient loss, of samples or sums of them.
        entropy: Bounds of the entropy of the same.
        entropy_coef: As in `policy_loss`.

    Returns:
        error and absolute, shaped and meant as those given.

    Conventions:
        The combination may come before the sums or after. The coefficient is rounded too.

    Source:
        Higham 2002, Accuracy and stability of numerical algorithms, section 2.2.

    >>> one = MeanError(torch.zeros(1).double(), torch.ones(1).double())
    >>> policy_loss_error(one, one, entropy_coef=1.0).error / 2.0**-24
    tensor([6.0000], dtype=torch.float64)
    """
    weight = abs(entropy_coef)
    absolute = pg.absolute + weight * entropy.absolute
    error = pg.error + weight * entropy.error
    return MeanError(error + _sum_error(absolute, torch.ones_like(absolute)), absolute)


def scatter_sum_error(bounds: MeanError, index: Tensor, size: int) -> MeanError:
    """Bound how far float32 sums of sample means may lie from the exact sums.

        a_k = sum_{index[s] = k} a_s      e_k = sum e_s + f(n_k + 2) (a_k + sum e_s)

    Args:
        bounds: Bounds of the sample means.
        index: (S,) int64. The cohort, rank or micro-batch of each sample.
        size: How many sums there are.

    Returns:
        Two (size,) float64 tensors, error and absolute, in the unit of the means.

    Raises:
        StageError: The inputs differ in length, or an index lies outside.

    Conventions:
        Any order and any partial sums over micro-batches and ranks; a scale and a division after
        the sum are in it, so multiply error and absolute by the exact ones.

    Source:
        Higham & Mary 2019, as of `accumulation_factor`.

    >>> means = MeanError(torch.zeros(2).double(), torch.ones(2).double())
    >>> scatter_sum_error(means, torch.tensor([0, 0]), 1).error / 2.0**-24
    tensor([8.0000], dtype=torch.float64)
    """
    check_shapes("scatter_sum_error", error=(bounds.error, "S"), index=(index, "S"))
    error = scatter_sum(bounds.error, index, size)
    absolute = scatter_sum(bounds.absolute, index, size)
    count = scatter_sum(torch.ones_like(bounds.error), index, size)
    return MeanError(error + _sum_error(absolute + error, count), absolute)


def _sum_error(absolute: Tensor, count: Tensor) -> Tensor:
    """Bound the rounding of a sum of count terms, scaled before or after it."""
    error = accumulation_factor(count + (MEAN_ROUNDINGS - 1)) * absolute
    return torch.where(absolute == 0.0, error, error + (count + 1.0) * FLOAT32_TINY)
