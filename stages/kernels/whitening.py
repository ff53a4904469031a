"""Advantages whitened over the tokens that count, and clipped."""

import torch
from torch import Tensor

from trajreplay.schema import StageError
from trajreplay.stages.kernels.groups import Groups, groups_of
from trajreplay.stages.kernels.options import (
    check_ddof,
    check_option,
    in_dtype_of,
)
from trajreplay.stages.kernels.segments import check_shapes

WHITENING_FORMS = ("added", "floored", "std")
CENTRES = ("mean", "leave-one-out", "none")
SHORT_RULES = ("raise", "biased", "keep", "nan")


def whiten(
    values: Tensor,
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
) -> Tensor:
    """Centre tokens on the mean of those that count, and divide by their deviation.

        y_t = (x_t - b_t) / sqrt(v + epsilon)      with v = sum m (x - b)^2 / (sum m - ddof)

        b_t = sum m x / sum m (mean), (sum m x - m_t x_t) / (sum m - m_t) (leave-one-out), 0 (none)

    Args:
        values: (N,) float, x. Advantages, say, of all samples, packed.
        loss_mask: (N,) bool, integer or float, m. 1 where a token counts.
        set_index: (N,) int64. Which tokens share statistics, any numbers in any order: the rank or
            the cohort, say; all of them if not given.
        centre_index: (N,) int64. Which tokens share b, if not those.
        centre: As above.
        scale: Whether to divide; otherwise only centred.
        form: `added` as above, `floored` (over sqrt(max(v, epsilon))) or `std` (over sqrt(v) +
            epsilon).
        ddof: 0 or 1.
        epsilon: Keeps the division finite. Unit of `values`, squared except in `std`.
        one_pass: Whether v is the difference of two means, where `values` are float32 or narrower.
        short: What a set of ddof counted tokens or fewer, or of none, does: `raise`, `biased` (one
            token divides by n, none still raises), `keep` (v is 1, and none keeps its values) or
            `nan`.

    Returns:
        (N,) in the dtype of `values` if that is floating, else float64. Dimensionless, or the unit
        of `values` if only centred.

    Raises:
        StageError: The inputs differ in length, an option has no such value, a set is short, or
            one pass is asked for around anything but the mean of the set.

    Conventions:
        Sums run in float64. A masked token has no effect on another, NaN included. One pass of
        float32 values takes sums rounded once to float32 and E[x^2] - E[x]^2 in float32 from there:
        large values of a small spread lose every digit, and a negative difference gives NaN, though
        a trainer whose epsilon exceeds it goes on. Of float64 values the exact v is taken, whatever
        the passes: which digits a trainer lost, its own order of adding decides. Only centring
        needs one token, whatever ddof. Where b is of other tokens, those without any that counts
        have a b of 0, and so has a lone token that is left out of its own.

        verl and TRL's PPO have the defaults, NeMo-RL's GAE a ddof of 1 with `added`, its
        REINFORCE++ 0 with `floored`. slime and Relax take one pass, short `biased`; Relax's
        REINFORCE++ is `floored` with ddof 0. So is OpenRLHF, or only centred. AReaL is `std` with
        1e-5, short `keep`, its b of the batch or a group, left out or none, and v of either. Masked
        tokens get what the equation gives; TRL, AReaL, NeMo-RL's GAE, Relax's REINFORCE++, and verl
        but for GAE, make them 0 afterwards.
        A set is a data-parallel group with context parallelism in slime and without it in Relax, a
        chunk as it comes in NeMo-RL's SingleController, elsewhere the batch.

    Source:
        Huang et al. 2024, The N+ implementation details of RLHF with PPO, detail 19,
        arXiv:2403.17031.

    >>> values, mask = torch.tensor([0.5, -0.5, 1.0, 2.0, 7.0]), torch.tensor([1, 1, 1, 1, 0])
    >>> whiten(values, mask)
    tensor([-0.2402, -1.2010,  0.2402,  1.2010,  6.0048])
    >>> whiten(values, mask, ddof=0, form="floored")[:4]
    tensor([-0.2774, -1.3868,  0.2774,  1.3868])
    """
    kernel = "whiten"
    check_shapes(kernel, values=(values, "N"), loss_mask=(loss_mask, "N"))
    check_option(kernel, "form", form, WHITENING_FORMS)
    check_option(kernel, "centre", centre, CENTRES)
    check_option(kernel, "short rule", short, SHORT_RULES)
    check_ddof(kernel, ddof)
    unmasked = loss_mask != 0
    sets = sets_of(values, set_index)
    count = sets.sum(unmasked.double())
    _check_counts(count, ddof + 1 if scale else 1, short)
    plain = centre_index is None and centre == "mean"
    if one_pass and not plain:
        raise StageError(
            f"{kernel}: one pass around {centre!r} of other tokens, expected the mean of the set",
            hint="Leave one_pass out.",
        )

    x = values.double()
    counted = torch.where(unmasked, x, 0.0)
    if plain:
        level = (sets.sum(counted) / count)[sets.member]
    else:
        level = centre_of(counted, unmasked, sets_of(values, centre_index, sets), centre)
    centred = x - level
    if scale:
        short_divisor = torch.full_like(count, torch.nan) if short == "nan" else count
        free = torch.where(count > ddof, count - ddof, short_divisor)
        if one_pass and values.dtype != torch.float64:
            variance = _one_pass_variance(sets, counted, count) * (count / free)
        else:
            squares = torch.where(unmasked, centred**2, 0.0)
            variance = sets.sum(squares) / free
        if short == "keep":
            variance = torch.where(count > ddof, variance, 1.0)
        centred = centred / divisor_of(variance, epsilon, form)[sets.member]
    if short == "nan":
        centred = torch.where(count[sets.member] == 0.0, torch.nan, centred)
    if short == "keep":
        centred = torch.where(count[sets.member] == 0.0, x, centred)
    return in_dtype_of(values, centred)


def centre_of(counted: Tensor, unmasked: Tensor, sets: Groups, centre: str) -> Tensor:
    """(N,) float64. What is taken off each token; `counted` are the values, masked ones 0."""
    if centre == "none":
        return torch.zeros_like(counted)
    total, count = (sets.sum(one)[sets.member] for one in (counted, unmasked.double()))
    if centre == "leave-one-out":
        total, count = total - counted, count - unmasked.double()
    return torch.where(count > 0.0, total / count.clamp(min=1.0), 0.0)


def sets_of(values: Tensor, set_index: Tensor | None, known: Groups | None = None) -> Groups:
    """The sets of tokens that share statistics: if none are named those known, or all of them."""
    if set_index is not None:
        check_shapes("whiten", values=(values, "N"), set_index=(set_index, "N"))
        return groups_of(set_index)
    if known is not None:
        return known
    count = values.numel()
    size = torch.full((min(count, 1),), count, dtype=torch.float64, device=values.device)
    return Groups(torch.zeros(count, dtype=torch.int64, device=values.device), size)


def _check_counts(count: Tensor, least: int, short: str) -> None:
    if short in ("keep", "nan"):
        return
    lacking = count < (1 if short == "biased" else least)
    if bool(lacking.any()):
        raise StageError(
            f"whiten: {int(lacking.sum())} of {count.numel()} sets have too few tokens that "
            f"count, the least {int(count.min())}, expected {least} or more in each",
            hint="A set is what shares statistics: see set_index, and short for what trainers do.",
        )


def _one_pass_variance(sets: Groups, counted: Tensor, count: Tensor) -> Tensor:
    mean = (sets.sum(counted) / count).float()
    square = (sets.sum(counted**2) / count).float()
    variance = (square - mean * mean).double()
    return torch.where(variance < 0.0, torch.nan, variance)


def divisor_of(variance: Tensor, epsilon: float, form: str) -> Tensor:
    """What is divided by where the variance is this; arguments as of `whiten`."""
    if form == "std":
        return variance.sqrt() + epsilon
    if form == "floored":
        return variance.clamp(min=epsilon).sqrt()
    return (variance + epsilon).sqrt()
