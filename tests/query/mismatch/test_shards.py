"""Responses that context-parallel ranks captured in shards count as whole ones do."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.captures import record, sample
from tests.helpers.mismatches import as_rows, holding, measured, only_row, write_pair
from trajreplay import DatasetError, Lake, Settings
from trajreplay.query import Selection
from trajreplay.schema.identity import ParallelCoordinates
from trajreplay.schema.settings import LayoutSettings
from trajreplay.schema.shards import response_spans, row_places

LAYOUTS = ("zigzag", "contiguous", "all-gather")


@st.composite
def cut_steps(draw: st.DrawFn) -> dict[str, Any]:
    """Samples of any length, of which every rank of a group holds what a layout gives it."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=5))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sampler = [random.normal(-2, 1, length).astype(np.float32) for length in lengths]
    masks = [random.integers(0, 2, length).tolist() for length in lengths]
    masks[0][0] = 1
    return {
        "layout": LayoutSettings(context=draw(st.sampled_from(LAYOUTS))),
        "size": draw(st.sampled_from([2, 4])),
        "old": [one + random.normal(0, 0.3, len(one)).astype(np.float32) for one in sampler],
        "rollout": sampler,
        "masks": masks,
        "prompts": draw(st.lists(st.integers(1, 9), min_size=len(lengths), max_size=len(lengths))),
        "batches": draw(st.lists(st.sampled_from("ab"), min_size=len(lengths), max_size=5)),
        "spans": [[(0, length // 2, 3), (length // 2, length, 4)] for length in lengths],
        "whole_sampler": draw(st.booleans()),
    }


def samples_of(step: dict[str, Any]) -> list[Any]:
    return [
        sample(
            number,
            len(row),
            total_length=step["prompts"][number] + len(row),
            loss_mask=step["masks"][number],
            micro_batch_id=f"mb-{step['batches'][number]}",
            weight_versions=step["spans"][number],
        )
        for number, row in enumerate(step["old"])
    ]


def shard_of(step: dict[str, Any], rank: int, rows: list[np.ndarray]) -> list[np.ndarray]:
    """What one rank holds of every row, in the order in which it stores it."""
    response = np.array([len(row) for row in rows])
    total = response + np.array(step["prompts"][: len(rows)])
    place = ParallelCoordinates(context_rank=rank, context_size=step["size"])
    places = row_places(step["layout"], place, total, batches=step["batches"][: len(rows)])
    spans = response_spans(step["layout"], total, response, places)
    return [
        np.concatenate([row[low[number] : high[number]] for low, high in spans])
        for number, row in enumerate(rows)
    ]


def write_cut(lake: Lake, step: dict[str, Any], ranks: Any = None, **options: Any) -> None:
    """A capture a rank."""
    settings = replace(Settings(), layout=step["layout"])
    size = step["size"]
    for rank in range(size) if ranks is None else ranks:
        sampler = step["rollout"]
        if not step["whole_sampler"]:
            sampler = shard_of(step, rank, sampler)
        old = shard_of(step, rank, step["old"])

        def tensors(capture: Any, old: Any = old, sampler: Any = sampler) -> None:
            capture.samples(samples_of(step))
            capture.tensor("old_log_probs", as_rows(old), source="trainer", weight_version=4)
            capture.tensor("rollout_log_probs", as_rows(sampler), source="sampler")

        place = ParallelCoordinates(context_rank=rank, context_size=size)
        usual: dict[str, Any] = {"rollout_id": 0, "step_id": 0, "stages": [], "rank": rank}
        usual |= {"expected_ranks": list(range(size)), "parallel": place, "settings": settings}
        record(lake, tensors, **usual | options)


@given(
    cut_steps(),
    st.sampled_from([(), ("position",), ("length",), ("weight_version",)]),
    st.booleans(),
)
def test_shards_count_as_the_whole_does(
    tmp_path_factory: Any, step: dict[str, Any], by: Any, every: bool
) -> None:
    folder = tmp_path_factory.mktemp("cut")
    cut, whole = Lake.create(folder / "cut"), Lake.create(folder / "whole")
    write_cut(cut, step)
    fields = [{"weight_versions": one} for one in step["spans"]]
    write_pair(whole, step["old"], step["rollout"], step["masks"], fields=fields, version=4)
    options = {"by": by, "any_version": every or not any(map(_second_half, step["masks"]))}
    tables = [measured(one, **options).table.drop(["run_id"]) for one in (cut, whole)]
    for found, expected in zip(*tables, strict=True):
        if pa.types.is_floating(found.type):
            np.testing.assert_allclose(found.to_numpy(), expected.to_numpy(), rtol=1e-12)
        else:
            assert found.equals(expected)


def _second_half(mask: list[int]) -> bool:
    return any(mask[len(mask) // 2 :])


def a_step() -> dict[str, Any]:
    rows = [np.linspace(-2, -1, 8, dtype=np.float32)] * 2
    return {
        "layout": LayoutSettings(context="zigzag"),
        "size": 2,
        "old": rows,
        "rollout": [row - np.float32(0.125) for row in rows],
        "masks": [[1] * 8] * 2,
        "prompts": [8, 8],
        "batches": "aa",
        "spans": [None, None],
        "whole_sampler": False,
    }


def test_a_shard_that_is_not_selected_is_missed(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    write_cut(lake, a_step())
    with pytest.raises(DatasetError, match=r"of sample 's-0' the shards .* \[\(0, 2\)\] are there"):
        measured(lake, selection=Selection(ranks=(0,)))


def test_values_that_the_layout_does_not_give_are_refused(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    step = a_step()
    write_cut(lake, step, [0])
    write_cut(lake, step | {"layout": LayoutSettings(context="contiguous")}, [1])
    with pytest.raises(DatasetError):
        measured(lake)


def test_a_shard_takes_the_same_shard_of_the_rollout(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    step = a_step()
    settings = replace(Settings(), layout=step["layout"])
    for rank in range(2):
        place = ParallelCoordinates(context_rank=rank, context_size=2)
        common: dict[str, Any] = {"rank": rank, "expected_ranks": [0, 1], "parallel": place}
        common |= {"stages": [], "settings": settings}
        sampler, old = (as_rows(shard_of(step, rank, step[one])) for one in ("rollout", "old"))
        generated = [sample(one, 8, total_length=16) for one in range(2)]
        consumed = [sample(one, 8, total_length=16, source_rollout_id=0) for one in range(2)]
        record(lake, *holding(generated, rollout_log_probs=sampler), rollout_id=0, **common)
        record(lake, *holding(consumed, old_log_probs=old), rollout_id=1, step_id=0, **common)
    row = only_row(lake)
    assert (row["valid_tokens"], row["abs_delta_max"]) == (16, 0.125)


@pytest.mark.parametrize("whole", [{0, 1}, {0}])
def test_ranks_that_hold_a_response_alike_or_not_at_all(whole: set[int], tmp_path: Path) -> None:
    """What one of them has wrong is not covered by what the other has."""
    step = a_step()
    lakes = [Lake.create(tmp_path / name) for name in ("equal", "unequal")]
    for lake, off in zip(lakes, (0, 5), strict=True):
        for rank in range(2):
            rows = [row.copy() for row in step["old"]]
            rows[1][3] += off * (rank == 0)
            old = rows if rank in whole else shard_of(step, rank, rows)
            record(
                lake,
                *holding(samples_of(step), old_log_probs=old, rollout_log_probs=step["rollout"]),
                rollout_id=0,
                step_id=0,
                stages=[],
                rank=rank,
                expected_ranks=[0, 1],
                parallel=ParallelCoordinates(context_rank=rank, context_size=2),
                settings=replace(Settings(), layout=step["layout"]),
            )
    if whole == {0, 1}:
        assert only_row(lakes[0])["abs_delta_max"] == 0.125
    for lake in lakes if whole == {0} else lakes[1:]:
        with pytest.raises(DatasetError, match=r"do not tile|is not what another rank"):
            measured(lake)
