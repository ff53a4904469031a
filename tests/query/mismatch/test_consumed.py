"""What a step takes from rollouts keeps the origin of each row."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.helpers.captures import record, sample
from tests.helpers.mismatches import as_rows, holding, measured, only_row, write_pair
from trajreplay import DatasetError, Lake
from trajreplay.query.files.reading import read_columns
from trajreplay.query.mismatch.consumed import Consumed

ROW = [-1.0, -2.0, -1.5]


@pytest.mark.parametrize(("sampled_by", "left"), [((1, 2), 6), ((1, 1), 3), ((2, 2), 3)])
def test_each_row_is_of_the_weights_of_its_own_rollout(
    sampled_by: tuple[int, int], left: int, tmp_path: Path
) -> None:
    lake = Lake.create(tmp_path)
    for number in range(2):
        spans = [{"weight_versions": [(0, 3, sampled_by[number])]}]
        write_pair(
            lake,
            [[one + 0.25 for one in ROW]],
            [ROW],
            rollout_id=number,
            step_id=None,
            first=number,
            version=number + 1,
            fields=spans,
        )
    consumed = [sample(number, 3, source_rollout_id=number) for number in range(2)]
    record(lake, lambda capture: capture.samples(consumed), rollout_id=2, step_id=0)
    assert only_row(lake)["valid_tokens"] == left


@pytest.mark.parametrize("source", ["copy:rollout_log_probs", "sampler"])
def test_a_row_that_is_filled_from_a_copy_is_refused(source: str, tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    write_pair(lake, [ROW, ROW], [ROW, ROW], rollout_id=0, step_id=None, source=source)
    consumed = [sample(number, 3, source_rollout_id=0) for number in range(2)]
    old: list[Any] = [np.array([-1.25, -2.0, -1.5], np.float32), None]
    record(
        lake,
        lambda capture: capture.samples(consumed),
        lambda capture: capture.tensor("old_log_probs", old, source="trainer"),
        rollout_id=1,
        step_id=0,
    )
    with pytest.raises(DatasetError, match=r"rollout 0 .*old_log_probs (is a copy|comes from)"):
        measured(lake)


def write_twice(lake: Lake, second: list[float]) -> None:
    """A rollout whose sample 0 is on both ranks, and the step that consumed it."""
    for rank, values in enumerate(([ROW], [second, [-3.0] * 3])):
        generated = [sample(number, 3) for number in range(len(values))]
        record(
            lake,
            *holding(generated, rollout_log_probs=as_rows(values)),
            rollout_id=0,
            rank=rank,
            expected_ranks=[0, 1],
            stages=[],
        )
    consumed = [sample(number, 3, source_rollout_id=0) for number in range(2)]
    old = as_rows([[one + 0.25 for one in ROW], [-3.25] * 3])
    record(
        lake,
        lambda capture: capture.samples(consumed),
        lambda capture: capture.tensor("old_log_probs", old, source="trainer"),
        rollout_id=1,
        step_id=0,
    )


def test_a_sample_that_is_there_twice_moves_no_other(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    write_twice(lake, ROW)
    row = only_row(lake)
    assert (row["valid_tokens"], row["abs_delta_max"]) == (6, 0.25)


def test_a_sample_that_is_there_twice_with_other_values_is_refused(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path)
    write_twice(lake, [-1.0, -2.0, -1.75])
    with pytest.raises(DatasetError, match="sample 's-0' is there twice in its rollout"):
        measured(lake)


@pytest.mark.parametrize("sampled_at", [(1.0, 0.5), (0.5, 1.0)])
def test_temperatures_are_compared_row_by_row(
    sampled_at: tuple[float, float], tmp_path: Path
) -> None:
    """Rollouts of different temperatures are each consistent, or are not."""
    lake = Lake.create(tmp_path)
    for number, (own, sampled) in enumerate(zip((1.0, 0.5), sampled_at, strict=True)):
        write_pair(
            lake,
            [[one + 0.25 for one in ROW]],
            [ROW],
            rollout_id=number,
            step_id=None,
            first=number,
            temperatures=(own, sampled),
        )
    consumed = [sample(number, 3, source_rollout_id=number) for number in range(2)]
    record(lake, lambda capture: capture.samples(consumed), rollout_id=2, step_id=0)
    errors = [one.message for one in measured(lake).findings if one.severity == "error"]
    assert bool(errors) == (sampled_at == (0.5, 1.0))


def test_captures_of_many_ranks_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake.create(tmp_path)
    ranks = list(range(40))
    for rank in ranks:
        common: dict[str, Any] = {"rank": rank, "expected_ranks": ranks, "stages": []}
        rows = as_rows([ROW])
        generated = [sample(rank, 3)]
        consumed = [sample(rank, 3, source_rollout_id=0)]
        record(lake, *holding(generated, rollout_log_probs=rows), rollout_id=0, **common)
        record(lake, *holding(consumed, old_log_probs=rows), rollout_id=1, step_id=0, **common)
    reads: list[str] = []

    def read(*given: Any) -> Any:
        reads.append(given[1].key)
        return read_columns(*given)

    # The package has a function of the same name, which a path would find.
    monkeypatch.setattr(sys.modules[Consumed.__module__], "read_columns", read)
    assert only_row(lake)["valid_tokens"] == 120
    assert len(reads) == len(set(reads)) == 40
