"""Context-parallel shards of sequences that were padded to a batch's length, as in slime's bshd."""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.cohorts import ALL_COLUMNS, capture
from tests.helpers.composed import ComposedTrainer
from tests.helpers.scenes import WAY, the_cohort, the_stage
from tests.helpers.trainer import Sample
from tests.stages.test_shards import (
    SETTINGS,
    _facts,
    _held,
    _samples,
    _shards,
    _share,
)
from trajreplay import CaptureError, Lake, LayoutSettings, ParallelCoordinates
from trajreplay.schema.settings import Settings
from trajreplay.stages import CohortReport
from trajreplay.stages.capability import ability

PADDED = LayoutSettings("zigzag", context_padding="batch")
LAYOUTS = [
    PADDED,
    LayoutSettings("zigzag", 16, context_padding="batch"),
    LayoutSettings("contiguous", context_padding="batch"),
]
LENGTHS = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 40)), min_size=2, max_size=4
).filter(lambda rows: len(rows) % 2 == 0)
Lengths = list[tuple[int, int]]


def _padded(samples: Sequence[Sample], multiple: int, parts: int) -> None:
    """Pad to the longest sequence of a batch, of which the samples are so many."""
    step = -(-len(samples) // parts)
    for start in range(0, len(samples), step):
        batch = samples[start : start + step]
        longest = max(one.prompt_length + one.length for one in batch)
        for one in batch:
            one.padded_length = -(-longest // multiple) * multiple


def _record(
    lake: Lake,
    shares: dict[int, list[Sample]],
    layout: LayoutSettings,
    size: int,
    change: Callable[[int, Sample], None] = lambda rank, sample: None,
) -> None:
    """Data-parallel ranks of `size` context-parallel ranks each."""
    settings = replace(SETTINGS, layout=layout)
    trainer = ComposedTrainer(settings, shares)
    trainer.score()
    trainer.estimate()
    samples, expected, places = {}, {}, {}
    first = 0
    for data, own in shares.items():
        for context in range(size):
            rank = data * size + context
            samples[rank] = _shards(own, layout, context, size)
            for one in samples[rank]:
                change(rank, one)
            held: list[list[int]] = [[] for _ in trainer.samples]
            held[first : first + len(own)] = _held(own, layout, context, size)
            expected[rank] = _share(trainer, held)
            places[rank] = ParallelCoordinates(
                data_rank=data, data_size=len(shares), context_rank=context, context_size=size
            )
        first += len(own)
    capture(
        lake,
        samples,
        WAY,
        step_id=0,
        columns=ALL_COLUMNS,
        settings=settings,
        expected=expected,
        parallel=places,
        cohort_size=first,
    )


def _ranks(
    lengths: list[Lengths], seed: int, multiples: list[int], parts: int
) -> dict[int, list[Sample]]:
    flat = _samples([pair for one in lengths for pair in one], seed)
    shares, first = {}, 0
    for rank, one in enumerate(lengths):
        shares[rank] = flat[first : first + len(one)]
        first += len(one)
        _padded(shares[rank], multiples[rank], parts)
    return shares


def _replayed(
    lengths: list[Lengths],
    seed: int,
    multiples: list[int],
    parts: int,
    way: tuple[LayoutSettings, int],
) -> CohortReport:
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake.create(Path(folder) / "lake")
        _record(lake, _ranks(lengths, seed, multiples, parts), *way)
        assert lake.validate().ok
        return the_cohort(lake.replay())


@given(
    st.tuples(LENGTHS, LENGTHS),
    st.sampled_from([2, 4, 8]),
    st.sampled_from(LAYOUTS),
    st.lists(st.sampled_from([1, 8, 12, 128]), min_size=2, max_size=2),
    st.sampled_from([1, 2]),
    st.integers(0, 99),
)
def test_ranks_and_micro_batches_padded_to_lengths_of_their_own_replay_as_whole_ones(
    lengths: tuple[Lengths, Lengths],
    size: int,
    layout: LayoutSettings,
    multiples: list[int],
    parts: int,
    seed: int,
) -> None:
    whole, cut = (
        _replayed([*lengths], seed, multiples, parts, (layout, ranks)) for ranks in (1, size)
    )
    assert _facts(cut) == _facts(whole)
    assert cut.verdict == whole.verdict
    assert cut.verdict in ("pass", "precision")


EXAMPLE: list[Lengths] = [[(3, 9), (5, 17)], [(2, 6), (9, 30)]]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_wrong_token_is_found_at_its_place(lake: Lake, layout: LayoutSettings) -> None:
    shares = _ranks(EXAMPLE, 0, [1, 8], 1)
    place = next(t for t, m in enumerate(shares[1][0].mask) if m)
    held = [_held(shares[1], layout, rank, 2)[0] for rank in (0, 1)]
    context = next(rank for rank, mine in enumerate(held) if place in mine)

    def change(rank: int, one: Sample) -> None:
        if rank == 2 + context and one.sample_id == "s-2":
            one.columns["kl"][held[context].index(place)] += 0.5

    _record(lake, shares, layout, 2, change)
    found = the_stage(the_cohort(lake.replay()), "advantage.kl")
    assert [(one.sample_id, one.token) for one in found.divergences] == [("s-2", place)]


def test_a_length_that_is_needed_and_missing_is_refused_at_capture(lake: Lake) -> None:
    shares = _ranks(EXAMPLE, 0, [1, 8], 1)

    def change(rank: int, one: Sample) -> None:
        if one.sample_id == "s-3":
            one.padded_length = None

    with pytest.raises(CaptureError, match="row 1 has no padded_length"):
        _record(lake, shares, PADDED, 2, change)


def test_a_length_below_its_sequence_is_refused_at_capture(lake: Lake) -> None:
    shares = _ranks(EXAMPLE, 0, [1, 8], 1)
    shares[0][1].padded_length = 21
    with pytest.raises(CaptureError, match="sample 's-1' is 21, expected at least its total_len"):
        _record(lake, shares, PADDED, 2)


def test_a_length_that_ranks_of_a_group_do_not_agree_on_is_never_a_pass(lake: Lake) -> None:
    """The other rank cuts elsewhere: tokens are held twice or by none, or the lengths differ."""
    shares = _ranks(EXAMPLE, 0, [1, 8], 1)
    settings, samples = replace(SETTINGS, layout=PADDED), shares[1]
    trainer = ComposedTrainer(settings, {0: samples})
    trainer.score()
    trainer.estimate()
    own = {0: _shards(samples, PADDED, 0, 2)}
    for one in samples:
        one.padded_length = 64
    own[1] = _shards(samples, PADDED, 1, 2)
    capture(
        lake,
        own,
        WAY,
        step_id=0,
        columns=ALL_COLUMNS,
        settings=settings,
        parallel={rank: ParallelCoordinates(context_rank=rank, context_size=2) for rank in (0, 1)},
    )
    cohort = the_cohort(lake.replay())
    assert cohort.verdict == "refused"
    assert "the shards do not tile the response" in cohort.refusal


@pytest.mark.parametrize(
    ("context", "columns", "reason"),
    [
        ("zigzag", (), "'batch', and padded_length was not captured"),
        ("all-gather", ("padded_length",), "which cuts no sequence by itself"),
    ],
)
def test_padding_that_cannot_be_told_is_refused_by_name(
    context: str, columns: tuple[str, ...], reason: str
) -> None:
    settings = Settings(layout=LayoutSettings(context, context_padding="batch"))
    for stage in ("sample", "loss.policy"):
        found = ability(stage, settings, ParallelCoordinates(context_size=2), columns)
        assert (found.capability, reason in found.reason) == ("unsupported", True)
    assert ability("sample", settings, ParallelCoordinates()).capability == "recompute"
