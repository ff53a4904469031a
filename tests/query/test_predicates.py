from pathlib import Path

import pytest

from tests.helpers.mutate import data_file
from tests.helpers.queried import (
    catalog_of,
    cohort,
    opened_files,
    write_rollout,
    write_step,
)
from trajreplay import DatasetError, Lake, QueryError
from trajreplay.query import Cohort, matching_rows
from trajreplay.query.tables.visible import Visible


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    lake = Lake.create(tmp_path_factory.mktemp("where") / "lake")
    for rollout in range(3):
        write_rollout(lake, rollout)
        write_step(lake, rollout, 0)
    return lake


def matches(
    lake: Lake, where: str, *, tolerant: bool = False
) -> dict[Cohort, dict[int, list[int]]]:
    catalog = catalog_of(lake)
    found = matching_rows(Visible(catalog, only=set(catalog.by_cohort), tolerant=tolerant), where)
    return {
        one: {rank: sorted(rows.to_pylist()) for rank, rows in ranks.items()}
        for one, ranks in found.items()
    }


def test_an_expression_is_evaluated_on_rollouts_and_on_steps(lake: Lake) -> None:
    assert matches(lake, "rollout_id = 1 and reward > 101") == {
        cohort(1): {1: [0, 1]},
        cohort(1, 0): {1: [0, 1]},
    }


def test_a_column_that_a_table_lacks_makes_it_contribute_nothing(lake: Lake) -> None:
    assert list(matches(lake, "step_id = 0 and rollout_id = 2")) == [cohort(2, 0)]
    assert list(matches(lake, "source_rollout_id = 2 and rank = 0")) == [cohort(2, 0)]


def test_the_table_may_be_named(lake: Lake) -> None:
    assert list(matches(lake, "rollouts.rollout_id = 0")) == [cohort(0)]
    assert list(matches(lake, "steps.rollout_id = 0")) == [cohort(0, 0)]


def test_lists_and_functions_may_be_used(lake: Lake) -> None:
    assert matches(lake, "list_sum(log_probs) < -120 and rollout_id = 2") == {
        cohort(2): {1: [1]},
        cohort(2, 0): {1: [1]},
    }


def test_conditions_on_keys_are_applied_before_any_file_is_opened(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    matches(lake, "false")
    for where, count in [
        ("rollout_id = 1", 0),
        ("rollout_id = 1 and reward > 0", 4),
        ("rollout_id = 1 and reward is not null", 4),
        ("rank = 0 and rollout_id < 1 and sample_id = 's-0'", 2),
        ("run_id = 'other' and reward > 0", 0),
    ]:
        with opened_files(monkeypatch) as opened:
            matches(lake, where)
        assert len(opened) == count, where


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("", "is no expression"),
        ("-- nothing", "is no expression"),
        ("rollout_id = 1 and", "syntax error"),
        ("1=1) union select 9 --", "syntax error"),
        ("1=1; drop view samples", "more than one statement"),
        ("1 = 1 from steps", "FROM clause"),
        ("rollout_id = 1 order by 1", "modifier"),
        ("rollout_id = 1, step_id = 2", "single expression"),
        ("rollout_id", "is of type BIGINT"),
        ("null", "is of type"),
        ("'yes'", "is of type VARCHAR"),
        ("nope = 1", "no column 'nope' in rollouts or steps"),
        ("steps.nope = 1", "no column"),
        ("other.rollout_id = 1", "no column 'other'"),
        ("count(*) > 1", "aggregates"),
        ("row_number() over () = 1", "window functions"),
        ("unnest(log_probs) > 0", "UNNEST"),
        ("reward > (select avg(reward) from steps)", "found a subquery over steps"),
        ("exists(from rollouts)", "found a subquery over rollouts"),
        ("exists(select 1 from read_text('OUT') where content like 't%')", "tables of the lake"),
        ("(select content from read_text('OUT')) = 'x'", "tables of the lake"),
        ("rollout_id = ?", "Values were not provided"),
        ("sample_id = 3", "Could not convert"),
        ("lenn(log_probs) = 3", "lenn"),
        ("rollout_id = 1 \ud800", "valid text"),
    ],
)
def test_every_bad_predicate_is_one_clear_query_error(
    lake: Lake, tmp_path: Path, where: str, message: str
) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("top secret", encoding="utf-8")
    with pytest.raises(QueryError) as caught:
        matches(lake, where.replace("OUT", str(outside)))
    assert message in str(caught.value)
    assert "__duckdb" not in str(caught.value)


def test_a_damaged_file_ends_the_search_or_is_told(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    entries = write_rollout(lake, 0)
    write_rollout(lake, 1)
    data_file(lake, entries[0].key).write_bytes(b"")
    with pytest.raises(DatasetError, match="has 0 bytes"):
        matches(lake, "reward >= 0")
    assert list(matches(lake, "reward >= 0 and rank = 0", tolerant=True)) == [cohort(1)]
    assert matches(lake, "reward >= 0", tolerant=True)[cohort(0)] == {1: [0, 1]}
