"""The ledger: fates of samples are events, and what was generated has to be accounted for."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cohorts import ROLLOUT_COLUMNS, record
from tests.helpers.recorded import captured, enabled, reasons, switched
from tests.helpers.scenes import drawn
from trajreplay import Lake, SampleRecord, Settings, capture
from trajreplay.capture import CaptureWarning, Recorder

FAULT_CASES = Path(__file__).parent.parent / "cases" / "fault_cases.json"
OTHERS = ["x-1", "x-2", "x-3"]


def roll_out(recorder: Recorder, tell: Callable[[Recorder, list[str]], None]) -> list[str]:
    """One rollout, and what is told of its samples."""
    samples = drawn()
    names = [one.sample_id for one in samples]
    columns: dict[str, Any] = {
        name: [one.columns[name] for one in samples] for name in ROLLOUT_COLUMNS
    }
    with recorder.rollout(0):
        tell(recorder, names)
        recorder.record(
            [record(one, ("micro_batch_id",), step=False) for one in samples],
            **columns,
        )
    return names


def healthy(recorder: Recorder, names: list[str]) -> None:
    recorder.note("generated", [*names, *OTHERS])
    recorder.note("scored", names)
    recorder.note("consumed", names[:1])
    recorder.note("filtered", OTHERS[:2], "zero-std")
    recorder.note("buffered", OTHERS[2:])


def test_fates_are_events_and_add_up(lake: Lake) -> None:
    recorder = enabled(lake)
    names = roll_out(recorder, healthy)
    recorder.close()
    assert lake.replay().verdict == "pass"
    assert lake.validate().ok
    rows = Lake.open(lake.path).sql(
        "select event, count(*) as n, min(reason) as reason from events "
        "where sample_id is not null group by event order by event"
    )
    assert rows.arrow().to_pylist() == [
        {"event": "buffered", "n": 1, "reason": None},
        {"event": "consumed", "n": 1, "reason": None},
        {"event": "filtered", "n": 2, "reason": "zero-std"},
        {"event": "generated", "n": len(names) + 3, "reason": None},
        {"event": "scored", "n": len(names), "reason": None},
    ]


def lost(recorder: Recorder, names: list[str]) -> None:
    recorder.note("generated", [*names, *OTHERS])
    recorder.note("filtered", OTHERS[:2], "too-long")


def from_nowhere(recorder: Recorder, names: list[str]) -> None:
    recorder.note("generated", names[1:])


def filtered_and_there(recorder: Recorder, names: list[str]) -> None:
    recorder.note("filtered", names[:1], "zero-std")


def filtered_from_nowhere(recorder: Recorder, names: list[str]) -> None:
    recorder.note("generated", names)
    recorder.note("filtered", OTHERS, "zero-std")


@pytest.mark.parametrize(
    ("tell", "told"),
    [
        (lost, "1 samples were generated, and neither recorded nor filtered nor buffered: x-3"),
        (from_nowhere, "1 samples are recorded, and were not generated"),
        (filtered_and_there, "1 samples were filtered, and are among those recorded"),
        (filtered_from_nowhere, "3 samples were scored or filtered, and not generated"),
    ],
)
def test_what_does_not_add_up_diverges(
    lake: Lake, tell: Callable[[Recorder, list[str]], None], told: str
) -> None:
    recorder = enabled(lake)
    roll_out(recorder, tell)
    recorder.close()
    report = lake.replay()
    assert report.first_divergent_stage == "sample"
    (found,) = [one for one in report.cohorts[0].findings if one.check == "ledger"]
    assert found.message.startswith(told)


@pytest.mark.parametrize(
    ("fate", "reason"),
    [
        ("lost", ""),
        ("filtered", ""),
        ("filtered", "The prompt said: hello"),
        ("scored", "A b"),
        ("hello you", ""),
    ],
)
def test_a_reason_that_is_a_text_never_reaches_the_lake(lake: Lake, fate: str, reason: str) -> None:
    recorder = enabled(lake, strict=False)
    with pytest.warns(CaptureWarning, match="note"):
        roll_out(recorder, lambda one, names: one.note(fate, names, reason))
    recorder.close()
    assert [one.status for one in captured(lake)] == ["dropped"]
    assert len(reasons(lake)) == 1
    for file in Path(lake.path).rglob("*"):
        assert not file.is_file() or b"hello" not in file.read_bytes()


def case(name: str) -> dict[str, Any]:
    (found,) = [one for one in json.loads(FAULT_CASES.read_text()) if one["id"] == name]
    return dict(found)


def prompts(numbers: Sequence[int]) -> list[SampleRecord]:
    """A sample of each of some prompts."""
    return [SampleRecord(f"prompt-{one}", 1, 1, [1], group_id=f"g-{one}") for one in numbers]


def names(numbers: Sequence[int]) -> list[str]:
    return [one.sample_id for one in prompts(numbers)]


def recording(lake: Lake, **options: Any) -> Recorder:
    recorder = capture.enable(
        switched(lake), settings=Settings(), rollout_stages=["sample"], **options
    )
    assert isinstance(recorder, Recorder)
    return recorder


def named(lake: Lake) -> set[str]:
    return {
        fault
        for one in lake.explain().explanations
        for hypothesis in one.hypotheses
        for fault in hypothesis.faults
    }


@pytest.mark.parametrize("side", ["right", "wrong"])
def test_completed_groups_that_are_thrown_away_are_missed(lake: Lake, side: str) -> None:
    """K-075: what is ready beyond a batch is left in the queue, or is lost."""
    told = case("K-075")
    queued = told[side]["left_in_queue"]
    recorder = recording(lake)
    with recorder.rollout(0):
        recorder.note("generated", names(told["inputs"]["groups_ready"]))
        if queued:
            recorder.note("buffered", names(queued))
        recorder.record(prompts(told[side]["returned"]))
    recorder.close()
    report = lake.replay()
    if side == "right":
        assert report.verdict != "diverged"
        assert not named(lake)
        return
    assert report.first_divergent_stage == told["stage"]
    (found,) = [one for one in report.cohorts[0].findings if one.check == "ledger"]
    what, _, which = found.message.partition(": ")
    assert what.endswith("generated, and neither recorded nor filtered nor buffered")
    assert which.split() == names(told["wrong"]["lost"])
    assert named(lake) == {"ledger"}


@pytest.mark.parametrize("side", ["right", "wrong"])
def test_a_restart_that_skips_what_was_generated_is_told(lake: Lake, side: str) -> None:
    """K-076: half a generation is trained on, the rest is in a buffer that no checkpoint holds."""
    told = case("K-076")
    given, config = told["inputs"]["prompt_ids"], told["config"]
    made, batch = given[: config["generation_batch"]], config["train_batch"]
    recorder = recording(lake)
    with recorder.rollout(0):
        recorder.note("generated", names(made))
        recorder.note("buffered", names(made[batch:]))
        recorder.record(prompts(made[:batch]))
    recorder.close()
    following = told[side]["next_after_resume"]
    recorder = recording(lake, attempt=1, resume_rollout_id=1)
    with recorder.rollout(1):
        new = [one for one in following if one not in made]
        if new:
            recorder.note("generated", names(new))
        recorder.record(prompts(following))
    recorder.close()
    report = lake.replay()
    assert report.verdict != "diverged"
    found = [one for cohort in report.cohorts for one in cohort.findings if "ledger" in one.check]
    assert [(one.check, one.stage) for one in found] == (
        [] if side == "right" else [("ledger.restart", told["stage"])]
    )
    assert named(lake) == (set() if side == "right" else {"ledger.restart"})
    skipped = names(told["wrong"]["never_trained"])
    assert all(one.message.partition(": ")[2].split() == skipped for one in found)


def test_a_buffer_that_is_only_half_used_after_a_restart_is_none_that_was_lost(lake: Lake) -> None:
    recorder = recording(lake)
    with recorder.rollout(0):
        recorder.note("generated", names([0, 1, 2]))
        recorder.note("buffered", names([1, 2]))
        recorder.record(prompts([0]))
    recorder.close()
    recorder = recording(lake, attempt=1, resume_rollout_id=1)
    for rollout, (new, given) in enumerate([([3], [1, 3]), ([4], [4])], 1):
        with recorder.rollout(rollout):
            recorder.note("generated", names(new))
            recorder.record(prompts(given))
    recorder.close()
    assert not named(lake)
