import math
from random import Random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers import reference_advantages as references
from tests.helpers.packed import Packed, float32s, packed, pools
from trajreplay.schema import StageError
from trajreplay.stages.kernels.scans import linear_scan, per_token, sample_of

ROWS = packed(max_samples=6, max_tokens=12)
VALUES = pools(float32s(-10.0, 10.0), size=16)
DECAYS = pools(float32s(-1.0, 1.0), size=16)


@given(ROWS, VALUES, DECAYS, VALUES)
def test_equals_a_loop_over_tokens(
    rows: Packed, pool: list[float], rates: list[float], starts: list[float]
) -> None:
    terms, decay = rows.tensor(pool), rows.tensor(rates)
    initial = [starts[sample % len(starts)] for sample in range(len(rows.lengths))]
    scanned = linear_scan(
        terms, decay, rows.offsets, initial=torch.tensor(initial, dtype=torch.float64)
    )
    expected = references.linear_scan(
        references.rows_of(terms.tolist(), rows.lengths),
        references.rows_of(decay.tolist(), rows.lengths),
        initial,
    )
    assert scanned.tolist() == pytest.approx(references.flat(expected), rel=1e-12, abs=1e-12)


@given(ROWS, VALUES, VALUES, st.booleans())
def test_without_decay_it_has_the_bits_of_one_step_after_another(
    rows: Packed, pool: list[float], starts: list[float], reverse: bool
) -> None:
    terms = rows.tensor(pool)
    initial = [starts[sample % len(starts)] for sample in range(len(rows.lengths))]
    scanned = linear_scan(
        terms,
        torch.ones_like(terms),
        rows.offsets,
        initial=torch.tensor(initial, dtype=torch.float64),
        reverse=reverse,
    )
    expected = []
    for row, start in zip(references.rows_of(terms.tolist(), rows.lengths), initial, strict=True):
        state, sums = start, []
        for value in reversed(row) if reverse else row:
            state = value + state
            sums.append(state)
        expected += sums[::-1] if reverse else sums
    assert scanned.tolist() == expected


@given(ROWS, VALUES, DECAYS)
def test_forwards_is_backwards_of_the_mirror_image(
    rows: Packed, pool: list[float], rates: list[float]
) -> None:
    terms, decay = rows.tensor(pool), rows.tensor(rates)
    mirrored = torch.tensor([0, *reversed(rows.lengths)]).cumsum(0)
    forwards = linear_scan(terms, decay, rows.offsets, reverse=False)
    expected = linear_scan(terms.flip(0), decay.flip(0), mirrored).flip(0)
    torch.testing.assert_close(forwards, expected, rtol=1e-12, atol=1e-12)


@given(ROWS, VALUES, st.randoms(use_true_random=False))
def test_order_of_samples_does_not_matter(rows: Packed, pool: list[float], random: Random) -> None:
    terms = references.rows_of(rows.tensor(pool).tolist(), rows.lengths)
    order = random.sample(range(len(terms)), len(terms))
    offsets = torch.tensor([0, *(rows.lengths[one] for one in order)]).cumsum(0)
    moved = torch.tensor(references.flat([terms[one] for one in order]), dtype=torch.float64)
    scanned = linear_scan(moved, torch.full_like(moved, 0.9), offsets)
    expected = linear_scan(rows.tensor(pool), torch.full_like(moved, 0.9), rows.offsets)
    parts = references.rows_of(expected.tolist(), rows.lengths)
    shuffled = references.flat([parts[one] for one in order])
    assert scanned.tolist() == pytest.approx(shuffled, rel=1e-12, abs=1e-12)


def test_an_undefined_token_stays_in_its_sample() -> None:
    terms = torch.tensor([1.0, math.nan, 1.0, 2.0])
    scanned = linear_scan(terms, torch.ones(4), torch.tensor([0, 3, 4]))
    assert scanned.isnan().tolist() == [True, True, False, False]


def test_every_token_knows_its_sample_and_its_value() -> None:
    offsets = torch.tensor([0, 0, 2, 3, 3])
    assert sample_of(offsets).tolist() == [1, 1, 2]
    assert per_token("k", "gamma", 0.5, offsets).tolist() == [0.5] * 3
    assert per_token("k", "gamma", torch.arange(4.0), offsets).tolist() == [1.0, 1.0, 2.0]


def test_inputs_of_different_length_are_refused() -> None:
    offsets = torch.tensor([0, 2])
    with pytest.raises(StageError, match="decay has 3 along N, expected 2 as in terms"):
        linear_scan(torch.ones(2), torch.ones(3), offsets)
    with pytest.raises(StageError, match="initial has 2 along S, expected 1 as in samples"):
        linear_scan(torch.ones(2), torch.ones(2), offsets, initial=torch.ones(2))
    with pytest.raises(StageError, match="offsets do not rise from 0 to 3"):
        linear_scan(torch.ones(3), torch.ones(3), offsets)
    with pytest.raises(StageError, match="gamma has 2 along S, expected 1"):
        per_token("k", "gamma", torch.ones(2), offsets)
