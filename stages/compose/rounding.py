"""How far float32 may lie from an exact result that no bound is known of."""

import torch
from torch import Tensor

# How much larger than one evaluation in float32 errs another may err: other orders of the sums,
# other forms of the same term.
SAFETY = 16.0
_ULPS = 8.0


def evaluation_slack(exact: Tensor, rounded: Tensor) -> Tensor:
    """Estimate the rounding errors of a result from one evaluation of it in float32.

        e = 16 |x32 - x64| + 8 ulp32(x64)

    Args:
        exact: (...) float64.
        rounded: (...) float. The same, from float32 inputs in float32 arithmetic.

    Returns:
        (...) float64, in the unit of `exact`; NaN where it is not finite.

    Conventions:
        An estimate and no bound: it stands in for the derived bounds of the kernels that have one.

    >>> evaluation_slack(torch.ones(1).double(), torch.ones(1)) / 2.0**-23
    tensor([8.], dtype=torch.float64)
    """
    ulp = torch.finfo(torch.float32).eps * exact.abs()
    slack = SAFETY * (rounded.double() - exact).abs() + _ULPS * ulp
    return torch.where(torch.isfinite(slack), slack, torch.nan)
