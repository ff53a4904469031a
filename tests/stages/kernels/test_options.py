import math

import pytest
import torch

from trajreplay.schema import StageError
from trajreplay.stages.kernels.options import (
    check_ddof,
    check_option,
    check_positive,
    check_range,
    in_dtype_of,
)


def test_a_name_that_is_no_option_is_refused_with_those_that_are() -> None:
    check_option("k", "form", "a", ("a", "b"))
    with pytest.raises(StageError, match="k: no form 'x', expected one of a, b"):
        check_option("k", "form", "x", ("a", "b"))


def test_a_range_rises_and_has_an_end() -> None:
    for low, high in ((0.0, 0.0), (None, 1.0), (-math.inf, None)):
        check_range("k", "the range", low, high)
    with pytest.raises(StageError, match="k: the range has no end"):
        check_range("k", "the range", None, None)
    with pytest.raises(StageError, match=r"k: the range runs from 1\.0 to 0\.0"):
        check_range("k", "the range", 1.0, 0.0)
    with pytest.raises(StageError, match=r"k: the range runs from 0\.0 to nan"):
        check_range("k", "the range", 0.0, math.nan)


@pytest.mark.parametrize("found", [0.0, -1.0, math.nan])
def test_a_divisor_is_more_than_0(found: float) -> None:
    check_positive("k", "width", 0.5)
    with pytest.raises(StageError, match=f"k: width is {found}, expected more than 0"):
        check_positive("k", "width", found)


def test_a_variance_divides_by_n_or_one_less() -> None:
    check_ddof("k", 0)
    with pytest.raises(StageError, match="k: ddof is -1, expected 0 or 1"):
        check_ddof("k", -1)


def test_results_take_the_dtype_of_floating_inputs_only() -> None:
    wide = torch.ones(1, dtype=torch.float64)
    assert in_dtype_of(torch.ones(1, dtype=torch.bfloat16), wide).dtype == torch.bfloat16
    assert in_dtype_of(torch.ones(1, dtype=torch.int64), wide).dtype == torch.float64
