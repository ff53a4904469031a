from pathlib import Path
from typing import Any

import pytest

from tests.helpers.captures import record, sample
from tests.helpers.mutate import data_file, entry_file
from tests.helpers.queried import (
    catalog_of,
    cohort,
    opened_files,
    write_capture,
    write_rollout,
    write_step,
)
from trajreplay import Lake, ParallelCoordinates, QueryError
from trajreplay.query import Cohort, Selected, Selection, select


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Rollouts 0 to 2, of 4 samples in groups of 2, with a step each."""
    lake = Lake.create(tmp_path_factory.mktemp("select") / "lake")
    for rollout in range(3):
        write_rollout(lake, rollout)
        write_step(lake, rollout, 0)
    return lake


@pytest.fixture
def own(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def chosen(lake: Lake, **conditions: Any) -> Selected:
    return select(catalog_of(lake), Selection(**conditions))


def rows(selected: Selected) -> dict[Cohort, dict[int, list[bool] | None]]:
    return {
        one.captures.cohort: {
            rank: None if mask is None else mask.to_pylist() for rank, mask in one.rows.items()
        }
        for one in selected
    }


ALL = {0: None, 1: None}


def test_no_condition_selects_the_whole_lake_in_report_order(lake: Lake) -> None:
    selected = chosen(lake)
    assert list(selected.cohorts) == [
        cohort(0), cohort(0, 0), cohort(1), cohort(1, 0), cohort(2), cohort(2, 0)
    ]  # fmt: skip
    assert all(one.whole and one.count == 4 for one in selected)


def test_a_rollout_selects_itself_and_its_steps(lake: Lake) -> None:
    assert rows(chosen(lake, rollouts=(1,))) == {cohort(1): ALL, cohort(1, 0): ALL}
    assert list(chosen(lake, where="rollout_id = 1").cohorts) == [cohort(1), cohort(1, 0)]


def test_a_step_selects_itself_alone(lake: Lake) -> None:
    assert rows(chosen(lake, steps=((1, 0),))) == {cohort(1, 0): ALL}


def test_kinds_combine_by_and_values_of_a_kind_by_or(lake: Lake) -> None:
    both = chosen(lake, rollouts=(0, 2), samples=("s-0", "s-3"), where="reward > 100")
    assert rows(both) == {
        cohort(2): {0: [True, False], 1: [False, True]},
        cohort(2, 0): {0: [True, False], 1: [False, True]},
    }


def test_rows_are_selected_by_rank_group_sample_and_micro_batch(lake: Lake) -> None:
    step = {"steps": ((0, 0),)}
    key = cohort(0, 0)
    assert rows(chosen(lake, ranks=(1,), **step)) == {key: {1: None}}
    assert rows(chosen(lake, groups=("g-0",), **step)) == {key: {0: None}}
    assert rows(chosen(lake, samples=("s-2",), **step)) == {key: {1: [True, False]}}
    assert rows(chosen(lake, batches=("mb-0001",), **step)) == {
        key: {0: [False, True], 1: [False, True]}
    }
    assert rows(chosen(lake, batches=("mb-0001",), ranks=(0,), **step)) == {key: {0: [False, True]}}


def test_a_selection_that_is_all_of_a_set_is_whole(lake: Lake) -> None:
    (one,) = chosen(lake, steps=((0, 0),), groups=("g-0", "g-1"))
    assert one.whole
    (one,) = chosen(lake, steps=((0, 0),), groups=("g-0",))
    assert not one.whole
    assert one.count == 2


@pytest.mark.parametrize(
    ("conditions", "message"),
    [
        ({"rollouts": (0,), "steps": ((0, 0),)}, "--step R:S and --rollout R were both given"),
        ({"batches": ("mb-0000",)}, "--batch was given without --step"),
        ({"stages": ("lss",)}, "unknown stage 'lss', expected one of sample"),
        ({"run": "x"}, "no run 'x'"),
        ({"attempt": 3}, "no attempt 3"),
        ({"rollouts": (0, 99)}, "--rollout 99 selects nothing"),
        ({"steps": ((0, 7),)}, "--step 0:7 selects nothing"),
        ({"samples": ("s-0", "s-99")}, "--sample s-99 selects nothing"),
        ({"groups": ("g-9",)}, "--group g-9 selects nothing"),
        ({"ranks": (5,)}, "--rank 5 selects nothing"),
        ({"steps": ((0, 0),), "batches": ("mb-0009",)}, "--batch mb-0009 selects nothing"),
        ({"where": "reward > 1e9"}, "selects nothing"),
        ({"where": "nope = 1"}, "no column 'nope'"),
        ({"where": "rollout_id = 1", "rollouts": (0,)}, "selects nothing"),
        ({"samples": ("s-0",), "ranks": (1,)}, "--sample s-0 selects nothing"),
    ],
)
def test_what_is_wrong_or_selects_nothing_is_an_error(
    lake: Lake, conditions: dict[str, Any], message: str
) -> None:
    with pytest.raises(QueryError, match=message):
        chosen(lake, **conditions)


def test_an_empty_lake_selects_nothing(own: Lake) -> None:
    with pytest.raises(QueryError, match="selects nothing: looked at 0 capture sets in "):
        chosen(own)


WHERE = "--where 'reward > 1e9'"


@pytest.mark.parametrize(
    ("conditions", "subject", "looked_at", "asked"),
    [
        ({"where": "reward > 1e9", "steps": ((1, 0),)}, f"{WHERE} --step 1:0", "1 capture set", ""),
        (
            {"where": "reward > 1e9", "run": "r", "attempt": 0, "rollouts": (0, 1), "ranks": (1,)},
            f"{WHERE} --run r --attempt 0 --rollout 0 --rollout 1 --rank 1",
            "4 capture sets",
            "",
        ),
        (
            {"rollouts": (0, 99), "groups": ("g 0",)},
            "--rollout 99",
            "6 capture sets",
            " for --rollout 0 --rollout 99 --group 'g 0'",
        ),
        ({"steps": ((1, 7),)}, "--step 1:7", "6 capture sets", ""),
        (
            {"rollouts": (1,), "samples": ("s-0", "s-1", "s-2", "s-3", "s-99")},
            "--sample s-99",
            "2 capture sets",
            " for --rollout 1 --sample s-0 --sample s-1 --sample s-2 (and 2 more)",
        ),
        (
            {"steps": ((0, 0),), "batches": ("mb-0009",)},
            "--batch mb-0009",
            "1 capture set",
            " for --step 0:0 --batch mb-0009",
        ),
        ({"ranks": (5,)}, "--rank 5", "6 capture sets", ""),
    ],
)
def test_a_selection_of_nothing_repeats_what_was_asked_and_what_was_looked_at(
    lake: Lake, conditions: dict[str, Any], subject: str, looked_at: str, asked: str
) -> None:
    with pytest.raises(QueryError) as caught:
        chosen(lake, **conditions)
    assert caught.value.message == (
        f"{subject} selects nothing: looked at {looked_at} in {lake.path}{asked}"
    )
    assert caught.value.hint == "To list what is there: trajreplay info"


def test_only_ids_are_read_and_only_of_the_selected_captures(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen(lake, where="rollout_id = 0")
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 0),
        ({"rollouts": (1,)}, 0),
        ({"rollouts": (1,), "samples": ("s-0",)}, 4),
        ({"where": "rollout_id = 1"}, 0),
        ({"where": "rollout_id = 1 and reward > 0"}, 4),
        ({"steps": ((1, 0),), "ranks": (0,)}, 0),
    ]
    for conditions, count in cases:
        with opened_files(monkeypatch) as opened:
            list(chosen(lake, **conditions))
        assert len(opened) == count, conditions


def test_incomplete_sets_are_selected_so_that_they_can_be_refused(own: Lake) -> None:
    write_rollout(own, 0, ranks=[0])
    every: list[dict[str, Any]] = [{}, {"rollouts": (0,)}, {"where": "reward >= 0"}]
    for conditions in [*every, {"samples": ("s-0",)}]:
        (one,) = chosen(own, **conditions)
        assert "no capture of rank 1" in one.captures.gaps[0]


def test_a_rank_does_not_bypass_completeness(own: Lake) -> None:
    write_rollout(own, 0, ranks=[0])
    (one,) = chosen(own, ranks=(0,))
    assert not one.captures.complete


def test_sets_that_cannot_be_searched_are_selected_with_the_reason(own: Lake) -> None:
    write_rollout(own, 0)
    entries = write_rollout(own, 1)
    data_file(own, entries[0].key).write_bytes(b"")
    for conditions in ({"where": "reward = 0"}, {"samples": ("s-0",)}):
        found = {one.captures.cohort: one.problems for one in chosen(own, **conditions)}
        assert not found[cohort(0)]
        assert "has 0 bytes" in found[cohort(1)][0]
    entry_file(own, entries[1].key).write_bytes(b"{}")
    selected = chosen(own, where="reward = 0")
    assert cohort(1) in selected.cohorts


def test_of_a_name_that_only_a_damaged_file_can_hold_nothing_is_said(own: Lake) -> None:
    entries = write_rollout(own, 0)
    data_file(own, entries[1].key).write_bytes(b"")
    (one,) = chosen(own, samples=("s-3",))
    assert one.problems


def test_a_rank_without_rows_does_not_make_a_selection_partial(own: Lake) -> None:
    write_capture(own, 0, rollout_id=0)
    write_capture(own, 1, rollout_id=0, size=0)
    (one,) = chosen(own, where="reward >= 0")
    assert one.whole


def test_the_rank_of_a_copy_selects_its_owner(own: Lake) -> None:
    for rank in (0, 1):
        record(
            own,
            lambda capture: capture.samples([sample(0)]),
            rank=rank,
            expected_ranks=[0, 1],
            parallel=ParallelCoordinates(tensor_rank=rank, tensor_size=2),
        )
    (one,) = chosen(own, ranks=(1,))
    assert one.rows == {0: None}


def test_attempts_follow_the_lineage(own: Lake) -> None:
    for rollout in (0, 1):
        write_rollout(own, rollout)
    write_rollout(own, 1, attempt=1, resumed_from=(0, 1))
    assert list(chosen(own).cohorts) == [cohort(0), cohort(1, attempt=1)]
    assert list(chosen(own, attempt=0).cohorts) == [cohort(0), cohort(1)]
    assert list(chosen(own, attempt=1, where="rollout_id = 1").cohorts) == [cohort(1, attempt=1)]


def test_runs_are_told_apart(own: Lake) -> None:
    write_rollout(own, 0)
    write_rollout(own, 0, run_id="other")
    assert list(chosen(own, rollouts=(0,)).cohorts) == [cohort(0, run="other"), cohort(0)]
    assert list(chosen(own, run="r", where="reward >= 0").cohorts) == [cohort(0)]
