"""A lake followed while it is written: each cohort once, when it is whole, and never twice."""

from itertools import islice
from pathlib import Path

import pytest

from tests.helpers.captures import entries_of, record
from tests.helpers.mutate import data_file
from tests.helpers.small_lakes import rollout
from trajreplay import Lake, QueryError, RecomputeConfig
from trajreplay.query.manifest.catalog import Cohort
from trajreplay.stages.watch import Watch, load_state, save_state


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def poll(watch: Watch) -> list[tuple[int, int | None, str]]:
    found = list(watch.poll())
    for one in found:
        watch.done(one)
    return [(one.rollout_id, one.step_id, one.verdict) for one in found]


def test_a_cohort_is_reported_once_and_in_order(lake: Lake) -> None:
    watch = lake.watch()
    assert poll(watch) == []
    rollout(lake, 1, reward=5.5)
    rollout(lake, 0)
    assert poll(watch) == [(0, None, "pass"), (1, None, "diverged")]
    assert poll(watch) == []
    rollout(lake, 2)
    assert poll(watch) == [(2, None, "pass")]


def test_a_cohort_waits_for_all_its_ranks(lake: Lake) -> None:
    watch = lake.watch()
    rollout(lake, 0, expected_ranks=[0, 1], ids=("s-0", "s-1"))
    assert poll(watch) == []
    assert watch.pending == 1
    rollout(lake, 0, rank=1, expected_ranks=[0, 1], ids=("s-2", "s-3"))
    assert [one[:2] for one in poll(watch)] == [(0, None)]
    assert watch.pending == 0


def test_what_was_not_handed_on_is_reported_again(lake: Lake) -> None:
    rollout(lake, 0)
    watch = lake.watch()
    assert len(list(watch.poll())) == 1
    assert poll(watch) == [(0, None, "pass")]


def test_a_report_does_not_wait_for_those_of_later_rollouts(lake: Lake) -> None:
    for rollout_id in range(12):
        rollout(lake, rollout_id)
        rollout(lake, rollout_id, step_id=0)
    whole = poll(lake.watch())
    assert whole == [(one, step, "pass") for one in range(12) for step in (None, 0)]
    coming = lake.watch().poll()
    assert [(one.rollout_id, one.step_id) for one in islice(coming, 2)] == [(0, None), (0, 0)]
    entries = [one for one in entries_of(lake) if one.key.rollout_id == 11]
    for entry in entries:
        data_file(lake, entry.key).unlink()
    verdicts = {(one.rollout_id, one.step_id): one.verdict for one in coming}
    assert verdicts.pop((11, None)) == "refused", "it was not read before"
    assert verdicts.pop((11, 0)) == "refused"
    assert set(verdicts.values()) == {"pass"}


def test_ranks_that_contradict_each_other_are_refused_and_not_waited_for(lake: Lake) -> None:
    rollout(lake, 0, expected_ranks=[0, 1])
    rollout(lake, 0, rank=1, expected_ranks=[0, 1, 2], ids=("s-2", "s-3"))
    assert poll(lake.watch()) == [(0, None, "refused")]


def test_a_rank_that_gave_its_capture_up_is_not_waited_for(lake: Lake) -> None:
    rollout(lake, 0, expected_ranks=[0, 1])
    record(
        lake,
        lambda capture: capture.drop("no room"),
        rollout_id=0,
        rank=1,
        expected_ranks=[0, 1],
        settings=RecomputeConfig(n_samples_per_prompt=2),
    )
    assert poll(lake.watch()) == [(0, None, "refused")]


def test_a_run_that_has_not_begun_is_waited_for(lake: Lake) -> None:
    watch = lake.watch("b", attempt=0)
    rollout(lake, 0, run_id="a")
    assert poll(watch) == []
    rollout(lake, 0, run_id="b")
    assert poll(watch) == [(0, None, "pass")]


def test_a_step_is_judged_without_its_rollout_being_judged_again(lake: Lake) -> None:
    watch = lake.watch()
    rollout(lake, 0)
    assert poll(watch) == [(0, None, "pass")]
    rollout(lake, 0, step_id=0)
    assert [one[:2] for one in poll(watch)] == [(0, 0)]


def test_a_step_waits_for_the_rollout_that_it_consumed(lake: Lake) -> None:
    watch = lake.watch()
    rollout(lake, 0, expected_ranks=[0, 1])
    rollout(lake, 0, step_id=0)
    assert poll(watch) == []
    assert watch.pending == 2
    rollout(lake, 0, rank=1, expected_ranks=[0, 1], ids=("s-2", "s-3"))
    assert [one[:2] for one in poll(watch)] == [(0, None), (0, 0)]


def test_a_step_that_comes_first_waits_for_its_rollout_and_is_compared_with_it(
    lake: Lake,
) -> None:
    watch = lake.watch()
    rollout(lake, 0, step_id=0)
    assert poll(watch) == []
    assert watch.pending == 1
    rollout(lake, 0)
    found = {one.step_id: one for one in watch.poll()}
    assert list(found) == [None, 0]
    assert [one.check for one in found[0].findings] == [], "handoffs were compared"


@pytest.mark.parametrize("wait", [0, 1, 4])
def test_a_rollout_that_never_comes_is_waited_for_a_stated_number_of_looks(
    lake: Lake, wait: int
) -> None:
    watch = lake.watch(wait=wait)
    rollout(lake, 0, step_id=0)
    looks = [[one[:2] for one in poll(watch)] for _ in range(wait + 2)]
    assert looks == [*[[]] * wait, [(0, 0)], []]
    assert watch.pending == 0


def test_what_was_seen_before_is_not_reported(lake: Lake) -> None:
    rollout(lake, 0, run_id="a")
    rollout(lake, 1, run_id="a")
    watch = lake.watch(seen=[Cohort("a", 0, 0, None)])
    assert poll(watch) == [(1, None, "pass")]


def test_a_state_comes_back_as_it_was(tmp_path: Path) -> None:
    seen = {Cohort("a", 0, 3, None), Cohort("ü", 1, 3, 7)}
    path = tmp_path / "state.json"
    assert load_state(path, "lake") == set()
    save_state(path, "lake", seen)
    save_state(path, "lake", seen)
    assert load_state(path, "lake") == seen
    assert [one.name for one in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": 2, "lake": "x", "seen": []}',
        '{"format": 1, "lake": "x", "seen": [[1]]}',
    ],
)
def test_what_is_no_state_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "state.json"
    path.write_text(text)
    with pytest.raises(QueryError, match="no state of a watch"):
        load_state(path, "x")


def test_the_state_of_another_lake_is_refused(tmp_path: Path) -> None:
    save_state(tmp_path / "state.json", "one", set())
    with pytest.raises(QueryError, match="a watch of one, expected of other"):
        load_state(tmp_path / "state.json", "other")
