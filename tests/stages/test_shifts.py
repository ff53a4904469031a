"""Shifts, permutations and one-sided columns on a part of the samples: found, and only then."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajreplay import Settings
from trajreplay.stages.contract_checks.columns import Columns
from trajreplay.stages.contract_checks.pairs import far_apart

SAMPLER, TRAINER = "rollout_log_probs", "old_log_probs"
Rows = list[np.ndarray]
NOISES = st.sampled_from([0.0, 0.02, 0.1])


def _drawn(seed: int, lengths: Sequence[int], noise: float) -> tuple[Rows, Rows]:
    """Log-probs of sampled tokens by an engine with noise, and by the trainer, of each sample."""
    numbers = np.random.default_rng(seed)
    logits = 3.0 * numbers.standard_normal((sum(lengths), 50))
    noisy = logits + noise * numbers.standard_normal(logits.shape)
    tokens = (noisy + numbers.gumbel(size=logits.shape)).argmax(1)
    cuts = np.cumsum(lengths)[:-1]
    first, second = (
        one[np.arange(len(tokens)), tokens] - np.log(np.exp(one).sum(1)) for one in (noisy, logits)
    )
    return np.split(np.minimum(first, 0.0), cuts), np.split(second, cuts)


def _found(
    sampler: Rows, trainer: Rows, ranks: Sequence[int], mask: Rows | None = None
) -> dict[str, str]:
    lengths = [len(one) for one in trainer]
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    mask = [np.ones(one) for one in lengths] if mask is None else mask

    def lists(rows: Rows, dtype: pa.DataType) -> pa.Array:
        values = pa.array(np.concatenate(rows)).cast(dtype, safe=False)
        return pa.ListArray.from_arrays(offsets, values)

    table = pa.table(
        {
            "sample_id": [f"s-{row}" for row in range(len(lengths))],
            "rank": pa.array(ranks, pa.int32()),
            "loss_mask": lists(mask, pa.int8()),
            SAMPLER: lists(sampler, pa.float32()),
            TRAINER: lists(trainer, pa.float32()),
        }
    )
    columns = Columns(table, Settings(), {}, 0)
    return {one.check: one.message for one in far_apart(columns, SAMPLER, TRAINER)}


@given(
    seed=st.integers(0, 2**20),
    noise=NOISES,
    late=st.sets(st.integers(0, 15), min_size=1),
    by=st.sampled_from([-4, -2, -1, 1, 2, 3]),
    length=st.integers(48, 80),
)
def test_samples_that_are_late_are_counted_whatever_the_others_are(
    seed: int, noise: float, late: set[int], by: int, length: int
) -> None:
    sampler, trainer = _drawn(seed, [length] * 16, noise)
    for row in late:
        sampler[row] = np.roll(sampler[row], by)
    (found,) = _found(sampler, trainer, [row // 4 for row in range(16)]).items()
    assert found[0] == "log-prob.shifted"
    if len(late) < 16:
        assert f" in {len(late)} of 16 samples" in found[1]
        of_one = {row // 4 for row in late}
        assert (f"all of rank {min(of_one)}:" in found[1]) == (len(of_one) == 1)
    assert f"{('one', 'two', 'three', 'four')[abs(by) - 1]} token" in found[1]


@given(seed=st.integers(0, 2**20), noise=NOISES, lengths=st.lists(st.integers(5, 20), min_size=12))
def test_a_rank_of_short_samples_is_late_as_a_whole(
    seed: int, noise: float, lengths: list[int]
) -> None:
    sampler, trainer = _drawn(seed, lengths, noise)
    ranks = [int(row >= len(lengths) - 8) for row in range(len(lengths))]
    sampler = [np.roll(one, 1) if rank else one for one, rank in zip(sampler, ranks, strict=True)]
    (found,) = _found(sampler, trainer, ranks).items()
    assert found[0] == "log-prob.shifted"
    assert "all of rank 1:" in found[1]


@given(
    seed=st.integers(0, 2**20),
    noise=NOISES,
    lengths=st.lists(st.integers(12, 60), min_size=6, max_size=16),
    extra=st.booleans(),
    at_end=st.booleans(),
)
def test_an_entry_more_or_less_for_each_sample_of_a_pack_is_found(
    seed: int, noise: float, lengths: list[int], extra: bool, at_end: bool
) -> None:
    """What the first sample has of it shifts the second one, and what both have the third one."""
    sampler, trainer = _drawn(seed, lengths, noise)
    if extra:
        parts = [np.insert(one, len(one) if at_end else 0, -0.5) for one in sampler]
    else:
        parts = [one[:-1] if at_end else one[1:] for one in sampler]
    packed = np.concatenate([*parts, np.zeros(len(lengths))])[: sum(lengths)]
    recorded = np.split(packed, np.cumsum(lengths)[:-1])
    (found,) = _found(recorded, trainer, [0] * len(lengths)).items()
    assert found[0] == "log-prob.packed-shift"
    assert "with each sample of a pack" in found[1]


@given(
    seed=st.integers(0, 2**20),
    noise=NOISES,
    lengths=st.lists(st.integers(1, 60), min_size=2, max_size=12),
    tools=st.booleans(),
    drift=st.sampled_from([0.0, 0.5, 2.0]),
)
def test_what_is_in_order_or_of_an_older_policy_is_not_late(
    seed: int, noise: float, lengths: list[int], tools: bool, drift: float
) -> None:
    sampler, trainer = _drawn(seed, lengths, noise + drift)
    numbers = np.random.default_rng(seed)
    mask = [(numbers.random(one) > 0.3 * tools).astype(np.float64) for one in lengths]
    found = _found(sampler, trainer, [row % 2 for row in range(len(lengths))], mask)
    assert not {*found} & {"log-prob.shifted", "log-prob.packed-shift", "sample.permuted"}
    assert drift or not found


@given(seed=st.integers(0, 2**20), noise=NOISES, share=st.sampled_from([0.02, 0.1, 0.3]))
def test_samples_that_changed_places_are_found_through_masked_tokens(
    seed: int, noise: float, share: float
) -> None:
    """A turn of a tool in any sample drops its tokens, and no sample."""
    sampler, trainer = _drawn(seed, [64] * 16, noise)
    numbers = np.random.default_rng(seed)
    mask = [(numbers.random(64) > share).astype(np.float64) for _ in range(16)]
    assert [*_found(sampler[2:] + sampler[:2], trainer, [0] * 16, mask)] == ["sample.permuted"]


@pytest.mark.parametrize("ranks", [1, 4])
@given(seed=st.integers(0, 2**20), noise=NOISES, wrong=st.integers(0, 3))
def test_a_rank_at_another_temperature_is_named(
    seed: int, noise: float, wrong: int, ranks: int
) -> None:
    sampler, trainer = _drawn(seed, [64] * 16, noise)
    spoilt = [ranks == 1 or row // 4 == wrong for row in range(16)]
    sampler = [0.6 * one if own else one for own, one in zip(spoilt, sampler, strict=True)]
    found = _found(sampler, trainer, [row // 4 for row in range(16)])
    assert [*found] == ["log-prob.temperature"]
    named = found["log-prob.temperature"].startswith(f"on rank {wrong}, ")
    assert named == (ranks == 4)
