from pathlib import Path

import pytest

from tests.helpers.captures import start
from tests.helpers.queried import catalog_of, cohort, write_rollout, write_step
from trajreplay import DatasetError, Lake, QueryError
from trajreplay.query import capture_sets, lineages
from trajreplay.schema.attempt import AttemptRecord, dump_attempt
from trajreplay.schema.identity import ResumePoint
from trajreplay.schema.layout import attempt_path


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def shown(lake: Lake, attempt: int | None = None) -> list[tuple[int, int]]:
    """(attempt, rollout) of the visible rollout-level capture sets."""
    catalog = catalog_of(lake)
    sets = capture_sets(catalog, lineages(catalog, attempt=attempt))
    return [(one.attempt, one.rollout_id) for one in sets]


def test_of_a_resumed_attempt_only_what_lies_before_the_resume_point_counts(lake: Lake) -> None:
    for rollout in range(4):
        write_rollout(lake, rollout, ranks=[0])
    for rollout in (2, 3, 4):
        write_rollout(lake, rollout, ranks=[0], attempt=1, resumed_from=(0, 2))
    assert shown(lake) == [(0, 0), (0, 1), (1, 2), (1, 3), (1, 4)]


def test_an_earlier_resume_point_of_a_later_attempt_cuts_the_whole_chain(lake: Lake) -> None:
    for rollout in range(3):
        write_rollout(lake, rollout, ranks=[0])
    write_rollout(lake, 2, ranks=[0], attempt=1, resumed_from=(0, 2))
    write_rollout(lake, 1, ranks=[0], attempt=2, resumed_from=(1, 1))
    assert shown(lake) == [(0, 0), (2, 1)]


def test_a_sibling_that_was_left_behind_is_superseded(lake: Lake) -> None:
    write_rollout(lake, 0, ranks=[0])
    write_rollout(lake, 1, ranks=[0], attempt=1, resumed_from=(0, 1))
    write_rollout(lake, 2, ranks=[0], attempt=2, resumed_from=(0, 1))
    assert shown(lake) == [(0, 0), (2, 2)]


def test_a_resumed_attempt_without_captures_supersedes_already(lake: Lake) -> None:
    for rollout in (0, 1):
        write_rollout(lake, rollout, ranks=[0])
    with pytest.raises(KeyError), start(lake, attempt=1, resumed_from=(0, 1)):
        raise KeyError
    assert shown(lake) == [(0, 0)]


def test_attempts_that_nothing_connects_add_up_where_they_do_not_overlap(lake: Lake) -> None:
    write_rollout(lake, 0, ranks=[0], expected_ranks=[0])
    write_rollout(lake, 1, ranks=[0], expected_ranks=[0], attempt=1)
    assert shown(lake) == [(0, 0), (1, 1)]
    catalog = catalog_of(lake)
    sets = capture_sets(catalog, lineages(catalog))
    assert all(one.complete for one in sets.values())


def test_overlap_without_a_resume_point_is_refused_until_an_attempt_is_chosen(lake: Lake) -> None:
    for attempt in (0, 1):
        write_rollout(lake, 0, ranks=[0], expected_ranks=[0], attempt=attempt)
        write_step(lake, 0, attempt, ranks=[0], expected_ranks=[0], attempt=attempt)
    catalog = catalog_of(lake)
    sets = capture_sets(catalog, lineages(catalog))
    assert "attempts 0, 1 all hold rollout 0" in sets[cohort(0)].problems[0]
    assert "--attempt" in sets[cohort(0, attempt=1)].problems[0]
    assert sets[cohort(0, 0)].complete
    assert sets[cohort(0, 1, attempt=1)].complete
    chosen = capture_sets(catalog, lineages(catalog, attempt=1))
    assert list(chosen) == [cohort(0, attempt=1), cohort(0, 1, attempt=1)]
    assert all(one.complete for one in chosen.values())


def test_an_attempt_that_is_named_brings_what_it_continues(lake: Lake) -> None:
    for rollout in range(3):
        write_rollout(lake, rollout, ranks=[0])
    write_rollout(lake, 1, ranks=[0], attempt=1, resumed_from=(0, 1))
    write_rollout(lake, 0, ranks=[0], attempt=2, resumed_from=(1, 0))
    assert shown(lake) == [(2, 0)]
    assert shown(lake, attempt=1) == [(0, 0), (1, 1)]
    assert shown(lake, attempt=0) == [(0, 0), (0, 1), (0, 2)]


def test_unknown_runs_and_attempts_are_named_with_what_there_is(lake: Lake) -> None:
    write_rollout(lake, 0, ranks=[0])
    catalog = catalog_of(lake)
    with pytest.raises(QueryError, match=r"no run 'x'.*'r'"):
        lineages(catalog, "x")
    with pytest.raises(QueryError, match="no attempt 7, expected one of r: 0"):
        lineages(catalog, attempt=7)


def test_runs_without_the_attempt_are_left_out(lake: Lake) -> None:
    write_rollout(lake, 0, ranks=[0])
    write_rollout(lake, 0, ranks=[0], run_id="other", attempt=5)
    assert list(lineages(catalog_of(lake), attempt=5)) == ["other"]


def test_an_attempt_that_continues_itself_is_refused(lake: Lake) -> None:
    write_rollout(lake, 0, ranks=[0])
    record = AttemptRecord("r", 0, 0, ResumePoint(0, 5))
    (Path(lake.path) / attempt_path("r", 0)).write_bytes(dump_attempt(record))
    with pytest.raises(DatasetError, match="resumed from attempt 0, expected an earlier one"):
        lineages(catalog_of(lake))


def test_a_capture_that_contradicts_its_attempt_is_refused(lake: Lake) -> None:
    write_rollout(lake, 0, ranks=[0], expected_ranks=[0])
    record = AttemptRecord("r", 1, 0, ResumePoint(0, 5))
    write_rollout(lake, 6, ranks=[0], expected_ranks=[0], attempt=1, resumed_from=(0, 3))
    (Path(lake.path) / attempt_path("r", 1)).write_bytes(dump_attempt(record))
    catalog = catalog_of(lake)
    found = capture_sets(catalog, lineages(catalog))[cohort(6, attempt=1)]
    assert "two jobs wrote under one attempt" in found.problems[0]
