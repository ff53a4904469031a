"""Every kernel is held against a loop on drawn inputs, and computes in every dtype."""

import ast
import inspect
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers import reference_losses
from tests.helpers.packed import float32s
from tests.stages.kernels.test_advantage_devices import every_kernel
from tests.stages.kernels.test_loss_invariance import drawn, over_samples, over_sets, over_tokens
from trajreplay.stages import kernels
from trajreplay.stages.kernels import dppo_gate, length_adaptive_lambda
from trajreplay.stages.kernels.dppo import MEASURES, RULES

HERE = Path(__file__).parent
# What holds the inputs of kernels, or is a part of none: their own tests say what they do.
NO_KERNELS = {"accumulation_factor", "check_segments", "check_shapes", "half_ulp"}
NARROW = (torch.float16, torch.bfloat16, torch.float32)
LOG_PROBS = float32s(-30.0, 0.0) | float32s(-0.5, 0.0)


def names() -> set[str]:
    """The functions that the package of the kernels gives away."""
    public = {name: getattr(kernels, name) for name in kernels.__all__}
    return {name for name, one in public.items() if inspect.isfunction(one)} - NO_KERNELS


def used(function: ast.FunctionDef, functions: dict[str, ast.FunctionDef]) -> set[str]:
    """The names that a function of a module uses, by itself or by others of the module."""
    found: set[str] = set()
    left = [function]
    while left:
        inside = {one.id for one in ast.walk(left.pop()) if isinstance(one, ast.Name)}
        left += [functions[name] for name in sorted(inside - found) if name in functions]
        found |= inside
    return found


def drawn_for() -> set[str]:
    """The names that tests of this folder use whose inputs hypothesis draws."""
    found: set[str] = set()
    for path in sorted(HERE.glob("test_*.py")):
        if path.name in ("test_loss_invariance.py", "test_advantage_devices.py"):
            continue  # what is said there of all of them is no comparison with a loop
        tree = ast.parse(path.read_text())
        functions = {one.name: one for one in tree.body if isinstance(one, ast.FunctionDef)}
        for one in functions.values():
            given_to = [ast.unparse(decorator) for decorator in one.decorator_list]
            if one.name.startswith("test") and any("given(" in text for text in given_to):
                found |= used(one, functions)
                parameters = [text for text in given_to if text.startswith("pytest.mark.param")]
                found |= {
                    name.id
                    for text in parameters
                    for name in ast.walk(ast.parse(text))
                    if isinstance(name, ast.Name)
                }
    return found


def test_no_kernel_is_without_drawn_inputs() -> None:
    assert names() - drawn_for() == set()


@pytest.mark.parametrize("measure", MEASURES)
@pytest.mark.parametrize("rule", RULES)
@given(
    tokens=st.lists(st.tuples(LOG_PROBS, LOG_PROBS, st.sampled_from([0.0, 1.0, -1.0]))),
    low=st.sampled_from([0.0, 0.05, 0.2]),
    high=st.sampled_from([0.0, 0.1, 0.3]),
)
def test_the_gate_of_dppo_equals_a_loop(
    rule: str, measure: str, tokens: list[tuple[float, float, float]], low: float, high: float
) -> None:
    columns = torch.tensor(tokens, dtype=torch.float64).reshape(-1, 3).T
    found = dppo_gate(*columns, low=low, high=high, rule=rule, measure=measure)
    expected = [
        reference_losses.dppo_gated(*one, low=low, high=high, rule=rule, measure=measure)
        for one in tokens
    ]
    assert found.tolist() == expected


@given(st.lists(st.integers(0, 10_000)), st.sampled_from([1e-3, 0.05, 1.0, 7.0]))
def test_the_lambda_of_a_length_equals_a_loop(lengths: list[int], alpha: float) -> None:
    found = length_adaptive_lambda(torch.tensor(lengths, dtype=torch.int64), alpha=alpha)
    expected = [1.0 - 1.0 / max(alpha * one, 1.0) for one in lengths]
    assert found.tolist() == pytest.approx(expected, rel=1e-12, abs=1e-15)


def closely(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    """Assert that a result in one dtype is that of float64 but for a few roundings."""
    if expected.dtype == torch.bool or found.dtype == torch.bool:
        assert found.equal(expected)
        return
    few = 64 * torch.finfo(dtype).eps
    size = float(expected[expected.isfinite()].abs().max()) if expected.numel() else 0.0
    torch.testing.assert_close(
        found.double(), expected.double(), rtol=few, atol=few * max(size, 1.0), equal_nan=True
    )


@pytest.mark.parametrize("lengths", [[3, 0, 9, 8], [1, 1], [0], [12]])
@pytest.mark.parametrize("dtype", NARROW)
def test_kernels_of_losses_compute_in_every_dtype(dtype: torch.dtype, lengths: list[int]) -> None:
    """Of numbers that each dtype holds, and of ratios that lie on no bound."""
    batch = drawn(1, lengths)
    batch = replace(batch, columns=(batch.columns * 8.0).round() / 8.0)
    narrow = replace(batch, columns=batch.columns.to(dtype))
    for all_of in (over_tokens, over_samples, over_sets):
        for found, expected in zip(all_of(narrow), all_of(batch), strict=True):
            closely(found, expected, dtype)


@pytest.mark.parametrize("lengths", [[3, 0, 9, 8], [5, 5, 5, 5]])
@pytest.mark.parametrize("dtype", NARROW)
def test_kernels_of_advantages_compute_in_every_dtype(
    dtype: torch.dtype, lengths: list[int]
) -> None:
    expected = every_kernel("cpu", torch.float64, lengths, rounded=dtype)
    for one, other in zip(every_kernel("cpu", dtype, lengths), expected, strict=True):
        closely(one, other, dtype)
