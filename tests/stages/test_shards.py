"""Context parallelism: a sharded capture replays to the numbers of the whole one, or is refused."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
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
from trajreplay.schema.shards import packed_positions, response_spans
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
]


def _samples(lengths: list[tuple[int, int]], seed: int = 0) -> list[Sample]:
    """Samples of these prompt and response lengths, two a group, scored and estimated."""
    numbers = np.random.default_rng(seed)
    samples = []
    for row, (prompt, length) in enumerate(lengths):
        mask = [int(one) for one in numbers.random(length) > 0.2]
        one = Sample(f"s-{row}", f"g-{row // 2}", mask, float(numbers.normal()))
        one.prompt_length = prompt
        base = numbers.normal(-1.0, 0.5, length)
        for name in ("rollout_log_probs", "old_log_probs", "ref_log_probs", "log_probs"):
            drift = base + numbers.normal(0.0, 0.1, length)
            one.columns[name] = torch.tensor(drift, dtype=torch.float32)
        one.columns["entropy"] = torch.tensor(numbers.random(length), dtype=torch.float32)
        samples.append(one)
    return samples


def _held(sample: Sample, layout: LayoutSettings, rank: int, size: int) -> np.ndarray[Any, Any]:
    """The response tokens of one sample that a rank holds."""
    total = np.array([sample.prompt_length + sample.length])
    spans = response_spans(layout, total, np.array([sample.length]), rank, size)
    return packed_positions(spans, np.array([0, sample.length]))


def _shard(sample: Sample, layout: LayoutSettings, rank: int, size: int) -> Sample:
    """What a rank captures of a sample: its own tokens of every column."""
    mine = _held(sample, layout, rank, size)
    part = sample.copy()
    part.columns = {
        name: values[torch.from_numpy(mine)] if name in SHARDED else values
        for name, values in sample.columns.items()
    }
    return part


def _scalars(
    trainer: ComposedTrainer, layout: LayoutSettings, rank: int, size: int
) -> list[Expected]:
    """The rank's own share of every scalar: its tokens, over the tokens of the whole samples."""
    kept = []
    for one in trainer.samples:
        own = set(_held(one, layout, rank, size).tolist())
        kept.append([float(m and t in own) for t, m in enumerate(one.mask)])
    total = dict.fromkeys(("loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl"), 0.0)
    for row, mask in enumerate(kept):
        terms = trainer.policy_terms(row)
        for name in total:
            share = sum(m * x for m, x in zip(mask, terms[name], strict=True))
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
    shares = {rank: [_shard(one, layout, rank, size) for one in samples] for rank in range(size)}
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
    rank = next(r for r in range(size) if place in _held(samples[1], layout, r, size))
    local = _held(samples[1], layout, rank, size).tolist().index(place)

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
        {0: [_shard(one, layout, 0, 2) for one in samples]},
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
        shares[rank] = [_shard(samples[row], layout, rank, 2) for row in rows]
        values: dict[str, list[float]] = {}
        for row in rows:
            own = set(_held(samples[row], layout, rank, 2).tolist())
            for name, terms in trainer.policy_terms(row).items():
                masked = [x for t, x in enumerate(terms) if samples[row].mask[t] and t in own]
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
