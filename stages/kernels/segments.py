"""Sums, means and maxima over token segments and over indices, and the checks of shapes."""

import torch
from torch import Tensor

from trajreplay.schema import StageError


def segment_sum(values: Tensor, offsets: Tensor) -> Tensor:
    """Sum the tokens of each sample.

        y_s = sum_{offsets[s] <= t < offsets[s+1]} x_t

    Args:
        values: (N,) bool, integer or float. The tokens of all samples, packed.
        offsets: (S+1,) int64. Where each sample begins, and N.

    Returns:
        (S,) in the dtype of `values` if that is floating, else float64. Unit of `values`.

    Raises:
        StageError: `values` has not one axis, or `offsets` do not cover it.

    Conventions:
        Sums run in float64, each sample by itself, so that a NaN or a large value in one sample
        cannot reach another. An empty sample sums to 0. Samples of one length are summed as a
        matrix, and the last bits of a sum may depend on that.

    Source:
        The definition.

    >>> segment_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2, 3]))
    tensor([3., 0., 4.])
    """
    length = check_segments("segment_sum", values, offsets)
    return sum_checked(values, offsets, length)


def segment_max(values: Tensor, offsets: Tensor) -> Tensor:
    """Find the largest token of each sample.

        y_s = max_{offsets[s] <= t < offsets[s+1]} x_t

    Args:
        values: (N,) bool, integer or float. The tokens of all samples, packed.
        offsets: (S+1,) int64. Where each sample begins, and N.

    Returns:
        (S,) in the dtype of `values` if that is floating, else float64. Unit of `values`.

    Raises:
        StageError: `values` has not one axis, or `offsets` do not cover it.

    Conventions:
        A NaN anywhere in a sample is its maximum. An empty sample gives -inf.

    Source:
        The definition.

    >>> segment_max(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 2, 3]))
    tensor([2., -inf, 4.])
    """
    length = check_segments("segment_max", values, offsets)
    packed = values.to(_kept_dtype(values)).contiguous()
    if length:
        return packed.reshape(-1, length).amax(1)
    return torch.segment_reduce(packed, "max", offsets=offsets, unsafe=True)


def scatter_sum(values: Tensor, index: Tensor, size: int) -> Tensor:
    """Sum the samples of each cohort, group, micro-batch or rank.

        y_k = sum_{index[s] = k} x_s

    Args:
        values: (S,) bool, integer or float.
        index: (S,) int64 in 0..size-1, in any order.
        size: How many sums there are; one that no sample names is 0.

    Returns:
        (size,) in the dtype of `values` if that is floating, else float64. Unit of `values`.

    Raises:
        StageError: The inputs differ in length, or an index lies outside.

    Conventions:
        Sums run in float64, in the order of the samples.

    Source:
        The definition.

    >>> scatter_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([2, 0, 2]), 3)
    tensor([2., 0., 5.])
    """
    check_shapes("scatter_sum", values=(values, "S"), index=(index, "S"))
    if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < size:
        raise StageError(
            f"scatter_sum: index runs from {int(index.min())} to {int(index.max())}, "
            f"expected 0 to {size - 1}",
            hint="Number the cohorts, groups or ranks from 0.",
        )
    sums = torch.zeros(size, dtype=torch.float64, device=values.device)
    return sums.index_add_(0, index, values.double()).to(_kept_dtype(values))


def check_shapes(kernel: str, **named: tuple[Tensor, str]) -> None:
    """Check that tensors have the axes that their letters say, and equal letters equal lengths.

    Args:
        kernel: Who asks, for the message.
        named: Each input with one letter an axis, `log_probs=(log_probs, "N")`.

    Raises:
        StageError: A tensor has another number of axes, or two lengths of one letter differ.

    >>> check_shapes("demo", a=(torch.zeros(2), "S"), b=(torch.zeros(3), "S"))
    Traceback (most recent call last):
    trajreplay.schema.errors.StageError: demo: b has 3 along S, expected 2 as in a
    <BLANKLINE>
    Pass tensors that describe the same samples and tokens.
    """
    problems: list[str] = []
    seen: dict[str, tuple[str, int]] = {}
    for name, (tensor, axes) in named.items():
        if tensor.dim() != len(axes):
            problems.append(f"{name} has {tensor.dim()} axes, expected {len(axes)}")
            continue
        for letter, length in zip(axes, tensor.shape, strict=True):
            first, expected = seen.setdefault(letter, (name, length))
            if length != expected:
                problems.append(
                    f"{name} has {length} along {letter}, expected {expected} as in {first}"
                )
    if problems:
        raise StageError(
            f"{kernel}: " + "; ".join(problems),
            hint="Pass tensors that describe the same samples and tokens.",
        )


def check_segments(kernel: str, values: Tensor, offsets: Tensor) -> int:
    """Check that offsets rise from 0 to the number of tokens.

    Args:
        kernel: Who asks, for the message.
        values: (N,) any dtype. The tokens of all samples, packed.
        offsets: (S+1,) int64. Where each sample begins, and N.

    Returns:
        The length that every sample has, 0 if they differ or have no tokens.

    Raises:
        StageError: They do not.

    >>> check_segments("demo", torch.zeros(4), torch.tensor([0, 2, 4]))
    2
    """
    check_shapes(kernel, values=(values, "N"), offsets=(offsets, "S"))
    count, samples = values.numel(), offsets.numel() - 1
    if samples > 0 and count and count % samples == 0:
        length = count // samples
        regular = torch.arange(0, count + 1, length, dtype=offsets.dtype, device=offsets.device)
        if torch.equal(offsets, regular):
            return length
    rises = samples >= 0 and bool((offsets.diff() >= 0).all())
    if not rises or int(offsets[0]) != 0 or int(offsets[-1]) != count:
        raise StageError(
            f"{kernel}: offsets do not rise from 0 to {count}, the number of tokens",
            hint="offsets are the cumulative sums of the response lengths, with 0 before them.",
        )
    return 0


def sum_checked(values: Tensor, offsets: Tensor, length: int) -> Tensor:
    """Sum the tokens of each sample, offsets being checked.

    Args:
        values: (N,) bool, integer or float. The tokens of all samples, packed.
        offsets: (S+1,) int64. Where each sample begins, and N.
        length: What `check_segments` gave for them.

    Returns:
        (S,) as `segment_sum`.

    >>> sum_checked(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 1, 3]), 0)
    tensor([1., 6.])
    """
    if length:
        sums = values.reshape(-1, length).sum(1, dtype=torch.float64)
    else:
        packed = values.double().contiguous()
        sums = torch.segment_reduce(packed, "sum", offsets=offsets, unsafe=True)
    return sums.to(_kept_dtype(values))


def _kept_dtype(values: Tensor) -> torch.dtype:
    return values.dtype if values.dtype.is_floating_point else torch.float64
