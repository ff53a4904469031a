"""Linear recurrences over the tokens of each sample, all samples side by side."""

import torch
from torch import Tensor

from trajreplay.stages.kernels.segments import check_segments, check_shapes

_PADDING = 4  # how much larger than the tokens a table of all samples may be


def linear_scan(
    terms: Tensor,
    decay: Tensor,
    offsets: Tensor,
    *,
    initial: Tensor | None = None,
    reverse: bool = True,
) -> Tensor:
    """Run a linear recurrence through each sample, from its last token to its first.

        y_t = x_t + a_t y_{t+1}      with y past the last token the initial value of the sample

    Args:
        terms: (N,) float. x, the tokens of all samples, packed.
        decay: (N,) float. a. Dimensionless.
        offsets: (S+1,) int64. Where each sample begins, and N.
        initial: (S,) float. What each sample starts from; 0 if not given. Unit of `terms`.
        reverse: From the last token to the first; otherwise y_t takes y_{t-1}.

    Returns:
        (N,) float64. Unit of `terms`.

    Raises:
        StageError: The inputs differ in length, or `offsets` do not cover them.

    Conventions:
        Runs in float64, position by position over the samples that are that long, so that one
        long sample costs its own tokens only. A NaN reaches every later step of its own sample,
        through a decay of 0 as well, as it does in trainers that multiply by a mask. Where nothing
        decays and lengths are not far apart, the same sums are taken of all samples in one table.

    Source:
        The definition.

    >>> linear_scan(torch.tensor([1.0, 2.0, 4.0]), torch.full((3,), 0.5), torch.tensor([0, 2, 3]))
    tensor([2., 2., 4.], dtype=torch.float64)
    """
    check_segments("linear_scan", terms, offsets)
    check_shapes("linear_scan", terms=(terms, "N"), decay=(decay, "N"))
    lengths = offsets.diff()
    state = torch.zeros(lengths.numel(), dtype=torch.float64, device=terms.device)
    if initial is not None:
        check_shapes("linear_scan", samples=(lengths, "S"), initial=(initial, "S"))
        state = initial.double()
    if not terms.numel():
        return terms.double()
    padded = int(lengths.max()) * lengths.numel()
    if padded <= _PADDING * terms.numel() and bool((decay == 1.0).all()):
        return _running_sums(terms.double(), state, offsets, reverse)
    longest_first = lengths.argsort(descending=True, stable=True)
    order, widths = _by_step(offsets, longest_first, reverse)
    state = state[longest_first]
    found = terms.double()[order]  # a copy, in which each step takes the place of its terms
    steps = torch.split_with_sizes(found, widths)
    rates = torch.split_with_sizes(decay.double()[order], widths)
    for count, step, rate in zip(widths, steps, rates, strict=True):
        state = step.addcmul_(rate, state if count == state.numel() else state[:count])
    result = torch.empty_like(found)
    result[order] = found
    return result


def _running_sums(terms: Tensor, state: Tensor, offsets: Tensor, reverse: bool) -> Tensor:
    """The scan without decay: samples side by side, a row each, added up step by step."""
    sample = sample_of(offsets)
    longest = int(offsets.diff().max())
    place = sample * longest + _steps(offsets, sample, reverse)
    table = torch.zeros(state.numel() * longest, dtype=torch.float64, device=terms.device)
    table[place] = terms
    table = table.reshape(state.numel(), longest)
    table[:, 0] += state
    return table.cumsum(1).reshape(-1)[place]


def _steps(offsets: Tensor, sample: Tensor, reverse: bool) -> Tensor:
    """(N,) int64. How many tokens of its sample come before each token in a scan."""
    token = torch.arange(sample.numel(), device=offsets.device)
    return offsets[1:][sample] - 1 - token if reverse else token - offsets[:-1][sample]


def sample_of(offsets: Tensor) -> Tensor:
    """Name the sample of each token.

        s_n = s      where offsets[s] <= n < offsets[s+1]

    Args:
        offsets: (S+1,) int64. Where each sample begins, and N.

    Returns:
        (N,) int64.

    Conventions:
        A sample without tokens is named by none.

    Source:
        The definition.

    >>> sample_of(torch.tensor([0, 2, 2, 3]))
    tensor([0, 0, 2])
    """
    samples = torch.arange(offsets.numel() - 1, device=offsets.device)
    return samples.repeat_interleave(offsets.diff())


def per_token(kernel: str, name: str, value: Tensor | float, offsets: Tensor) -> Tensor:
    """Give each token the value of its sample, or one value to all.

    Args:
        kernel: Who asks, for the message.
        name: What the value is called there.
        value: (S,) float, or a number.
        offsets: (S+1,) int64. Where each sample begins, and N.

    Returns:
        (N,) float64. Unit of `value`.

    Raises:
        StageError: There is not one value a sample.

    >>> per_token("demo", "gamma", torch.tensor([0.5, 1.0]), torch.tensor([0, 2, 3]))
    tensor([0.5000, 0.5000, 1.0000], dtype=torch.float64)
    """
    lengths = offsets.diff()
    if isinstance(value, Tensor) and value.dim():
        check_shapes(kernel, samples=(lengths, "S"), **{name: (value, "S")})
        return value.double().repeat_interleave(lengths)
    return torch.full(
        (int(lengths.sum()),), float(value), dtype=torch.float64, device=offsets.device
    )


def _by_step(offsets: Tensor, longest_first: Tensor, reverse: bool) -> tuple[Tensor, list[int]]:
    """Order the tokens by step, then by sample from the longest; count the samples of each step."""
    sample = sample_of(offsets)
    step = _steps(offsets, sample, reverse)
    token = torch.arange(sample.numel(), device=offsets.device)
    rank = torch.empty_like(longest_first)
    rank[longest_first] = torch.arange(rank.numel(), device=offsets.device)
    widths = torch.bincount(step)
    order = torch.empty_like(token)
    order[(widths.cumsum(0) - widths)[step] + rank[sample]] = token
    return order, widths.tolist()
