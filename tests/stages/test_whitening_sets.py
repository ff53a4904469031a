"""Advantages whitened over what one context-parallel rank holds, as Relax does, or refused."""

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.helpers.cohorts import capture
from tests.helpers.composed import ComposedTrainer
from tests.helpers.composed_corrections import Rows
from tests.helpers.scenes import WAY, refusals, the_cohort, the_stage
from tests.helpers.trainer import Sample
from tests.stages.test_composed import COLUMNS, PLAIN, _shares
from tests.stages.test_shards import _held
from tests.stages.test_shards_composed import _part, _write
from trajreplay import Lake, LayoutSettings, ParallelCoordinates, Settings, with_changes

ESTIMATE = "advantage.estimate"
STAGES = ("sample", "reward.raw", "reward.post_process", "advantage.kl", ESTIMATE)
LAYOUTS = [
    LayoutSettings("zigzag"),
    LayoutSettings("zigzag", 8),
    LayoutSettings("contiguous"),
    LayoutSettings("zigzag", context_padding="batch"),
]
RELAX: dict[str, Any] = {
    "advantage.estimator": "reinforce++",
    "advantage.gamma": 0.9,
    "advantage.whiten": "context-rank",
    "advantage.whiten_short": "biased",
}


class ShardedTrainer(ComposedTrainer):
    """Whitens what each context-parallel rank holds over all data-parallel ones.

    Args:
        settings: The arithmetic.
        shares: The samples of each data-parallel rank.
        size: Context-parallel ranks.
    """

    def __init__(self, settings: Settings, shares: dict[int, list[Sample]], size: int) -> None:
        super().__init__(settings, shares)
        self._size = size

    def owners(self) -> list[list[int]]:
        """The context-parallel rank that holds each token."""
        found = [[-1] * one.length for one in self.samples]
        for rank in range(self._size):
            for row, mine in enumerate(_held(self.samples, self.settings.layout, rank, self._size)):
                for token in mine:
                    found[row][token] = rank
        return found

    def _whitened(self, advantages: Rows) -> Rows:
        own = self.settings.advantage
        flat = self.whiten(
            [one for row in advantages for one in row],
            [one for row in self.masks for one in row],
            [one for row in self.owners() for one in row],
            scale=own.whiten_scale,
            form=own.whiten_form,
            ddof=own.whiten_ddof,
            epsilon=own.whiten_epsilon,
            short=own.whiten_short,
        )
        left = iter(flat)
        return [[next(left) for _ in row] for row in advantages]


def _recorded(
    lake: Lake, told: Settings, size: int, seed: int, *, cut: bool = False
) -> ShardedTrainer:
    """A training of two data-parallel ranks, each of so many context-parallel ones.

    Args:
        lake: Where to.
        told: What it says that it computes; it whitens what each context-parallel rank holds.
        size: Context-parallel ranks.
        seed: Of its samples.
        cut: Whether two steps consume a half of the rollout each, which is captured, too.
    """
    halves = _shares(seed)
    if told.layout.context_padding == "batch":
        for own in halves.values():  # each data-parallel rank has a length of its own
            for one in own:
                one.padded_length = max(other.prompt_length + other.length for other in own)
    trainer = ShardedTrainer(replace(with_changes(PLAIN, RELAX), layout=told.layout), halves, size)
    trainer.score()
    trainer.estimate()
    shares: dict[int, list[Sample]] = {}
    places = {}
    for half, own in halves.items():
        for rank in range(size):
            held = _held(own, told.layout, rank, size)
            mine = size * half + rank
            shares[mine] = [_part(one, part) for one, part in zip(own, held, strict=True)]
            places[mine] = ParallelCoordinates(half, 2, context_rank=rank, context_size=size)
    options: dict[str, Any] = {"columns": COLUMNS, "settings": told, "parallel": places}
    if not cut:
        capture(lake, shares, WAY, step_id=0, stages=STAGES, **options)
        return trainer
    capture(lake, shares, WAY, stages=["sample"], **options)
    for step_id in (0, 1):
        part = {
            rank: own[: len(own) // 2] if step_id == 0 else own[len(own) // 2 :]
            for rank, own in shares.items()
        }
        capture(lake, part, WAY, step_id=step_id, stages=["sample", ESTIMATE], **options)
    return trainer


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("seed", [3, 5])
def test_what_a_rank_whitens_of_a_rollout_that_steps_hold_parts_of_is_made_whole(
    tmp_path: Path, layout: LayoutSettings, seed: int
) -> None:
    told = replace(with_changes(PLAIN, RELAX), layout=replace(layout, batch="rollout"))
    lake = Lake.create(tmp_path / "right")
    trainer = _recorded(lake, told, 2, seed, cut=True)
    assert len({rank for row in trainer.owners() for rank in row}) > 1
    report = lake.replay()
    found = [the_stage(the_cohort(report, 0, step), ESTIMATE) for step in (0, 1)]
    assert {one.verdict for one in found} <= {"pass", "precision"}, found
    assert all(one.compared for one in found)
    lake = Lake.create(tmp_path / "wrong")
    _recorded(lake, with_changes(told, {"advantage.whiten": "cohort"}), 2, seed, cut=True)
    report = lake.replay()
    assert "diverged" in [the_stage(the_cohort(report, 0, one), ESTIMATE).verdict for one in (0, 1)]


@given(st.sampled_from([2, 4]), st.sampled_from(LAYOUTS), st.integers(0, 99))
def test_what_a_rank_whitens_of_its_shards_passes_and_nothing_else_does(
    size: int, layout: LayoutSettings, seed: int
) -> None:
    told = replace(with_changes(PLAIN, RELAX), layout=layout)
    other = with_changes(told, {"advantage.whiten": "cohort"})
    with tempfile.TemporaryDirectory() as folder:
        lakes = [Lake.create(Path(folder) / name) for name in ("a", "b")]
        trainer = _recorded(lakes[0], told, size, seed)
        trained = [
            rank
            for row, mask in zip(trainer.owners(), trainer.masks, strict=True)
            for rank, m in zip(row, mask, strict=True)
            if m
        ]
        # A rank that holds nothing it trains on has no statistic, and is refused.
        assume(all(trained.count(rank) > 1 for rank in {*trained}))
        held = {rank for row in trainer.owners() for rank in row}
        assume(held == {*trained} and len(held) > 1)
        _recorded(lakes[1], other, size, seed)
        first, second = (the_cohort(one.replay()) for one in lakes)
    assert first.verdict in ("pass", "precision"), first.to_json()
    assert the_stage(first, ESTIMATE).compared
    assert second.first_divergent_stage == ESTIMATE


def test_the_process_group_is_explained(lake: Lake) -> None:
    told = replace(with_changes(PLAIN, RELAX), layout=LAYOUTS[0])
    _recorded(lake, with_changes(told, {"advantage.whiten": "cohort"}), 2, 3)
    first = lake.explain().explanations[0]
    assert "the tokens of each context-parallel rank" in first.text


def test_on_one_context_parallel_rank_it_is_the_cohort(lake: Lake) -> None:
    settings = with_changes(PLAIN, {**RELAX, "advantage.whiten": "cohort"})
    trainer = ComposedTrainer(settings, _shares())
    trainer.score()
    trainer.estimate()
    capture(
        lake,
        trainer.shares,
        WAY,
        step_id=0,
        stages=STAGES,
        columns=COLUMNS,
        settings=with_changes(PLAIN, RELAX),
    )
    assert the_cohort(lake.replay()).verdict in ("pass", "precision")


@pytest.mark.parametrize(
    ("sets", "context", "reason"),
    [
        ("context-rank", "unstated", "layout.context is not stated"),
        ("context-rank", "whole", "layout.context is 'whole'; v2 recomputes 'zigzag'"),
        ("context-rank", "all-gather", "layout.context is 'all-gather'; v2 recomputes 'zigzag'"),
        ("rank", "zigzag", "advantage.whiten is 'rank' and layout.context is 'zigzag'"),
    ],
)
def test_ranks_whose_tokens_are_not_known_are_refused_by_name(
    lake: Lake, sets: str, context: str, reason: str
) -> None:
    settings = with_changes(PLAIN, {"advantage.whiten": sets})
    if context in ("whole", "unstated"):  # each rank holds all
        samples = _shares()[0]
        trainer = ComposedTrainer(PLAIN, {0: samples})
        trainer.score()
        trainer.estimate()
        capture(
            lake,
            {0: samples, 1: [one.copy() for one in samples]},
            WAY,
            step_id=0,
            stages=STAGES,
            columns=COLUMNS,
            settings=replace(settings, layout=LayoutSettings(context)),
            parallel={r: ParallelCoordinates(context_rank=r, context_size=2) for r in (0, 1)},
        )
    else:
        told = replace(settings, layout=LayoutSettings(context))
        _write(lake, replace(PLAIN, layout=told.layout), 2, told=told)
    assert reason in refusals(the_cohort(lake.replay()))


def test_rows_of_any_size_are_refused_by_name(lake: Lake) -> None:
    samples = [one for own in _shares().values() for one in own]
    for one in samples:
        one.context = (0, 1)
    settings = with_changes(PLAIN, RELAX)
    capture(
        lake, {0: samples}, WAY, step_id=0, stages=(ESTIMATE,), columns=COLUMNS, settings=settings
    )
    text = refusals(the_cohort(lake.replay()))
    assert "advantage.whiten is 'context-rank', and rows say which shard" in text
