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
from tests.helpers.cut_steps import a_step, cut_steps, samples_of, shard_of, write_cut
from tests.helpers.mismatches import as_rows, holding, measured, only_row, write_pair
from trajreplay import DatasetError, Lake, Settings
from trajreplay.query import Selection
from trajreplay.schema.identity import ParallelCoordinates
from trajreplay.schema.settings import LayoutSettings


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


def test_shards_of_a_rollout_count_as_those_of_a_step(tmp_path: Path) -> None:
    lake, of_step = Lake.create(tmp_path / "a"), Lake.create(tmp_path / "b")
    write_cut(lake, a_step(), step_id=None)
    write_cut(of_step, a_step())
    tables = [measured(one).table.drop(["run_id"]) for one in (lake, of_step)]
    assert tables[0].equals(tables[1])
