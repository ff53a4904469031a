import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trajreplay.schema import StageError
from trajreplay.stages.kernels import UNIT_ROUNDOFF, accumulation_factor, half_ulp
from trajreplay.stages.kernels.precision import exp_error, finite_or_nan, float32_error_of

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
U = 2.0**-24


@pytest.mark.parametrize("dtype", DTYPES)
@given(value=st.floats(-6e4, 6e4) | st.floats(-1e-4, 1e-4) | st.floats(-1e-37, 1e-37))
def test_storing_a_value_changes_it_by_half_an_ulp_at_most(dtype: str, value: float) -> None:
    exact = torch.tensor([value], dtype=torch.float64)
    stored = exact.to(DTYPES[dtype]).double()
    assert (stored - exact).abs() <= half_ulp(exact, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [1.0, 1.5, 3.0, 1e-3, 2.0**-14, 6e-5, 5e-6])
def test_half_an_ulp_is_half_the_gap_to_the_next_number(dtype: str, value: float) -> None:
    stored = torch.tensor([value], dtype=torch.float64).to(DTYPES[dtype])
    following = torch.nextafter(stored, torch.full_like(stored, math.inf))
    gap = following.double() - stored.double()
    assert half_ulp(stored, dtype).tolist() == (gap / 2.0).tolist()


def test_half_an_ulp_of_float64_is_half_its_spacing() -> None:
    values = [1.0, 3.0, 1e-300, 1e300, 1.7e308]
    expected = (np.spacing(np.array(values)) / 2.0).tolist()
    assert half_ulp(torch.tensor(values, dtype=torch.float64), "float64").tolist() == expected


def test_half_an_ulp_stops_falling_below_the_smallest_normal_number() -> None:
    below = torch.tensor([0.0, 2.0**-149, 2.0**-127, 2.0**-126], dtype=torch.float64)
    assert half_ulp(below, "float32").tolist() == [2.0**-150] * 4
    assert half_ulp(torch.tensor([0.0, 2.0**-14]), "float16").tolist() == [2.0**-25] * 2


def test_half_an_ulp_of_no_number_is_no_number() -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf])
    assert half_ulp(values, "bfloat16").isnan().all()


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(StageError, match="no dtype 'int8', expected one of float64"):
        half_ulp(torch.ones(1), "int8")


def test_roundoffs_are_half_the_machine_epsilons() -> None:
    for name, roundoff in UNIT_ROUNDOFF.items():
        assert roundoff == torch.finfo(getattr(torch, name)).eps / 2.0


def test_few_roundings_are_bounded_for_any_order_and_many_by_the_root() -> None:
    few, many = (accumulation_factor(torch.tensor([float(k)])).item() for k in (100, 10_000))
    assert 100 * U <= few <= 100.01 * U
    assert 1200 * U <= many <= 1200.1 * U
    assert accumulation_factor(torch.tensor([-1.0, 0.0])).tolist() == [0.0, 0.0]


@given(st.lists(st.floats(-90.0, 85.0, width=32), min_size=1, max_size=50))
def test_a_float32_exponential_lies_within_its_bound(exponents: list[float]) -> None:
    x = torch.tensor(exponents, dtype=torch.float64)
    bound = exp_error(x, torch.zeros_like(x))
    for evaluated in (x.float().exp().numpy(), np.exp(x.numpy().astype(np.float32))):
        difference = np.abs(evaluated.astype(np.float64) - x.exp().numpy())
        assert (difference <= bound.numpy()).all()


def test_the_exponential_of_zero_is_exact() -> None:
    zero = torch.zeros(1, dtype=torch.float64)
    assert exp_error(zero, zero).item() == 0.0


def test_a_constant_loses_what_float32_cannot_hold() -> None:
    assert float32_error_of(-10.0) == 0.0
    assert float32_error_of(0.2) == abs(float(np.float32(0.2)) - 0.2)


def test_an_infinite_bound_allows_nothing() -> None:
    bound = finite_or_nan(torch.tensor([1.0, math.inf, math.nan]))
    assert (torch.tensor([0.5, math.inf, 0.0]) <= bound).tolist() == [True, False, False]
