"""The ledger: fates of samples are events, and what was generated has to be accounted for."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cohorts import ROLLOUT_COLUMNS, record
from tests.helpers.recorded import captured, enabled, reasons
from tests.helpers.scenes import drawn
from trajreplay import Lake
from trajreplay.capture import CaptureWarning, Recorder

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
