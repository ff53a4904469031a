"""Bounds of float32 errors of scores, whitened tokens and baselines: they hold, and are tight."""

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers import float32_statistics
from trajreplay.stages.kernels import optimal_token_advantages
from trajreplay.stages.kernels.baseline_error import optimal_token_error
from trajreplay.stages.kernels.normalise import EPSILON_PLACES, GROUP_BASELINES
from trajreplay.stages.kernels.normalise_error import normalised
from trajreplay.stages.kernels.rounded import exactly
from trajreplay.stages.kernels.scan_error import ScanTerms
from trajreplay.stages.kernels.whitening import CENTRES, WHITENING_FORMS
from trajreplay.stages.kernels.whitening_error import whitened

# A bound of this share of the largest result, where results have no large condition, is too loose.
LOOSE = 1e-3
DIVISORS = ("none", "std", "std-around-baseline", "leave-one-out-std")
SEEDS = st.integers(0, 2**32)
LEVELS = st.sampled_from([0.0, 0.3, -5.0, 100.0])


def _drawn(seed: int, count: int, level: float, width: float) -> Tensor:
    """Values of float32."""
    numbers = np.random.default_rng(seed)
    found = (level + width * numbers.normal(0.0, 1.0, count)).astype(np.float32)
    return torch.from_numpy(found).double()


def _check(found: Any, trained: list[float], level: float) -> None:
    error = (torch.tensor(trained, dtype=torch.float64) - found.value).abs()
    known = torch.isfinite(found.error)
    assert bool((error <= found.error)[known].all())
    if level == 0.0 and bool(known.all()) and len(error):
        assert float(found.error.max()) <= LOOSE * max(float(found.value.abs().max()), 1.0)


@given(
    SEEDS,
    st.integers(2, 24),
    st.integers(1, 3),
    LEVELS,
    st.fixed_dictionaries(
        {
            "baseline": st.sampled_from(GROUP_BASELINES),
            "divisor": st.sampled_from(DIVISORS),
            "ddof": st.integers(0, 1),
            "epsilon": st.sampled_from([1e-6, 1e-4]),
            "epsilon_place": st.sampled_from(EPSILON_PLACES),
            "lone": st.sampled_from(["zero", "keep"]),
        }
    ),
)
def test_a_score_in_float32_lies_within_its_bound(
    seed: int, count: int, groups: int, level: float, options: dict[str, Any]
) -> None:
    raw = _drawn(seed, count, level, 1.0)
    index = torch.arange(count) % groups
    lengths = torch.arange(count) % 7 + 1
    greedy = _drawn(seed + 1, count, level, 1.0)
    assume(count // groups > 2)  # a spread of two is no spread
    found = normalised(
        exactly(raw), index, lengths=lengths, greedy_rewards=greedy, missing="keep", **options
    )
    trained = float32_statistics.normalise_rewards(
        raw.tolist(),
        index.tolist(),
        lengths=lengths.tolist(),
        greedy_rewards=greedy.tolist(),
        missing="keep",
        **options,
    )
    _check(found, trained, level)


@given(
    SEEDS,
    st.integers(2, 400),
    st.integers(1, 3),
    LEVELS,
    st.booleans(),
    st.sampled_from(CENTRES),
    st.fixed_dictionaries(
        {
            "scale": st.booleans(),
            "form": st.sampled_from(WHITENING_FORMS),
            "ddof": st.integers(0, 1),
            "epsilon": st.sampled_from([1e-8, 1e-5]),
            "short": st.sampled_from(["biased", "keep"]),
        }
    ),
)
def test_a_whitened_token_in_float32_lies_within_its_bound(
    seed: int,
    count: int,
    sets: int,
    level: float,
    one_pass: bool,
    centre: str,
    options: dict[str, Any],
) -> None:
    values = _drawn(seed, count, level, 1.0)
    mask = torch.from_numpy(np.random.default_rng(seed + 1).random(count) < 0.8)
    index, others = torch.arange(count) % sets, torch.arange(count) // 2 % 2
    assume(all(int(mask[index == one].sum()) > 2 for one in range(sets)))
    apart: dict[str, Any] = {} if one_pass else {"centre": centre, "centre_index": others}
    found = whitened(exactly(values), mask, set_index=index, one_pass=one_pass, **apart, **options)
    trained = float32_statistics.whiten(
        values.tolist(),
        mask.tolist(),
        index.tolist(),
        centre_index=index.tolist() if one_pass else others.tolist(),
        centre="mean" if one_pass else centre,
        one_pass=one_pass,
        **options,
    )
    _check(found, trained, level)


def _baseline_in_float32(columns: list[Tensor], mask: Tensor, rows: list[range]) -> list[float]:
    """One group of samples, position by position, in float32."""
    rewards, log_probs, squares = (one.numpy().astype(np.float32) for one in columns)
    one, two = np.float32(1.0), np.float32(2.0)
    returns = np.zeros(len(rewards), np.float32)
    paths = np.zeros(len(rewards), np.float32)
    for row in rows:
        later, path = np.float32(0.0), np.float32(0.0)
        for t in reversed(row):
            later = later + (rewards[t] if mask[t] else np.float32(0.0))
            returns[t] = later
        for t in row:
            if mask[t]:
                path = path + (one - two * np.exp(log_probs[t]) + squares[t])
            paths[t] = path if mask[t] else np.float32(0.0)
    found = np.zeros(len(rewards), np.float32)
    for position in range(max(map(len, rows))):
        there = [row[position] for row in rows if position < len(row)]
        above = below = np.float32(0.0)
        for t in there:
            above, below = above + returns[t] * paths[t], below + paths[t]
        for t in there:
            found[t] = (returns[t] - above / (below + np.float32(1e-8))) if mask[t] else 0.0
    return [float(each) for each in found]


@given(SEEDS, st.lists(st.integers(1, 40), min_size=2, max_size=4), LEVELS)
def test_a_token_baseline_in_float32_lies_within_its_bound(
    seed: int, lengths: list[int], level: float
) -> None:
    count, offsets = sum(lengths), torch.tensor([0, *lengths]).cumsum(0)
    rows = [range(int(a), int(b)) for a, b in pairwise(offsets.tolist())]
    rewards = _drawn(seed, count, level, 1.0)
    log_probs = -_drawn(seed + 1, count, 0.0, 1.0).abs() - 0.125
    squares = _drawn(seed + 2, count, 0.5, 0.05).clamp(0.25, 0.75)
    mask = torch.from_numpy(np.random.default_rng(seed + 3).random(count) < 0.9)
    group, zeros = torch.zeros(len(lengths), dtype=torch.int64), torch.zeros(count).double()
    given_ = (log_probs, squares, mask, group, offsets)
    found = optimal_token_error(ScanTerms(rewards, zeros, zeros), *given_, zero_tail=False)
    exact = optimal_token_advantages(rewards, *given_, zero_tail=False)
    torch.testing.assert_close(found.value, exact, rtol=1e-12, atol=1e-12)
    trained = _baseline_in_float32([rewards, log_probs, squares], mask, rows)
    error = (torch.tensor(trained, dtype=torch.float64) - found.value).abs()
    known = torch.isfinite(found.error)
    assert bool((error <= found.error)[known].all())
    assert known[mask].any() or not mask.any()


@pytest.mark.parametrize("count", [4, 8, 64])
def test_a_constant_group_of_what_adds_up_exactly_has_no_error(count: int) -> None:
    """Halves, of a power of two of members: nothing rounds, and nothing is forgiven."""
    rewards = exactly(torch.full((count,), 0.5))
    found = normalised(rewards, torch.zeros(count, dtype=torch.int64), divisor="std")
    assert found.value.tolist() == [0.0] * count
    assert found.error.tolist() == [0.0] * count
    tenths = exactly(torch.full((count,), math.nextafter(0.3, 1.0)).float())
    rounded = normalised(tenths, torch.zeros(count, dtype=torch.int64), divisor="std")
    assert bool((rounded.error > 0.0).all())
