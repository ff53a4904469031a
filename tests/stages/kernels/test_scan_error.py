import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trajreplay.stages.kernels.scan_error import ScanTerms, decay_error, scan_error

BLOCK = 128


def _in_float32(terms: torch.Tensor, decay: float, block: int) -> list[float]:
    """The recurrence of one sample in float32: token by token, or in blocks put together."""
    xs, a = terms.numpy().astype(np.float32), np.float32(decay)
    result, carried = np.zeros(len(xs), np.float32), np.float32(0.0)
    for stop in range(len(xs), 0, -block):
        start, state, factor = max(stop - block, 0), np.float32(0.0), np.float32(1.0)
        for t in reversed(range(start, stop)):
            state, factor = xs[t] + a * state, factor * a
            result[t] = state + factor * carried
        carried = result[start]
    return [float(one) for one in result]


@pytest.mark.parametrize("block", [1, BLOCK, 10**6])
@given(
    st.integers(0, 2**32),
    st.lists(st.integers(1, 600), min_size=1, max_size=3),
    st.sampled_from([0.0, 0.5, 0.95, 0.999, 1.0]),
    st.sampled_from([0.0, 0.5, 30.0]),
)
def test_float32_lies_within_the_bound_and_the_bound_is_no_licence(
    block: int, seed: int, lengths: list[int], decay: float, mean: float
) -> None:
    count = sum(lengths)
    numbers = torch.Generator().manual_seed(seed)
    terms = (torch.randn(count, generator=numbers) + mean).double()
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    rates = torch.full((count,), decay, dtype=torch.float64)
    zeros = torch.zeros_like(rates)
    found = scan_error(ScanTerms(terms, zeros, zeros), rates, decay_error(rates), offsets)
    trained = [
        one for part in torch.split(terms, lengths) for one in _in_float32(part, decay, block)
    ]
    error = (torch.tensor(trained, dtype=torch.float64) - found.value).abs()
    assert bool((error <= found.error).all())
    assert float(found.error.max()) <= 1e-4 * float(found.value.abs().max())
