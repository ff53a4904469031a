"""Checks of the options that kernels share, and the dtype of their results."""

from collections.abc import Sequence

import torch
from torch import Tensor

from trajreplay.schema import StageError


def check_option(kernel: str, name: str, found: str, allowed: Sequence[str]) -> None:
    """Check that an option has one of its values.

    Args:
        kernel: Who asks, for the message.
        name: The option.
        found: Its value.
        allowed: The values there are.

    Raises:
        StageError: It has not.

    >>> check_option("demo", "form", "added", ("added", "floored"))
    """
    if found not in allowed:
        raise StageError(
            f"{kernel}: no {name} {found!r}, expected one of {', '.join(allowed)}",
            hint="The Conventions of the kernel say which trainer does which.",
        )


def check_range(kernel: str, name: str, low: float | None, high: float | None) -> None:
    """Check that a range has an end, and its ends are in order.

    Args:
        kernel: Who asks, for the message.
        name: The range.
        low: Its lowest value; None if it has none.
        high: Its highest value; None if it has none.

    Raises:
        StageError: It has not, or they are not.

    >>> check_range("demo", "clip_range", -1.0, None)
    """
    if low is None and high is None:
        raise StageError(
            f"{kernel}: {name} has no end, expected a lowest value, a highest one or both",
            hint="Leave the call out where nothing is clipped.",
        )
    if low is not None and high is not None and not low <= high:
        raise StageError(
            f"{kernel}: {name} runs from {low} to {high}, expected it to rise",
            hint="Give the lowest value first.",
        )


def check_positive(kernel: str, name: str, found: float) -> None:
    """Check that a length, a width or a scale is more than 0.

    Args:
        kernel: Who asks, for the message.
        name: What it is.
        found: Its value.

    Raises:
        StageError: It is not.

    >>> check_positive("demo", "buffer", 8.0)
    """
    if not found > 0:
        raise StageError(
            f"{kernel}: {name} is {found}, expected more than 0",
            hint="The kernel divides by it.",
        )


def check_ddof(kernel: str, ddof: int) -> None:
    """Check that a variance divides by n or by n - 1.

    Args:
        kernel: Who asks, for the message.
        ddof: What is taken off n.

    Raises:
        StageError: It is neither 0 nor 1.

    >>> check_ddof("demo", 1)
    """
    if ddof not in (0, 1):
        raise StageError(
            f"{kernel}: ddof is {ddof}, expected 0 or 1",
            hint="1 is the default of torch.std, 0 that of numpy.std.",
        )


def in_dtype_of(inputs: Tensor, result: Tensor) -> Tensor:
    """Round a float64 result to the dtype of the inputs.

    Args:
        inputs: (...) any dtype.
        result: (...) float64.

    Returns:
        The result in the dtype of the inputs if that is floating, else as it is.

    >>> in_dtype_of(torch.zeros(1), torch.ones(1, dtype=torch.float64)).dtype
    torch.float32
    """
    return result.to(inputs.dtype if inputs.dtype.is_floating_point else torch.float64)
