import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import references
from tests.helpers.packed import float32s
from tests.helpers.reference_losses import clamped
from trajreplay.schema import StageError
from trajreplay.stages.kernels.kl import approx_kl
from trajreplay.stages.kernels.kl_loss import LOSS_ESTIMATORS, weighted_kl

Clamp = tuple[float, float] | None
CLAMPS = st.sampled_from([None, (-10.0, 10.0), (-0.5, 0.25)])
LOG_RATIO_CLAMPS = st.sampled_from([None, (-20.0, 20.0)])
LOG_PROBS = float32s(-30.0, 0.0)
TOKENS = st.lists(st.tuples(LOG_PROBS, LOG_PROBS, float32s(0.0, 8.0)), max_size=15)

LP = torch.tensor([-1.0, -0.5, -2.0, -0.1])
REF = torch.tensor([-1.2, -0.4, -4.5, -0.1])
OLD = torch.tensor([-1.1, -0.5, -1.8, -0.2])


@pytest.mark.parametrize("estimator", LOSS_ESTIMATORS)
@given(tokens=TOKENS, value_clamp=CLAMPS, log_ratio_clamp=LOG_RATIO_CLAMPS)
def test_equals_a_loop_over_tokens(
    estimator: str,
    tokens: list[tuple[float, float, float]],
    value_clamp: Clamp,
    log_ratio_clamp: Clamp,
) -> None:
    log_probs, ref_log_probs, weights = torch.tensor(tokens).double().reshape(-1, 3).T
    estimates = references.approx_kl(
        log_probs.tolist(),
        ref_log_probs.tolist(),
        estimator="k1" if estimator == "abs" else estimator,
        log_ratio_clamp=log_ratio_clamp,
    )
    low, high = value_clamp or (-math.inf, math.inf)
    expected = [
        clamped(weight * (abs(one) if estimator == "abs" else one), low, high)
        for weight, one in zip(weights.tolist(), estimates, strict=True)
    ]
    found = weighted_kl(
        log_probs,
        ref_log_probs,
        estimator=estimator,
        weights=weights,
        value_clamp=value_clamp,
        log_ratio_clamp=log_ratio_clamp,
    )
    assert found.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_without_weights_it_is_the_estimate(estimator: str) -> None:
    for clamp in (None, (-0.01, 0.01)):
        found = weighted_kl(LP, REF, estimator=estimator, value_clamp=clamp)
        assert found.equal(approx_kl(LP, REF, estimator=estimator, value_clamp=clamp))


def test_golden_estimates() -> None:
    """G08: bare and weighted by the ratio to the old policy."""
    k3 = weighted_kl(LP, REF)
    expected = [0.0187307596, 0.00517097116, 1.58208501, 0.0]
    assert k3.tolist() == pytest.approx(expected, rel=5e-7)
    weights = (LP - OLD).exp()
    expected = [1.10517097, 1.0, 0.818730712, 1.10517097]
    assert weights.tolist() == pytest.approx(expected, rel=2e-7)
    expected = [0.0207006913, 0.00517097116, 1.29530156, 0.0]
    assert weighted_kl(LP, REF, weights=weights).tolist() == pytest.approx(expected, rel=5e-7)


def test_golden_clamps() -> None:
    """G08: k3 with and without the clamp, and k1."""
    near, far, ref = torch.tensor([-6.0]), torch.tensor([-26.0]), torch.tensor([-0.5])
    assert weighted_kl(near, ref).item() == pytest.approx(238.191925, rel=1e-6)
    assert weighted_kl(near, ref, value_clamp=(-10.0, 10.0)).item() == 10.0
    assert weighted_kl(far, ref, estimator="k1").item() == -25.5
    assert weighted_kl(far, ref, estimator="abs", log_ratio_clamp=(-20.0, 20.0)).item() == 20.0


def test_golden_value_of_the_gradient_trick() -> None:
    """G27: a weight of exp(x - x) leaves the value alone."""
    log_probs, ref_log_probs = torch.tensor([-1.0]), torch.tensor([-1.5])
    for weights in (None, torch.ones(1)):
        found = weighted_kl(log_probs, ref_log_probs, weights=weights)
        assert found.item() == pytest.approx(0.106530666, rel=5e-7)


def test_the_weight_comes_before_the_clamp() -> None:
    weights, clamp = torch.tensor([0.5, 4.0]), (-1.0, 1.0)
    log_probs, ref_log_probs = torch.tensor([-1.0, -1.0]), torch.tensor([-2.5, -1.5])
    found = weighted_kl(
        log_probs, ref_log_probs, estimator="k1", weights=weights, value_clamp=clamp
    )
    assert found.tolist() == [0.75, 1.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_dtype_is_kept_and_inputs_are_not_changed(dtype: torch.dtype) -> None:
    log_probs, ref_log_probs = torch.tensor([-1.0], dtype=dtype), torch.tensor([-2.0], dtype=dtype)
    for estimator in LOSS_ESTIMATORS:
        found = weighted_kl(log_probs, ref_log_probs, estimator=estimator, weights=-log_probs)
        assert found.dtype == dtype
        found.zero_()
    assert [log_probs.item(), ref_log_probs.item()] == [-1.0, -2.0]


def test_bad_arguments_are_refused() -> None:
    one = torch.ones(1)
    with pytest.raises(StageError, match="no estimator 'low_var_kl', expected one of k1, k2"):
        weighted_kl(one, one, estimator="low_var_kl")
    with pytest.raises(StageError, match="ref_log_probs has 2 along N, expected 1"):
        weighted_kl(one, torch.ones(2))
    with pytest.raises(StageError, match="weights has 2 along N, expected 1"):
        weighted_kl(one, one, weights=torch.ones(2))
