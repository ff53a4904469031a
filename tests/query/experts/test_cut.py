"""Agreement of routes over context-parallel shards is that over the whole responses."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.captures import record
from tests.helpers.cut_steps import a_step, cut_options, cut_steps, samples_of, shard_of, write_cut
from tests.helpers.mismatches import as_rows
from tests.helpers.queried import catalog_of
from tests.helpers.routed import EXPERTS, healthy
from trajreplay import DatasetError, Lake
from trajreplay.query import Selection
from trajreplay.query.experts import route_agreement
from trajreplay.query.experts.replayed import Replayed, ReplayedReading

LAYERS, TOP_K = 2, 3


def routes_of(step: dict[str, Any], seed: int) -> tuple[list[Any], list[Any]]:
    """The sampler's, and the trainer's, which differ in every third token or so."""
    totals = [p + len(row) for p, row in zip(step["prompts"], step["old"], strict=True)]
    sampler = healthy(totals, LAYERS, TOP_K, seed)
    random = np.random.default_rng(seed)
    trainer = [one.copy() for one in sampler]
    for one in trainer:
        other = random.integers(0, 3, one.shape[:2]) == 0
        one[other] = (one[other] + 1) % EXPERTS
    return sampler, trainer


def own(step: dict[str, Any], rank: int, routes: list[Any]) -> list[Any]:
    """The routes of the tokens that a rank holds, at their places; -1 at the others."""
    numbers = [np.arange(len(row)) for row in step["old"]]
    found = []
    for prompt, one, held in zip(
        step["prompts"], routes, shard_of(step, rank, numbers), strict=True
    ):
        mine = np.full_like(one, -1)
        mine[prompt - 1 + held] = one[prompt - 1 + held]
        found.append(mine)
    return found


def agreement(lake: Lake, **options: Any) -> list[dict[str, Any]]:
    report = route_agreement(catalog_of(lake), **options)
    assert not any("shard" in one.message for one in report.findings)
    rows: list[dict[str, Any]] = report.table.to_pylist()
    return rows


@given(
    step=cut_steps(),
    seed=st.integers(0, 99),
    only_own=st.booleans(),
    level=st.sampled_from(["step", "rollout"]),
    every=st.booleans(),
)
def test_shards_agree_as_the_whole_does(
    tmp_path_factory: Any,
    step: dict[str, Any],
    seed: int,
    only_own: bool,
    level: str,
    every: bool,
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    cut, whole = Lake.create(folder / "cut"), Lake.create(folder / "whole")
    sampler, trainer = routes_of(step, seed)
    place = {"step_id": 0 if level == "step" else None}

    def routes(capture: Any, rank: int) -> None:
        capture.routes("rollout_experts", sampler)
        capture.routes("old_experts", own(step, rank, trainer) if only_own else trainer)

    def all_of_it(capture: Any) -> None:
        capture.samples(samples_of(step))
        capture.tensor("old_log_probs", as_rows(step["old"]), source="trainer", weight_version=4)
        capture.tensor("rollout_log_probs", as_rows(step["rollout"]), source="sampler")
        capture.routes("rollout_experts", sampler)
        capture.routes("old_experts", trainer)

    write_cut(cut, step, more=routes, **place)
    record(whole, all_of_it, stages=[], **place)
    late = any(any(mask[len(mask) // 2 :]) for mask in step["masks"])
    found, expected = (agreement(one, any_version=every or not late) for one in (cut, whole))
    assert found == expected


@pytest.mark.parametrize("sampled", ["whole", "shards"])
def test_what_a_shard_lacks_of_the_sampler_is_that_of_its_tokens(
    tmp_path: Path, sampled: str
) -> None:
    """The rollout was captured by one rank, or by those that hold the shards."""
    step = a_step()
    sampler, trainer = routes_of(step, 1)
    of_step, of_rollout = Lake.create(tmp_path / "a"), Lake.create(tmp_path / "b")

    def both(capture: Any, rank: int) -> None:
        capture.routes("rollout_experts", sampler)
        capture.routes("old_experts", trainer)

    write_cut(of_step, step, more=both)
    for rank in range(2):

        def of_sampler(capture: Any, rank: int = rank) -> None:
            capture.samples(samples_of(step))
            rows = step["rollout"] if sampled == "whole" else shard_of(step, rank, step["rollout"])
            capture.tensor("rollout_log_probs", as_rows(rows), source="sampler")
            capture.routes("rollout_experts", sampler)

        def of_trainer(capture: Any, rank: int = rank) -> None:
            capture.samples(samples_of(step))
            rows = as_rows(shard_of(step, rank, step["old"]))
            capture.tensor("old_log_probs", rows, source="trainer")
            capture.routes("old_experts", trainer)

        options = cut_options(step, rank)
        if sampled == "shards":
            record(of_rollout, of_sampler, **options)
        elif not rank:
            record(of_rollout, of_sampler, stages=[])
        record(of_rollout, of_trainer, **options, step_id=0)
    assert agreement(of_rollout) == agreement(of_step)


def test_every_shard_is_selected_and_as_long_as_its_tokens(tmp_path: Path) -> None:
    step = a_step()
    sampler, trainer = routes_of(step, 1)

    def both(capture: Any, rank: int) -> None:
        capture.routes("rollout_experts", sampler)
        capture.routes("old_experts", trainer)

    lake = Lake.create(tmp_path / "rank")
    write_cut(lake, step, more=both)
    with pytest.raises(DatasetError, match=r"the shards \(rank, size\) \[\(0, 2\)\] are there"):
        agreement(lake, selection=Selection(where="rank = 0"))


@given(step=cut_steps(), seed=st.integers(0, 99))
def test_a_token_that_another_rank_computed_is_not_left_to_the_own_router(
    tmp_path_factory: Any, step: dict[str, Any], seed: int
) -> None:
    """Each rank has the routes of its shard alone; one that lacks its own is counted."""
    sampler, _ = routes_of(step, seed)
    lacking = own(step, 0, sampler)
    found = {}
    for name in ("whole", "lost"):
        lake = Lake.create(tmp_path_factory.mktemp("cut") / name)

        def routes(capture: Any, rank: int, name: str = name) -> None:
            capture.routes("rollout_experts", sampler)
            mine = own(step, rank, sampler)
            if name == "lost" and not rank:
                mine = [np.full_like(one, -1) for one in mine]
            capture.routes("old_experts", mine)

        write_cut(lake, step, more=routes)
        catalog = catalog_of(lake)
        reading = ReplayedReading(catalog, ["old_experts"])
        total = Replayed("old_experts")
        for keys in catalog.by_cohort.values():
            for key in keys:
                for one in reading.of(catalog.entry(key), "step 0:0")[0]:
                    total.take(one)
        found[name] = total
    lost = sum(int((one[:-1, :, 0] >= 0).sum()) for one in lacking)
    assert (found["whole"].fallback, found["lost"].fallback) == (0, lost)
    assert (found["whole"].differing, found["whole"].rows - found["lost"].rows) == (0, lost)
