"""Context parallelism: a sharded capture replays to the numbers of the whole one, or is refused."""

import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.helpers.cohorts import ALL_COLUMNS, ALL_STAGES, Expected, capture
from tests.helpers.composed import ComposedTrainer
from tests.helpers.scenes import WAY, the_cohort, the_stage
from tests.helpers.trainer import Sample
from trajreplay import (
    CaptureError,
    KlSettings,
    Lake,
    LayoutSettings,
    LossSettings,
    ParallelCoordinates,
    RewardSettings,
    Settings,
)
from trajreplay.stages import CohortReport

SETTINGS = Settings(
    reward=RewardSettings(n_samples_per_prompt=2),
    kl=KlSettings(coef=0.1),
    loss=LossSettings(entropy_coef=0.01),
)
SHARDED = tuple(name for name in ALL_COLUMNS if name != "returns")  # which stays whole
LAYOUTS = [
    LayoutSettings("zigzag"),
    LayoutSettings("zigzag", 48),
    LayoutSettings("contiguous"),
    LayoutSettings("contiguous", 16),
    LayoutSettings("all-gather"),
    LayoutSettings("all-gather", 24),
]


def _samples(lengths: list[tuple[int, int]], seed: int = 0) -> list[Sample]:
    """Samples of these prompt and response lengths, two a group, scored and estimated."""
    numbers = np.random.default_rng(seed)
    samples = []
    for row, (prompt, length) in enumerate(lengths):
        mask = [int(one) for one in numbers.random(length) > 0.2]
        one = Sample(f"s-{row}", f"g-{row // 2}", mask, float(numbers.normal()))
        one.prompt_length, one.micro_batch_id = prompt, f"mb-{row // 4}"
        base = numbers.normal(-1.0, 0.5, length)
        for name in ("rollout_log_probs", "old_log_probs", "ref_log_probs", "log_probs"):
            drift = base + numbers.normal(0.0, 0.1, length)
            one.columns[name] = torch.tensor(drift, dtype=torch.float32)
        one.columns["entropy"] = torch.tensor(numbers.random(length), dtype=torch.float32)
        samples.append(one)
    return samples


def _held(samples: list[Sample], layout: LayoutSettings, rank: int, size: int) -> list[list[int]]:
    """The response tokens of each sample that a rank holds: positions laid out one by one."""
    pieces = 2 * size if layout.context == "zigzag" else size
    own = [rank, pieces - 1 - rank] if layout.context == "zigzag" else [rank]
    streams: dict[object, list[tuple[int, int]]] = {}
    for row, one in enumerate(samples):
        stream = one.micro_batch_id if layout.context == "all-gather" else row
        total = one.prompt_length + one.length
        streams.setdefault(stream, []).extend((row, position) for position in range(total))
    held: list[list[int]] = [[] for _ in samples]
    for tokens in streams.values():
        multiple = layout.context_multiple or pieces
        padded = samples[tokens[0][0]].padded_length if layout.context != "all-gather" else None
        chunk = math.ceil((padded or len(tokens)) / multiple) * multiple // pieces
        for piece in own:
            for row, position in tokens[piece * chunk : (piece + 1) * chunk]:
                index = position - (samples[row].prompt_length - 1)
                if 0 <= index < samples[row].length:
                    held[row].append(index)
    return held


def _shards(samples: list[Sample], layout: LayoutSettings, rank: int, size: int) -> list[Sample]:
    """What a rank captures of samples: its own tokens of every column."""
    held = _held(samples, layout, rank, size)
    return [_part(one, mine) for one, mine in zip(samples, held, strict=True)]


def _part(sample: Sample, mine: list[int]) -> Sample:
    part = sample.copy()
    part.columns = {
        name: values[mine] if name in SHARDED else values for name, values in sample.columns.items()
    }
    return part


def _scalars(
    trainer: ComposedTrainer, layout: LayoutSettings, rank: int, size: int
) -> list[Expected]:
    """The rank's own share of every scalar: its tokens, over the tokens of the whole samples."""
    return _share(trainer, _held(trainer.samples, layout, rank, size))


def _share(trainer: ComposedTrainer, held: list[list[int]]) -> list[Expected]:
    """What tokens of each sample add to every scalar."""
    total = dict.fromkeys(("loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl"), 0.0)
    for row, mine in enumerate(held):
        terms = trainer.policy_terms(row)
        for name in total:
            share = sum(trainer.masks[row][t] * terms[name][t] for t in mine)
            total[name] += share / max(sum(trainer.masks[row]), 1.0)
    return [Expected(total, {"scope": "rank", "reduction": "sum"})]


def _write(
    lake: Lake,
    samples: list[Sample],
    layout: LayoutSettings,
    size: int,
    change: Callable[[int, Sample], None] = lambda rank, sample: None,
) -> Settings:
    """One data-parallel rank of `size` context-parallel ranks."""
    settings = replace(SETTINGS, layout=layout)
    trainer = ComposedTrainer(settings, {0: samples})
    trainer.score()
    trainer.estimate()
    shares = {rank: _shards(samples, layout, rank, size) for rank in range(size)}
    for rank, own in shares.items():
        for one in own:
            change(rank, one)
    capture(
        lake,
        shares,
        WAY,
        step_id=0,
        stages=ALL_STAGES,
        columns=ALL_COLUMNS,
        settings=settings,
        expected={rank: _scalars(trainer, layout, rank, size) for rank in range(size)},
        parallel={
            rank: ParallelCoordinates(context_rank=rank, context_size=size) for rank in range(size)
        },
        cohort_size=len(samples),
    )
    return settings


def _facts(cohort: CohortReport) -> list[tuple[Any, ...]]:
    return [
        (one.stage, one.verdict, one.compared if one.stage != "loss.policy" else None)
        for one in cohort.stages
    ]


LENGTHS = st.lists(
    st.tuples(st.integers(1, 30), st.integers(0, 40)), min_size=2, max_size=6
).filter(lambda rows: len(rows) % 2 == 0)


@given(LENGTHS, st.sampled_from([1, 2, 4, 8]), st.sampled_from(LAYOUTS), st.integers(0, 99))
def test_a_sharded_capture_replays_as_the_whole_one(
    lengths: list[tuple[int, int]], size: int, layout: LayoutSettings, seed: int
) -> None:
    reports = []
    for ranks in (1, size):
        with tempfile.TemporaryDirectory() as folder:
            lake = Lake.create(Path(folder) / "lake")
            _write(lake, _samples(lengths, seed), layout, ranks)
            assert lake.validate().ok
            reports.append(the_cohort(lake.replay()))
    whole, sharded = reports
    assert _facts(sharded) == _facts(whole)
    assert sharded.verdict == whole.verdict
    assert sharded.verdict in ("pass", "precision")


EXAMPLE = [(3, 9), (5, 17), (2, 6), (9, 12)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [2, 4])
def test_a_wrong_token_is_found_at_its_place(lake: Lake, layout: LayoutSettings, size: int) -> None:
    samples = _samples(EXAMPLE)
    place = next(t for t, m in enumerate(samples[1].mask) if m)
    held = [_held(samples, layout, rank, size)[1] for rank in range(size)]
    rank = next(rank for rank, mine in enumerate(held) if place in mine)
    local = held[rank].index(place)

    def change(own: int, one: Sample) -> None:
        if own == rank and one.sample_id == "s-1":
            one.columns["kl"][local] += 0.5

    _write(lake, samples, layout, size, change)
    found = the_stage(the_cohort(lake.replay()), "advantage.kl")
    assert [(one.sample_id, one.token) for one in found.divergences] == [("s-1", place)]


def test_ranks_that_hold_whole_responses_are_compared(lake: Lake) -> None:
    layout, samples = LayoutSettings("whole"), _samples(EXAMPLE)
    settings = replace(SETTINGS, layout=layout)
    trainer = ComposedTrainer(settings, {0: samples})
    trainer.score()
    trainer.estimate()
    other = [one.copy() for one in samples]
    other[2].columns["entropy"][1] += 0.25
    capture(
        lake,
        {0: samples, 1: other},
        WAY,
        step_id=0,
        stages=ALL_STAGES,
        columns=ALL_COLUMNS,
        settings=settings,
        expected={rank: trainer.policy_scalars()[0] for rank in (0, 1)},
        parallel={rank: ParallelCoordinates(context_rank=rank, context_size=2) for rank in (0, 1)},
    )
    cohort = the_cohort(lake.replay())
    (finding,) = [one for one in cohort.findings if one.check == "copy"]
    assert "rank 1 holds another entropy than rank 0" in finding.message
    assert cohort.verdict == "diverged"


def test_a_rank_that_is_missing_from_its_group_refuses_the_cohort(lake: Lake) -> None:
    layout, samples = LayoutSettings("zigzag"), _samples(EXAMPLE)
    settings = replace(SETTINGS, layout=layout)
    trainer = ComposedTrainer(settings, {0: samples})
    trainer.score()
    trainer.estimate()
    capture(
        lake,
        {0: _shards(samples, layout, 0, 2)},
        WAY,
        step_id=0,
        settings=settings,
        expected={0: _scalars(trainer, layout, 0, 2)},
        parallel={0: ParallelCoordinates(context_rank=0, context_size=2)},
    )
    cohort = the_cohort(lake.replay())
    assert cohort.verdict == "refused"
    assert "expected each of 0 to 1 once" in cohort.refusal


def test_a_shard_of_another_layout_is_refused_at_capture(lake: Lake) -> None:
    samples = _samples(EXAMPLE)
    with pytest.raises(CaptureError, match="expected response_length = 9"):
        _write(
            lake,
            samples,
            LayoutSettings("zigzag"),
            2,
            lambda rank, one: one.columns.update(
                log_probs=one.columns["log_probs"][:1] if rank else one.columns["log_probs"]
            ),
        )


def _add(field: str, by: float) -> Callable[[Expected], None]:
    def change(one: Expected) -> None:
        one.values = {**one.values, field: one.values[field] + by}

    return change


def _whole(lake: Lake, expected: dict[int, list[Expected]]) -> CohortReport:
    """Two ranks that both hold whole responses."""
    settings, samples = replace(SETTINGS, layout=LayoutSettings("whole")), _samples(EXAMPLE)
    trainer = ComposedTrainer(settings, {0: samples})
    trainer.score()
    trainer.estimate()
    for rank, found in trainer.policy_scalars().items():
        for other in expected:
            expected[other] += [Expected(one.values, one.meaning) for one in found]
        assert rank == 0
    if len(expected) > 1:
        _add("loss", 1.0)(expected[1][0])
    capture(
        lake,
        {0: samples, 1: [one.copy() for one in samples]},
        WAY,
        step_id=0,
        columns=ALL_COLUMNS,
        settings=settings,
        expected=expected,
        parallel={rank: ParallelCoordinates(context_rank=rank, context_size=2) for rank in (0, 1)},
    )
    return the_cohort(lake.replay())


def test_scalars_of_whole_ranks_are_held_against_each_other(lake: Lake) -> None:
    cohort = _whole(lake, {0: [], 1: []})
    assert cohort.first_divergent_stage == "loss.policy"
    (finding,) = [one for one in cohort.findings if one.check == "copy"]
    assert "rank 1 recorded another loss" in finding.message


def test_scalars_may_be_on_any_rank_that_holds_the_whole(lake: Lake) -> None:
    assert _whole(lake, {1: []}).verdict == "pass"


def test_values_of_samples_are_added_up_by_sample(lake: Lake) -> None:
    """Each rank records its own share of every sample, in an order of its own."""
    layout, samples = LayoutSettings("zigzag"), _samples(EXAMPLE)
    settings = replace(SETTINGS, layout=layout)
    trainer = ComposedTrainer(settings, {0: samples})
    trainer.score()
    trainer.estimate()
    shares, expected = {}, {}
    for rank in (0, 1):
        rows = list(range(len(samples)))[:: -1 if rank else 1]
        held = _held(samples, layout, rank, 2)
        shares[rank] = [_part(samples[row], held[row]) for row in rows]
        values: dict[str, list[float]] = {}
        for row in rows:
            for name, terms in trainer.policy_terms(row).items():
                masked = [x for t, x in enumerate(terms) if samples[row].mask[t] and t in held[row]]
                share = sum(masked) / max(sum(samples[row].mask), 1)
                values.setdefault(name, []).append(share)
        expected[rank] = [Expected(values, {"scope": "sample", "reduction": "mean"})]
    capture(
        lake,
        shares,
        WAY,
        step_id=0,
        columns=ALL_COLUMNS,
        settings=settings,
        expected=expected,
        parallel={rank: ParallelCoordinates(context_rank=rank, context_size=2) for rank in (0, 1)},
    )
    cohort = the_cohort(lake.replay())
    assert cohort.verdict in ("pass", "precision"), cohort.to_json()


def test_a_sample_without_a_column_is_missing_on_every_rank(lake: Lake) -> None:
    def change(rank: int, one: Sample) -> None:
        if one.sample_id == "s-2":
            del one.columns["entropy"]

    _write(lake, _samples(EXAMPLE), LayoutSettings("zigzag"), 2, change)
    assert lake.validate().ok
    cohort = the_cohort(lake.replay())
    found = the_stage(cohort, "loss.policy")
    assert (found.verdict, "entropy is missing for 1 of 4" in found.message) == ("refused", True)
    assert the_stage(cohort, "advantage.kl").verdict == "pass"


Cut = list[tuple[int, list[int]]]  # of each micro-batch: its size, and the rank of each shard


@st.composite
def _cuts(draw: st.DrawFn, ranks: int = 4) -> Cut:
    """How three micro-batches are cut, each by itself."""
    sizes = [draw(st.sampled_from([1, 2, 4])) for _ in range(3)]
    return [(size, draw(st.permutations(range(ranks)))[:size]) for size in sizes]


def _write_dynamic(
    lake: Lake,
    samples: list[Sample],
    layout: LayoutSettings,
    cuts: Cut,
    *,
    backwards: bool = False,
    change: Callable[[dict[int, list[Sample]]], None] = lambda shares: None,
    meaning: dict[str, Any] | None = None,
    told: LayoutSettings | None = None,
) -> None:
    """Four ranks, any of which holds any shard, in an order of its own."""
    settings = replace(SETTINGS, layout=layout)
    trainer = ComposedTrainer(settings, {0: samples})
    trainer.score()
    trainer.estimate()
    shares: dict[int, list[Sample]] = {rank: [] for rank in range(4)}
    tokens: dict[int, list[list[int]]] = {rank: [[] for _ in samples] for rank in range(4)}
    for batch, (size, owners) in enumerate(cuts):
        for shard, rank in enumerate(owners):
            held = _held(samples, layout, shard, size)
            for row, one in enumerate(samples):
                if one.micro_batch_id == f"mb-{batch}":
                    part = _part(one, held[row])
                    part.context = (shard, size)
                    shares[rank].append(part)
                    tokens[rank][row] = held[row]
    if backwards and layout.context != "all-gather":  # whose streams have an order
        shares = {rank: own[:: -1 if rank % 2 else 1] for rank, own in shares.items()}
    change(shares)
    expected = {rank: _share(trainer, held) for rank, held in tokens.items()}
    for (scalars,) in expected.values():
        scalars.meaning = meaning or scalars.meaning
    capture(
        lake,
        shares,
        WAY,
        step_id=0,
        stages=ALL_STAGES,
        columns=ALL_COLUMNS,
        settings=settings if told is None else replace(settings, layout=told),
        expected=expected,
        parallel={rank: ParallelCoordinates(data_rank=rank, data_size=4) for rank in range(4)},
        cohort_size=len(samples),
    )


@given(LENGTHS.map(lambda rows: rows * 2), _cuts(), st.sampled_from(LAYOUTS), st.booleans())
def test_shards_of_any_size_on_any_rank_replay_as_whole_samples(
    lengths: list[tuple[int, int]], cuts: Cut, layout: LayoutSettings, backwards: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake.create(Path(folder) / "lake")
        _write_dynamic(lake, _samples(lengths), layout, cuts, backwards=backwards)
        assert lake.validate().ok
        cohort = the_cohort(lake.replay())
    assert cohort.verdict in ("pass", "precision"), cohort.to_json()
    assert the_stage(cohort, "reward.post_process").compared == len(lengths)
    assert the_stage(cohort, "loss.policy").compared == 5  # added up over the ranks


@given(
    LENGTHS.map(lambda rows: rows * 2),
    _cuts(),
    st.sampled_from(LAYOUTS),
    st.integers(0, 999),
    st.sampled_from(["left out", "twice", "of another size"]),
)
def test_shards_that_do_not_tile_are_refused_by_the_name_of_their_sample(
    lengths: list[tuple[int, int]], cuts: Cut, layout: LayoutSettings, pick: int, what: str
) -> None:
    changed: list[Sample] = []

    def change(shares: dict[int, list[Sample]]) -> None:
        parts = [(rank, one) for rank, own in shares.items() for one in own]
        parts = [(rank, one) for rank, one in parts if (one.context[1] or 1) > 1]
        assume(parts)
        rank, one = parts[pick % len(parts)]
        changed.append(one)
        if what == "left out":
            shares[rank].remove(one)
        elif what == "twice":
            shares[(rank + 1) % 4].append(one.copy())
        else:
            one.context = (one.context[0], (one.context[1] or 1) + 4)

    with tempfile.TemporaryDirectory() as folder:
        lake = Lake.create(Path(folder) / "lake")
        try:
            _write_dynamic(lake, _samples(lengths), layout, cuts, change=change)
        except CaptureError as error:
            said = error.message
        else:
            cohort = the_cohort(lake.replay())
            assert cohort.verdict == "refused", cohort.to_json()
            assert not any(one.compared for one in cohort.stages)
            said = cohort.refusal
    named = {f"'{changed[0].sample_id}'"}
    if layout.context == "all-gather" or what == "of another size":
        # Cut together with others, or as long as a whole response beside others that are not.
        named = {f"'{one.sample_id}'" for one in _samples(lengths)}
    assert any(name in said for name in named), said


CUTS = [(2, [3, 0]), (4, [1, 0, 3, 2]), (1, [2])]


def test_a_shard_that_no_rank_holds_is_named(lake: Lake) -> None:
    def change(shares: dict[int, list[Sample]]) -> None:
        del shares[1][0]

    _write_dynamic(lake, _samples(EXAMPLE * 2), LAYOUTS[0], CUTS, change=change)
    cohort = the_cohort(lake.replay())
    assert cohort.verdict == "refused"
    assert "of sample 's-4' the shards (rank, size) [(1, 4), (2, 4), (3, 4)]" in cohort.refusal


def test_a_wrong_token_of_a_moved_shard_is_found(lake: Lake) -> None:
    samples = _samples(EXAMPLE * 2)
    mine = _held(samples, LAYOUTS[0], 1, 2)[1]
    local = next(place for place, t in enumerate(mine) if samples[1].mask[t])

    def change(shares: dict[int, list[Sample]]) -> None:
        one = next(one for one in shares[0] if one.sample_id == "s-1")
        one.columns["kl"][local] += 0.5

    _write_dynamic(lake, samples, LAYOUTS[0], CUTS, change=change)
    found = the_stage(the_cohort(lake.replay()), "advantage.kl").divergences
    assert [(one.sample_id, one.token) for one in found] == [("s-1", mine[local])]


def test_means_of_ranks_that_hold_other_samples_say_what_they_divide_by(lake: Lake) -> None:
    _write_dynamic(
        lake,
        _samples(EXAMPLE * 2),
        LAYOUTS[0],
        CUTS,
        meaning={"scope": "rank", "reduction": "mean"},
    )
    found = the_stage(the_cohort(lake.replay()), "loss.policy")
    assert (found.verdict, found.compared) == ("unverified", 0)


def test_shards_of_a_layout_that_nobody_states_are_refused_at_capture(lake: Lake) -> None:
    with pytest.raises(CaptureError, match="expected response_length = 9"):
        _write_dynamic(lake, _samples(EXAMPLE * 2), LAYOUTS[0], CUTS, told=LayoutSettings())


def test_a_part_of_a_stream_knows_where_it_lies(lake: Lake) -> None:
    """Samples that were left out of a selection still stand before those that were not."""
    _write(lake, _samples(EXAMPLE), LayoutSettings("all-gather"), 2)
    cohort = the_cohort(lake.replay(groups=["g-1"]))
    assert the_stage(cohort, "advantage.kl").verdict in ("pass", "precision")
    assert the_stage(cohort, "advantage.kl").compared == sum(
        sum(one.mask) for one in _samples(EXAMPLE)[2:]
    )


@pytest.mark.parametrize("rank_and_size", [(2, 2), (0, None), (None, 2)])
def test_a_shard_says_rank_and_size(lake: Lake, rank_and_size: tuple[Any, Any]) -> None:
    sample = _samples(EXAMPLE)[0]
    sample.context = rank_and_size
    with pytest.raises(CaptureError, match="a rank below its size, or neither"):
        capture(lake, {0: [sample]}, WAY, step_id=0, columns=["entropy"])
