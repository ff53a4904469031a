import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers import references
from tests.helpers.packed import float32s
from trajreplay.schema import StageError
from trajreplay.stages.kernels import approx_kl, approx_kl_error

Floats = npt.NDArray[np.float32]
Clamp = tuple[float, float] | None

ESTIMATORS = ("k1", "k2", "k3")
CLAMPS = st.sampled_from([None, (-10.0, 10.0), (-0.1, 0.3)])
LOG_RATIO_CLAMPS = st.sampled_from([None, (-20.0, 20.0)])
LOG_PROBS = float32s(-40.0, 0.0) | float32s(-1.0, -0.9) | float32s(-1e-30, 0.0)
PAIRS = st.lists(st.tuples(LOG_PROBS, LOG_PROBS), max_size=40)

# The same estimates, as trainers in float32 write them: of the log ratio d.
IN_FLOAT32: dict[str, list[Callable[[Tensor], Tensor]]] = {
    "k1": [lambda d: d],
    "k2": [lambda d: d**2 / 2.0, lambda d: 0.5 * d * d],
    "k3": [
        lambda d: torch.exp(-d) - 1.0 + d,
        lambda d: torch.exp(-d) - (1.0 - d),
        lambda d: d + torch.exp(-d) - 1.0,
        lambda d: torch.expm1(-d) + d,
        lambda d: torch.from_numpy(np.exp(-d.numpy())) - 1.0 + d,
    ],
}


def tensors(pairs: list[tuple[float, float]]) -> tuple[Tensor, Tensor]:
    both = torch.tensor(pairs, dtype=torch.float64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(pairs=PAIRS, value_clamp=CLAMPS, log_ratio_clamp=LOG_RATIO_CLAMPS)
def test_equals_a_loop_over_tokens(
    estimator: str, pairs: list[tuple[float, float]], value_clamp: Clamp, log_ratio_clamp: Clamp
) -> None:
    log_probs, ref_log_probs = tensors(pairs)
    estimates = approx_kl(
        log_probs,
        ref_log_probs,
        estimator=estimator,
        value_clamp=value_clamp,
        log_ratio_clamp=log_ratio_clamp,
    )
    expected = references.approx_kl(
        log_probs.tolist(),
        ref_log_probs.tolist(),
        estimator=estimator,
        value_clamp=value_clamp,
        log_ratio_clamp=log_ratio_clamp,
    )
    assert estimates.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(pairs=PAIRS, value_clamp=CLAMPS, log_ratio_clamp=LOG_RATIO_CLAMPS)
def test_float32_trainers_lie_within_the_bound(
    estimator: str, pairs: list[tuple[float, float]], value_clamp: Clamp, log_ratio_clamp: Clamp
) -> None:
    inputs = tensors(pairs)
    exact, bound = (
        kernel(
            *inputs, estimator=estimator, value_clamp=value_clamp, log_ratio_clamp=log_ratio_clamp
        )
        for kernel in (approx_kl, approx_kl_error)
    )
    d = inputs[0].float() - inputs[1].float()
    if log_ratio_clamp is not None:
        d = d.clamp(*log_ratio_clamp)
    for evaluate in IN_FLOAT32[estimator]:
        trained = evaluate(d)
        if value_clamp is not None:
            trained = trained.clamp(*value_clamp)
        assert ((trained.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(pairs=st.lists(st.tuples(float32s(-3.0, 0.0), float32s(-3.0, 0.0)), max_size=20))
def test_the_bound_of_ordinary_tokens_is_small(
    estimator: str, pairs: list[tuple[float, float]]
) -> None:
    assert (approx_kl_error(*tensors(pairs), estimator=estimator) < 3e-5).all()


def test_golden_estimates() -> None:
    """G08."""
    log_probs = torch.tensor([-1.0, -0.5, -2.0, -0.1])
    ref_log_probs = torch.tensor([-1.2, -0.4, -4.5, -0.1])
    golden = {
        "k1": [0.2, -0.1, 2.5, 0.0],
        "k2": [0.02, 0.005, 3.125, 0.0],
        "k3": [0.0187307596, 0.00517097116, 1.58208501, 0.0],
    }
    for estimator, expected in golden.items():
        narrow = approx_kl(log_probs, ref_log_probs, estimator=estimator)
        assert narrow.tolist() == pytest.approx(expected, rel=5e-7)
        exact = approx_kl(log_probs.double(), ref_log_probs.double(), estimator=estimator)
        bound = approx_kl_error(log_probs, ref_log_probs, estimator=estimator)
        assert ((narrow - exact).abs() <= bound).all()


def test_golden_clamps() -> None:
    """G08: k3 without and with the clamp of low_var_kl, and a clamped k1."""
    log_probs, ref_log_probs = torch.tensor([-6.0]), torch.tensor([-0.5])
    assert approx_kl(log_probs, ref_log_probs).item() == pytest.approx(238.191925, rel=1e-6)
    assert approx_kl(log_probs, ref_log_probs, value_clamp=(-10.0, 10.0)).item() == 10.0
    far = torch.tensor([-26.0])
    assert approx_kl(far, ref_log_probs, estimator="k1").item() == -25.5
    clamped = approx_kl(far, ref_log_probs, estimator="k1", value_clamp=(-10.0, 10.0))
    assert clamped.item() == -10.0


def test_equal_log_probs_and_clamped_estimates_are_exact() -> None:
    log_probs, ref_log_probs = tensors([(-0.3, -0.3), (-26.0, -0.5), (-2000.0, -0.5)])
    bound = approx_kl_error(log_probs, ref_log_probs, value_clamp=(-10.0, 10.0))
    assert bound.tolist() == [0.0, 0.0, 0.0]
    assert approx_kl(log_probs, ref_log_probs, value_clamp=(-10.0, 10.0)).tolist()[1:] == [10, 10]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_an_undefined_token_stays_so_and_has_no_bound(estimator: str, bad: float) -> None:
    log_probs = torch.tensor([bad, -1.0])
    ref_log_probs = torch.tensor([-1.0, -1.0])
    estimates = approx_kl(log_probs, ref_log_probs, estimator=estimator)
    assert estimates.isfinite().tolist() == [False, True]
    bound = approx_kl_error(log_probs, ref_log_probs, estimator=estimator)
    assert bound.isnan().tolist() == [True, False]


def test_an_overflow_of_float32_alone_is_outside_the_bound() -> None:
    log_probs, ref_log_probs = tensors([(-100.0, 0.0)])
    exact = approx_kl(log_probs, ref_log_probs)
    bound = approx_kl_error(log_probs, ref_log_probs)
    assert exact.isfinite().all()
    assert not ((torch.tensor([math.inf]) - exact).abs() <= bound).any()


def test_the_dtype_is_kept_and_inputs_are_not_changed() -> None:
    log_probs, ref_log_probs = torch.tensor([-1.0]), torch.tensor([-2.0])
    for estimator in ESTIMATORS:
        estimates = approx_kl(log_probs, ref_log_probs, estimator=estimator)
        assert estimates.dtype == torch.float32
        estimates.zero_()
    assert log_probs.tolist() == [-1.0]
    assert ref_log_probs.tolist() == [-2.0]


@pytest.mark.parametrize("kernel", [approx_kl, approx_kl_error])
def test_bad_arguments_are_refused(kernel: Callable[..., Tensor]) -> None:
    with pytest.raises(StageError, match="no estimator 'low_var_kl', expected one of k1, k2, k3"):
        kernel(torch.ones(1), torch.ones(1), estimator="low_var_kl")
    with pytest.raises(StageError, match="ref_log_probs has 2 along N, expected 1"):
        kernel(torch.ones(1), torch.ones(2))
