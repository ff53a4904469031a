"""What float32 arithmetic may cost: unit roundoffs, half an ulp, exponentials, long sums."""

import torch
from torch import Tensor

from trajreplay.schema import StageError

# Relative error of one correctly rounded operation, 2^-p for p bits of significand.
UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
_SMALLEST_NORMAL = {
    "float64": 2.0**-1022,
    "float32": 2.0**-126,
    "bfloat16": 2.0**-126,
    "float16": 2.0**-14,
}

FLOAT32_ROUNDOFF = UNIT_ROUNDOFF["float32"]
# What one operation may lose near zero; trainers on GPUs may flush what is smaller to 0.
FLOAT32_TINY = _SMALLEST_NORMAL["float32"]

# Error of a float32 exponential: CUDA C++ Programming Guide, intrinsic functions, __expf(x) has
# 2 + floor(abs(1.173 x)) ulp. It covers expf (2 ulp), Triton's exp2 form and SLEEF (1 ulp).
EXP_ULPS = 2.0
EXP_ULPS_PER_UNIT = 1.173
_ULP = 2.0 * FLOAT32_ROUNDOFF

# Higham & Mary 2019: with k roundings on its longest path a sum errs by at most lambda sqrt(k) u
# with probability 1 - 2 k exp(-lambda^2 / 2). 12 leaves 1e-27 for a million terms. It also covers
# what the model leaves out, equal terms added one by one (error k u / 4), up to 2,304 of them.
SUM_LAMBDA = 12.0
# Roundings on the longest path of a sum of n tokens: reductions add pairs, or blocks of 16 on each
# of log16(n) levels, and then a few lanes and ranks.
_LANES, _PER_DOUBLING = 16.0, 4.0


def half_ulp(values: Tensor, dtype: str) -> Tensor:
    """Bound what rounding to a stored dtype may change.

        h = 2^(max(floor(log2 |v|), e_min) - p)      with p bits of significand

    Args:
        values: (...) float. The exact values.
        dtype: `float64`, `float32`, `bfloat16` or `float16`.

    Returns:
        (...) float64. Unit of `values`.

    Raises:
        StageError: The dtype is none of these.

    Conventions:
        Rounding to nearest with gradual underflow: below the smallest normal number the spacing
        stays what it is there. NaN and infinities give NaN. A value so large that it rounds to
        infinity gets the spacing of its own binade, so that infinity never counts as near. Half
        the smallest float64 is not representable and gives 0.

    Source:
        IEEE 754-2019, section 4.3.1.

    >>> half_ulp(torch.tensor([1.0, 3.0, 0.0]), "bfloat16").tolist()
    [0.00390625, 0.0078125, 4.591774807899561e-41]
    """
    if dtype not in UNIT_ROUNDOFF:
        raise StageError(
            f"half_ulp: no dtype {dtype!r}, expected one of {', '.join(UNIT_ROUNDOFF)}",
            hint="Give the dtype that the tensor was recorded in.",
        )
    exact = values.double()
    # frexp has its fraction in [1/2, 1); the quotient is the exact power of two below the value.
    binade = (exact / (2.0 * torch.frexp(exact).mantissa)).abs()
    binade = torch.where(exact == 0.0, 0.0, binade)
    return binade.clamp(min=_SMALLEST_NORMAL[dtype]) * UNIT_ROUNDOFF[dtype]


def accumulation_factor(roundings: Tensor) -> Tensor:
    """Bound the relative error of a float32 sum by its number of roundings.

        f = c u / (1 - c u)      with c = min(k, lambda sqrt(k))

    Args:
        roundings: (...) integer or float. k, the roundings on the longest path of the sum: n - 1
            for n terms, one more for each operation before or after.

    Returns:
        (...) float64. Times the sum of absolute terms it is the bound. Dimensionless.

    Conventions:
        Up to 144 roundings the bound holds for any data and order. Beyond, it is the
        probabilistic one with `SUM_LAMBDA`: any order of terms whose roundings do not conspire,
        any pairwise, blocked or parallel sum, and up to 2,304 equal terms one by one.

    Source:
        Higham & Mary 2019, A new approach to probabilistic rounding error analysis, SIAM J. Sci.
        Comput. 41(5), section 2, doi:10.1137/18M1226312; up to 144 roundings Higham 2002,
        Accuracy and stability of numerical algorithms, section 4.2.

    >>> accumulation_factor(torch.tensor([0, 1, 100, 10000])) / 2.0**-24
    tensor([0.0000e+00, 1.0000e+00, 1.0000e+02, 1.2001e+03], dtype=torch.float64)
    """
    count = roundings.double().clamp(min=0.0)
    scaled = torch.minimum(count, SUM_LAMBDA * count.sqrt()) * FLOAT32_ROUNDOFF
    return scaled / (1.0 - scaled)


def exp_error(exponent: Tensor, exponent_error: Tensor) -> Tensor:
    """Bound the error of a float32 exponential of an inexact exponent.

        e = exp(x) (exp(dx + rho) - 1)      with rho = (2 + 1.173 |x|) ulp

    Args:
        exponent: (...) float64. x.
        exponent_error: (...) float64, not negative. dx.

    Returns:
        (...) float64. Unit of exp(x).

    Conventions:
        exp(0) is 1 in every implementation. Exponents over 700 count as 700: both sides have left
        float32 there, and the bound stays finite.

    Source:
        NVIDIA, CUDA C++ Programming Guide, mathematical functions, table of intrinsics.

    >>> exp_error(torch.zeros(1).double(), torch.zeros(1).double())
    tensor([0.], dtype=torch.float64)
    """
    x = exponent.clamp(max=700.0)
    own = (EXP_ULPS + EXP_ULPS_PER_UNIT * x.abs()) * _ULP
    own = torch.where(x == 0.0, 0.0, own)
    error = x.exp() * torch.expm1(exponent_error + own)
    return torch.where(x == 0.0, error, error + FLOAT32_TINY)


def float32_error_of(constant: float) -> float:
    """Give what a Python constant loses when it becomes a float32.

    Args:
        constant: A finite number.

    Returns:
        The absolute difference, in the unit of the constant.

    >>> float32_error_of(10.0), float32_error_of(0.2) > 0.0
    (0.0, True)
    """
    exact = torch.tensor(constant, dtype=torch.float64)
    return abs(float(exact.float()) - constant)


def finite_or_nan(error: Tensor) -> Tensor:
    """Turn an infinite bound into NaN, which no difference is less than.

    Args:
        error: (...) float.

    Returns:
        (...) in the dtype of `error`.

    >>> finite_or_nan(torch.tensor([1.0, torch.inf]))
    tensor([1., nan])
    """
    return torch.where(torch.isfinite(error), error, torch.nan)


def reduction_factor(count: Tensor) -> Tensor:
    """The same of a reduction of float32 tensors, which adds pairs or blocks, and not one by one.

    Args:
        count: (...) float64. Summands, n.

    Returns:
        (...) float64. Dimensionless.

    Source:
        Higham 2002, Accuracy and stability of numerical algorithms, section 4.2.

    >>> bool(reduction_factor(torch.tensor(1e6)) < accumulation_factor(torch.tensor(1e3)))
    True
    """
    path = _LANES + _PER_DOUBLING * count.clamp(min=1.0).log2()
    roundings = torch.minimum(count, path)
    return torch.minimum(accumulation_factor(roundings), accumulation_factor(count))
