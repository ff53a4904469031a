"""`Lake.attempts`: a row an attempt, also of one that captured nothing."""

from pathlib import Path

from tests.helpers.queried import write_rollout, write_step
from trajreplay import Lake
from trajreplay.query.manifest.attempts import NOTHING_CAPTURED
from trajreplay.schema.lakefile import open_lake
from trajreplay.writer.attempts import reserve_next_attempt


def test_an_attempt_that_captured_nothing_is_listed_beside_those_that_did(tmp_path: Path) -> None:
    store = open_lake(Lake.create(tmp_path / "lake").path)
    reserve_next_attempt(store, "empty")
    reserve_next_attempt(store, "empty", 4)
    lake = Lake.open(tmp_path / "lake")
    write_rollout(lake, 3, run_id="full")
    write_step(lake, 3, 0, run_id="full")
    rows = {
        (one["run_id"], one["attempt"]): one
        for one in Lake.open(tmp_path / "lake").attempts().to_pylist()
    }
    assert list(rows) == [("empty", 0), ("empty", 1), ("full", 0)]
    for attempt in (0, 1):
        one = rows["empty", attempt]
        assert one["problem"] == NOTHING_CAPTURED
        assert (one["first_rollout"], one["last_rollout"]) == (None, None)
        assert [one[name] for name in ("rollouts", "steps", "ranks", "bytes", "complete")] == [
            0
        ] * 5
    full = rows["full", 0]
    assert (full["rollouts"], full["steps"], full["first_rollout"], full["problem"]) == (
        *(1, 1, 3),
        None,
    )
    assert full["samples"] == sum(Lake.open(tmp_path / "lake").info()["samples"].to_pylist())


def test_one_run_can_be_shown(tmp_path: Path) -> None:
    store = open_lake(Lake.create(tmp_path / "lake").path)
    reserve_next_attempt(store, "a")
    reserve_next_attempt(store, "b")
    assert Lake.open(tmp_path / "lake").attempts("b")["run_id"].to_pylist() == ["b"]
