from pathlib import Path
from typing import Any, Literal

import pytest

from tests.helpers.captures import record, sample
from tests.helpers.mutate import data_file
from tests.helpers.queried import catalog_of, cohort, write_capture, write_rollout, write_step
from trajreplay import Lake
from trajreplay.query import (
    Closure,
    Selection,
    also_consumed_by,
    capture_sets,
    close,
    lineages,
    select,
    short_groups,
    source_rollouts,
)
from trajreplay.schema.localstore import LocalStore


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def closed(
    lake: Lake, closure: Literal["group", "cohort"] | None = None, **conditions: Any
) -> Closure:
    (one,) = select(catalog_of(lake), Selection(**conditions))
    return close(LocalStore(lake.path), one, closure)


def rows(closure: Closure) -> dict[int, list[bool] | None]:
    return {rank: None if mask is None else mask.to_pylist() for rank, mask in closure.rows.items()}


def write_split_groups(lake: Lake, **options: Any) -> None:
    """Groups g-0 and g-1 lie on both ranks."""
    for rank in (0, 1):
        samples = [sample(10 * rank + index, group_index=index // 2) for index in range(4)]
        record(
            lake,
            lambda capture, samples=samples: capture.samples(samples),  # type: ignore[misc]
            rank=rank,
            expected_ranks=[0, 1],
            **options,
        )


def test_a_sample_brings_its_group_from_every_rank(lake: Lake) -> None:
    write_split_groups(lake)
    found = closed(lake, samples=("s-10",))
    half = [True, True, False, False]
    assert rows(found) == {0: half, 1: half}
    assert not found.whole
    assert found.problems == ()


def test_groups_of_all_samples_are_the_whole_cohort(lake: Lake) -> None:
    write_split_groups(lake)
    found = closed(lake, samples=("s-0", "s-2"))
    assert found.whole
    assert rows(found) == {0: None, 1: None}


def test_the_cohort_can_be_asked_for(lake: Lake) -> None:
    write_split_groups(lake)
    assert closed(lake, "cohort", samples=("s-0",)).whole


def test_a_whole_selection_is_closed_without_reading_anything(lake: Lake) -> None:
    write_split_groups(lake)
    (one,) = select(catalog_of(lake), Selection())
    for path in Path(lake.path).glob("data/**/*.parquet"):
        path.unlink()
    assert close(LocalStore(lake.path), one).whole


def test_a_group_is_told_apart_by_the_rollout_that_it_is_from(lake: Lake) -> None:
    both = [sample(0, source_rollout_id=0), sample(0, source_rollout_id=1)]
    more = [sample(1, source_rollout_id=0), sample(1, source_rollout_id=1)]
    record(lake, lambda capture: capture.samples(both + more), rollout_id=1, step_id=0)
    found = closed(lake, where="source_rollout_id = 0 and sample_id = 's-0'")
    assert rows(found) == {0: [True, False, True, False]}


def test_a_missing_group_is_a_problem_where_groups_have_to_be_closed(lake: Lake) -> None:
    samples = [sample(0), sample(1, group_index=None)]
    record(lake, lambda capture: capture.samples(samples))
    assert "1 of 2 samples have no group_id" in closed(lake, samples=("s-0",)).problems[0]
    assert closed(lake).problems == ()
    assert closed(lake, "cohort", samples=("s-0",)).problems == ()


def test_a_damaged_file_is_a_problem(lake: Lake) -> None:
    write_split_groups(lake)
    selected = select(catalog_of(lake), Selection(ranks=(0,)))
    (one,) = selected
    data_file(lake, one.captures.owners[1].key).write_bytes(b"")
    assert "has 0 bytes" in close(LocalStore(lake.path), one).problems[0]


def test_groups_that_are_known_to_be_larger_are_short() -> None:
    groups = [("a",), ("a",), ("b",), ("c",), (None,)]
    (short,) = short_groups(groups, [3, None, 1, None, 9])
    assert (short.group_id, short.captured, short.size) == ("a", 2, 3)
    assert str(short) == "group 'a': 2 of 3 members were captured"


def test_the_rollouts_that_a_step_consumed_from_are_listed(lake: Lake) -> None:
    write_rollout(lake, 0)
    write_step(lake, 5, 0, fields={"source_rollout_id": 0})
    catalog = catalog_of(lake)
    sets = capture_sets(catalog, lineages(catalog))
    assert source_rollouts(sets[cohort(5, 0)]) == (cohort(0),)
    assert source_rollouts(sets[cohort(0)]) == ()
    assert closed(lake, steps=((5, 0),)).sources == (cohort(0),)


def test_other_consumers_of_a_selected_rollout_are_found_in_the_manifest(lake: Lake) -> None:
    write_rollout(lake, 0)
    write_rollout(lake, 1)
    write_step(lake, 0, 0)
    write_step(lake, 5, 0, fields={"source_rollout_id": 0})
    write_step(lake, 6, 0, fields={"source_rollout_id": 1})
    write_capture(lake, 0, rollout_id=7, step_id=0, run_id="x", fields={"source_rollout_id": 0})
    for path in Path(lake.path).glob("data/**/*.parquet"):
        path.unlink()
    selected = select(catalog_of(lake), Selection(run="r", rollouts=(0,)))
    assert also_consumed_by(selected.sets, selected.cohorts) == {cohort(0): [cohort(5, 0)]}
