"""What float32 may change of whitened tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from trajreplay.stages.kernels.groups import Groups
from trajreplay.stages.kernels.precision import (
    FLOAT32_ROUNDOFF,
    FLOAT32_TINY,
    reduction_factor,
)
from trajreplay.stages.kernels.rounded import Rounded, quotient
from trajreplay.stages.kernels.whitening import centre_of, divisor_of, sets_of, whiten

U = FLOAT32_ROUNDOFF


def whitened(
    values: Rounded,
    loss_mask: Tensor,
    *,
    set_index: Tensor | None = None,
    centre_index: Tensor | None = None,
    centre: str = "mean",
    scale: bool = True,
    form: str = "added",
    ddof: int = 1,
    epsilon: float = 1e-8,
    one_pass: bool = False,
    short: str = "raise",
    recorded: Tensor | None = None,
) -> Rounded:
    """Whiten tokens, and bound how far a float32 evaluation may lie from the exact value.

        e(mean) = mean(e) + f mean(|x| + e)      e(c) = e + e(mean) + u |c|
        two passes: s +- (|e| + e(mean)^2 + 3 f s)      one pass: v +- (3 f E[x^2] + 2 E[|x| e])
        e(y) = max |y - (c +- e(c)) / d|      over the divisors of these deviations

    Args:
        values: (N,), and what they may be off by.
        loss_mask: (N,). As in `whiten`, and so are the others.
        set_index: As there.
        centre_index: As there.
        centre: As there.
        scale: As there.
        form: As there.
        ddof: As there.
        epsilon: As there.
        one_pass: As there.
        short: As there.
        recorded: (N,) float64. What a trainer has; narrows what one pass leaves open.

    Returns:
        (N,), exact values and bounds. Where a divisor may be 0 the bound is not finite.

    Raises:
        StageError: As `whiten`.

    Conventions:
        Sums of tokens are reductions of a tensor, by pairs or in blocks, here f(16 + 4 log2 n) at
        most, and not one loop over all tokens, which would be f(n). A variance by one pass loses
        what the mean square has of digits beyond it; where it may come out negative a divisor may
        be as small as float32 tells it from 0, and NaN beyond. The tokens of a set share it, so
        that it is no smaller than (sum |c| - sum e(c)) / sum |y|, of what is recorded.

    Source:
        Higham 2002, Accuracy and stability of numerical algorithms, sections 1.9 and 4.2; Chan,
        Golub & LeVeque 1983, The American Statistician 37(3); f: `accumulation_factor`.

    >>> values = Rounded(torch.tensor([0.5, -0.5, 1.0, 2.0]).double(), torch.zeros(4).double())
    >>> found = whitened(values, torch.ones(4))
    >>> bool((found.error < 1e-5).all())
    True
    """
    value = whiten(
        values.value,
        loss_mask,
        set_index=set_index,
        centre_index=centre_index,
        centre=centre,
        scale=scale,
        form=form,
        ddof=ddof,
        epsilon=epsilon,
        one_pass=one_pass,
        short=short,
    )
    unmasked = loss_mask != 0
    sets = sets_of(values.value, set_index)
    count = sets.sum(unmasked.double())
    x = torch.where(unmasked, values.value, 0.0)
    entry = torch.where(unmasked, values.error, 0.0)
    factor = reduction_factor(count)
    own = entry
    if centre_index is None and centre == "mean":
        inherited = sets.sum(entry) / count
        mean = inherited + factor * (sets.sum(x.abs()) / count + inherited)
        level, shift = (sets.sum(x) / count)[sets.member], mean[sets.member]
    else:  # what a centre that is no mean of the set is off by, the variance has of first order
        others = sets_of(values.value, centre_index, sets)
        level = centre_of(x, unmasked, others, centre)
        shift = _centre_error(x, entry, unmasked, others, centre)
        mean, own = torch.zeros_like(count), torch.where(unmasked, entry + shift, 0.0)
    centred = values.value - level
    error = values.error + shift + U * (centred.abs() + values.error + shift)
    if scale:
        free = torch.where(count > ddof, count - ddof, count)
        squares = sets.sum(torch.where(unmasked, centred**2, 0.0))
        spread = (squares / free).sqrt()
        if one_pass:
            square = sets.sum((x.abs() + entry) ** 2) / count
            crossed = sets.sum((x.abs() + entry) * entry) / count
            off = (3.0 * (factor + 4.0 * U) * square + 4.0 * crossed) * (count / free)
            low, high = spread**2 - off, spread**2 + off
        else:
            off = (sets.sum(own**2) / free).sqrt()
            widest = ((spread + off) ** 2 + mean**2 * count / free).sqrt()
            off = off + 3.0 * (factor + 4.0 * U) * widest
            off = off + torch.where(widest > 0.0, FLOAT32_TINY * count / free, 0.0).sqrt()
            low, high = (spread - off).clamp(min=0.0) ** 2, (widest + off) ** 2
        least = divisor_of(low.clamp(min=0.0), epsilon * (1.0 - U), form) * (1.0 - 4.0 * U)
        if one_pass and form == "added":  # a floor, or a root, makes no divisor of less than that
            of_tokens = Rounded(*(torch.where(unmasked, one, 0.0) for one in (centred, error)))
            shared = _shared_divisor(of_tokens, unmasked, recorded, sets)
            finite = _finite_divisor(sets.sum(x**2) / count, low, count / free, epsilon)
            shared = torch.maximum(shared, finite)
            least = torch.where(low < 0.0, torch.minimum(least, shared), least)
        most = divisor_of(high, epsilon * (1.0 + U), form) * (1.0 + 4.0 * U)
        scaled = quotient(Rounded(centred, error), least[sets.member], most[sets.member], value)
        if short == "keep":  # a set that is short is divided by 1 and an epsilon
            scaled = torch.where(
                (count > ddof)[sets.member], scaled, error + 3.0 * U * centred.abs()
            )
        error = scaled
    if short == "keep":
        error = torch.where(count[sets.member] == 0.0, values.error, error)
    return Rounded(value, error)


def _shared_divisor(
    centred: Rounded, unmasked: Tensor, recorded: Tensor | None, sets: Groups
) -> Tensor:
    """(G,) The least that the tokens of each set can have been divided by, above 0."""
    if recorded is None:
        return torch.full_like(sets.size, FLOAT32_TINY)
    size = sets.sum(centred.value.abs()) - sets.sum(centred.error)
    held = torch.where(unmasked, recorded.abs(), 0.0).nan_to_num(0.0, 0.0, 0.0)
    total = sets.sum(held) * (1.0 + 4.0 * U)
    return (size / total.clamp(min=FLOAT32_TINY)).clamp(min=FLOAT32_TINY)


def _finite_divisor(square: Tensor, low: Tensor, scale: Tensor, epsilon: float) -> Tensor:
    """(G,) The least divisor by a variance of one pass that gives a finite value.

    The variance is a multiple of float32's spacing at the mean square, or of half of it, times
    `scale`, for ddof. What is left of epsilon beside a negative one, and no 0, is the least of all.

    Args:
        square: (G,) Mean squares.
        low: (G,) The least variances.
        scale: (G,) What they are multiplied by.
        epsilon: What is added to them.
    """
    step = torch.exp2(torch.floor(torch.log2(square / 2.0)) - 23.0) * scale
    left = torch.where(step > 0.0, epsilon - torch.floor(epsilon / step) * step, 0.0)
    left = (left - 8.0 * U * epsilon).clamp(min=U * epsilon)
    least = torch.maximum(left, low + epsilon * (1.0 - U)).sqrt() * (1.0 - 4.0 * U)
    return least.clamp(min=FLOAT32_TINY)


def _centre_error(x: Tensor, entry: Tensor, unmasked: Tensor, sets: Groups, centre: str) -> Tensor:
    """(N,) How far what is taken off each token may be off; arguments as of `centre_of`."""
    if centre == "none":
        return torch.zeros_like(x)
    counted = unmasked.double()
    count = sets.sum(counted)[sets.member]
    size, inherited = (sets.sum(one)[sets.member] for one in (x.abs(), entry))
    off = inherited + reduction_factor(count) * (size + inherited)
    if centre == "leave-one-out":
        count = count - counted
        off = off + torch.where(unmasked, entry + U * (x.abs() + size + entry + inherited), 0.0)
    off = (off + 2.0 * U * (size + inherited)) / count.clamp(min=1.0)
    return torch.where(count > 0.0, off, 0.0)
