"""Estimators of the KL divergence of policy against reference, token by token."""

import torch
from torch import Tensor

from trajreplay.schema import StageError
from trajreplay.stages.kernels.precision import (
    FLOAT32_ROUNDOFF,
    FLOAT32_TINY,
    exp_error,
    finite_or_nan,
    float32_error_of,
)
from trajreplay.stages.kernels.segments import check_shapes

ESTIMATORS = ("k1", "k2", "k3")


def approx_kl(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    *,
    estimator: str = "k3",
    value_clamp: tuple[float, float] | None = None,
    log_ratio_clamp: tuple[float, float] | None = None,
) -> Tensor:
    """Estimate the KL divergence of the policy from the reference at each token.

        d = log pi - log ref
        k1 = d      k2 = d^2 / 2      k3 = exp(-d) - 1 + d

    Args:
        log_probs: (N,) float. Log-probability of each token under the policy. Nat.
        ref_log_probs: (N,) float. The same under the reference. Nat.
        estimator: `k1`, `k2` or `k3`.
        value_clamp: Lowest and highest estimate. Nat.
        log_ratio_clamp: Lowest and highest d. Nat.

    Returns:
        (N,) in the dtype of `log_probs`. Nat.

    Raises:
        StageError: The inputs differ in length, or the estimator is none of these.

    Conventions:
        No clamp unless asked for. slime and Relax clamp low_var_kl, which is k3, to -10 and 10 but
        not k3; verl clamps k3 too and before it d to -20 and 20; OpenRLHF and AReaL clamp all
        three estimates. d is first clamped, then the estimate. k1 may be negative. The estimate
        is not multiplied by a coefficient. A clamp turns an infinity into its bound and leaves
        NaN.

    Source:
        Schulman 2020, Approximating KL divergence, joschu.net/blog/kl-approx.html.

    >>> approx_kl(torch.tensor([-1.0, -0.5, -2.0]), torch.tensor([-1.2, -0.4, -4.5]))
    tensor([0.0187, 0.0052, 1.5821])
    """
    _check("approx_kl", log_probs, ref_log_probs, estimator)
    d = log_probs - ref_log_probs
    if log_ratio_clamp is not None:
        d = d.clamp(*log_ratio_clamp)
    estimate = _estimate(d, estimator)
    return estimate if value_clamp is None else estimate.clamp(*value_clamp)


def approx_kl_error(
    log_probs: Tensor,
    ref_log_probs: Tensor,
    *,
    estimator: str = "k3",
    value_clamp: tuple[float, float] | None = None,
    log_ratio_clamp: tuple[float, float] | None = None,
) -> Tensor:
    """Bound how far a float32 evaluation of `approx_kl` may lie from the exact value.

        e(d) = u |d|      e(k1) = e(d)      e(k2) = |d| e(d) + e(d)^2 / 2 + 2 u k2
        e(k3) = e(exp(-d)) + e(d) + 2 u (exp(-d) + 1 + |d|)

    Args:
        log_probs: (N,) float. As consumed, without error. Nat.
        ref_log_probs: (N,) float. As consumed, without error. Nat.
        estimator: As in `approx_kl`.
        value_clamp: As in `approx_kl`.
        log_ratio_clamp: As in `approx_kl`.

    Returns:
        (N,) float64. Nat.

    Raises:
        StageError: As in `approx_kl`.

    Conventions:
        Any order of the three terms of k3, expm1 included. A clamped value errs only by the
        rounding of its bound. Rounding to a narrower stored dtype is not in it. Where the inputs
        are not finite the bound is NaN: agreement is `difference <= bound`, never
        `not difference > bound`. Where float32 overflows and float64 does not, the bound stays
        finite and infinity lies outside it.

    Source:
        Higham 2002, Accuracy and stability of numerical algorithms, section 2.2.

    >>> log_probs, ref_log_probs = torch.tensor([-1.0, -0.5]), torch.tensor([-1.25, -0.5])
    >>> approx_kl_error(log_probs, ref_log_probs, estimator="k1") / 2.0**-24
    tensor([0.2500, 0.0000], dtype=torch.float64)
    """
    _check("approx_kl_error", log_probs, ref_log_probs, estimator)
    u = FLOAT32_ROUNDOFF
    raw = log_probs.double() - ref_log_probs.double()
    d_error = raw.abs() * u
    d = raw if log_ratio_clamp is None else raw.clamp(*log_ratio_clamp)
    if log_ratio_clamp is not None:
        d_error = _clamped_error(raw, d_error, log_ratio_clamp)
    if estimator == "k1":
        error = d_error
    elif estimator == "k2":
        # Squares and halves may underflow; a difference of float32 numbers cannot.
        error = d.abs() * d_error + d_error**2 / 2.0 + u * (d.abs() + d_error) ** 2
        error = torch.where(d == 0.0, error, error + 2.0 * FLOAT32_TINY)
    else:
        power_error = exp_error(-d, d_error)
        terms = d.clamp(min=-700.0).neg().exp() + 1.0 + d.abs() + power_error + d_error
        rounding = torch.where(d == 0.0, 0.0, 2.0 * u * (1.0 + 2.0 * u) * terms)
        error = power_error + d_error + rounding
    if value_clamp is not None:
        error = _clamped_error(_estimate(d, estimator), error, value_clamp)
    return finite_or_nan(error)


def _check(kernel: str, log_probs: Tensor, ref_log_probs: Tensor, estimator: str) -> None:
    check_shapes(kernel, log_probs=(log_probs, "N"), ref_log_probs=(ref_log_probs, "N"))
    if estimator not in ESTIMATORS:
        raise StageError(
            f"{kernel}: no estimator {estimator!r}, expected one of {', '.join(ESTIMATORS)}",
            hint="low_var_kl is k3 with its value clamped.",
        )


def _estimate(d: Tensor, estimator: str) -> Tensor:
    if estimator == "k1":
        return d
    if estimator == "k2":
        return d * d / 2.0
    if d.requires_grad:
        return torch.exp(-d) - 1.0 + d
    return torch.exp(-d).sub_(1.0).add_(d)  # in place: two of three passes write nowhere new


def _clamped_error(values: Tensor, error: Tensor, clamp: tuple[float, float]) -> Tensor:
    """Bound the error after a clamp: the image of an interval, and the rounding of the bounds."""
    middle = values.clamp(*clamp)
    above = (values + error).clamp(*clamp) - middle
    below = middle - (values - error).clamp(*clamp)
    return torch.maximum(above, below) + max(float32_error_of(bound) for bound in clamp)
