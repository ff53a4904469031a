from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.captures import record, sample
from tests.helpers.mutate import change_entry, data_file, entry_file
from tests.helpers.queried import catalog_of, cohort, write_capture, write_rollout, write_step
from trajreplay import Lake, ParallelCoordinates
from trajreplay.query import CaptureSet, capture_sets, lineages


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def only_set(lake: Lake) -> CaptureSet:
    catalog = catalog_of(lake)
    (found,) = capture_sets(catalog, lineages(catalog)).values()
    return found


def test_a_set_with_every_expected_rank_is_complete(lake: Lake) -> None:
    write_step(lake, 3, 1)
    found = only_set(lake)
    assert found.complete
    assert (found.run_id, found.attempt, found.rollout_id, found.step_id) == ("r", 0, 3, 1)
    assert (found.kind, found.ranks, found.expected_ranks) == ("step", (0, 1), (0, 1))


def test_a_missing_rank_is_a_gap_that_may_be_tolerated(lake: Lake) -> None:
    write_rollout(lake, 0, ranks=[1])
    found = only_set(lake)
    assert not found.complete
    assert "no capture of rank 0, expected ranks 0, 1" in found.gaps[0]
    assert found.refusals() == found.gaps
    assert found.refusals(allow_partial=True) == ()


def test_an_unexpected_rank_is_a_problem(lake: Lake) -> None:
    write_rollout(lake, 0, ranks=[0], expected_ranks=[0])
    write_rollout(lake, 0, ranks=[1], expected_ranks=[0, 1])
    found = only_set(lake)
    assert "rank 0 expects the ranks 0, rank 1 expects 0, 1" in found.problems[0]
    assert found.refusals(allow_partial=True)


def test_a_rank_outside_the_expected_ones_is_named(lake: Lake) -> None:
    (first, second) = write_rollout(lake, 0)
    for entry in (first, second):
        change_entry(lake, entry.key, lambda old: replace(old, expected_ranks=(0,)))
    assert "rank 1 is not among the expected ranks 0" in only_set(lake).problems[0]


def test_a_dropped_capture_is_a_gap_unless_its_data_is_there_too(lake: Lake) -> None:
    write_rollout(lake, 0, ranks=[0])
    record(lake, lambda capture: capture.drop("queue full"), rank=1, expected_ranks=[0, 1])
    assert "rank 1 dropped its capture" in only_set(lake).gaps[0]
    write_rollout(lake, 0, ranks=[1])
    assert only_set(lake).complete


def test_data_beside_which_the_same_was_given_up_later_may_be_a_part_of_it(lake: Lake) -> None:
    write_rollout(lake, 0)
    record(lake, lambda capture: capture.drop("recorded twice"), rank=1, expected_ranks=[0, 1])
    found = only_set(lake)
    assert not found.complete
    (told,) = found.gaps
    assert told.startswith("rank 1 recorded the same again and gave it up: recorded twice. What is")
    assert found.refusals(allow_partial=True) == ()
    (note,) = [one for one in lake.inspect(0).to_json()["captures"] if one["part"] == "dropped"]
    assert note["reason"] == "recorded twice"


def test_a_damaged_entry_is_a_problem_of_its_set_alone(lake: Lake) -> None:
    write_rollout(lake, 0)
    (_, second) = write_rollout(lake, 1)
    path = entry_file(lake, second.key)
    path.write_bytes(path.read_bytes()[:-1])
    catalog = catalog_of(lake)
    sets = capture_sets(catalog, lineages(catalog))
    assert sets[cohort(0)].complete
    assert "rollout.-.1.data.json" in sets[cohort(1)].problems[0]
    assert not sets[cohort(1)].gaps


@pytest.mark.parametrize(("size", "complete"), [(None, True), (4, True), (5, False), (3, False)])
def test_a_known_cohort_size_is_held_against_the_captured_samples(
    lake: Lake, size: int | None, complete: bool
) -> None:
    write_rollout(lake, 0, cohort_size=size)
    found = only_set(lake)
    assert found.complete is complete
    if not complete:
        assert "4 samples were captured" in "".join(found.refusals())


def test_ranks_that_disagree_on_the_cohort_size_are_a_problem(lake: Lake) -> None:
    write_capture(lake, 0, rollout_id=0, cohort_size=4)
    write_capture(lake, 1, rollout_id=0, cohort_size=9)
    assert "disagree on cohort_size: 4, 9" in only_set(lake).problems[0]


def test_a_rank_without_rows_counts(lake: Lake) -> None:
    write_capture(lake, 0, rollout_id=0)
    write_capture(lake, 1, rollout_id=0, size=0)
    found = only_set(lake)
    assert found.complete
    assert [entry.rows for entry in found.owners] == [2, 0]


def write_copies(lake: Lake, **second: Any) -> None:
    for rank, more in ((0, {}), (1, second)):
        parallel = ParallelCoordinates(tensor_rank=rank, tensor_size=2)
        record(
            lake,
            *copy_content(**more),
            rank=rank,
            expected_ranks=[0, 1],
            parallel=parallel,
        )


def copy_content(reward: float = 1.0) -> list[Any]:
    return [
        lambda capture: capture.samples([sample(0, reward=reward), sample(1, length=3)]),
        lambda capture: capture.tensor("log_probs", [[-1.0, -2.0], [-3.0, -4.0, -5.0]]),
    ]


def test_equal_copies_are_counted_once_and_do_not_differ(lake: Lake) -> None:
    write_copies(lake)
    found = only_set(lake)
    assert found.complete
    assert [entry.key.rank for entry in found.owners] == [0]
    assert [entry.key.rank for entry in found.copies] == [1]
    assert found.copy_differences == ()


def test_a_copy_that_differs_is_named_with_its_columns(lake: Lake) -> None:
    write_copies(lake, reward=2.0)
    (difference,) = only_set(lake).copy_differences
    assert (difference.rank, difference.owner_rank) == (1, 0)
    assert difference.columns == ("reward",)
    assert "rank 1 is a copy of rank 0 and differs in reward" in str(difference)


def write_stages(lake: Lake, **first: Any) -> None:
    """Two pipeline stages with the same samples, of which the first has no log-probs."""
    samples, log_probs = copy_content()
    for stage, content in ((0, copy_content(**first)[:1]), (1, [samples, log_probs])):
        place = ParallelCoordinates(pipeline_rank=stage, pipeline_size=2)
        record(lake, *content, rank=stage, expected_ranks=[0, 1], parallel=place)


def test_the_last_pipeline_stage_owns_the_samples(lake: Lake) -> None:
    write_stages(lake)
    found = only_set(lake)
    assert [entry.key.rank for entry in found.owners] == [1]
    assert [entry.key.rank for entry in found.copies] == [0]
    assert found.copy_differences == ()


def test_an_earlier_pipeline_stage_that_differs_is_named(lake: Lake) -> None:
    write_stages(lake, reward=2.0)
    (difference,) = only_set(lake).copy_differences
    assert (difference.rank, difference.owner_rank) == (0, 1)
    assert difference.columns == ("reward",)


def test_a_copy_without_an_owner_is_a_problem(lake: Lake) -> None:
    write_rollout(lake, 0, parallel=ParallelCoordinates(tensor_rank=1, tensor_size=2))
    assert "no rank of the set owns its samples" in only_set(lake).problems[0]


def test_a_missing_data_file_does_not_show_in_the_set(lake: Lake) -> None:
    (first, _) = write_rollout(lake, 0)
    data_file(lake, first.key).unlink()
    assert only_set(lake).complete


def test_sets_are_listed_by_rollout_and_step_the_rollout_itself_first(lake: Lake) -> None:
    write_step(lake, 1, 0, ranks=[0])
    write_rollout(lake, 1, ranks=[0])
    write_step(lake, 0, 10, ranks=[0])
    write_step(lake, 0, 9, ranks=[0])
    catalog = catalog_of(lake)
    sets = capture_sets(catalog, lineages(catalog))
    assert list(sets) == [cohort(0, 9), cohort(0, 10), cohort(1), cohort(1, 0)]
    assert cohort(7) not in sets
    with pytest.raises(KeyError):
        _ = sets[cohort(7)]
