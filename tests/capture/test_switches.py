"""The switches: off unless switched on, and what is malformed fails at start, all at once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.recorded import captured, record_rollout, record_step
from tests.helpers.scenes import WAY
from trajreplay import Lake, SchemaError, capture
from trajreplay.capture import Selection, Switches
from trajreplay.capture.switching.triggers import Triggers

ON = {"TRAJREPLAY_CAPTURE": "1", "TRAJREPLAY_LAKE": "lake", "TRAJREPLAY_RUN_ID": "r"}


def read(**switches: str) -> Switches:
    found = Switches.from_env(ON | {f"TRAJREPLAY_CAPTURE_{k}": v for k, v in switches.items()})
    assert found is not None
    return found


@pytest.mark.parametrize("text", [None, "", "0", "off", "False"])
def test_capture_is_off_unless_it_is_switched_on(text: str | None) -> None:
    rest = {name: value for name, value in ON.items() if name != "TRAJREPLAY_CAPTURE"}
    assert Switches.from_env(rest | ({} if text is None else {"TRAJREPLAY_CAPTURE": text})) is None


def test_what_is_not_said_has_a_default() -> None:
    assert Switches.from_env(ON) == Switches(lake="lake", run_id="r")


def test_every_switch_is_read() -> None:
    assert read(
        STEPS="0:0,3:1",
        ROLLOUTS="every:5",
        REDACTION="prompt=hash, response=truncate:16",
        QUEUE_BYTES="64M",
        DEVICE_BYTES="1M",
        WAIT_S="0.25",
        CLOSE_S="5",
        KEEP_LAST="3",
        RING_BYTES="1G",
        TRIGGERS="nonfinite,loss>5",
        GRADIENTS="1",
        STRICT="true",
    ) == Switches(
        lake="lake",
        run_id="r",
        selection=Selection(steps="0:0,3:1", rollouts="every:5"),
        redaction={"prompt": "hash", "response": "truncate:16"},
        queue_bytes=64 << 20,
        device_bytes=1 << 20,
        wait_s=0.25,
        close_s=5.0,
        keep_last=3,
        ring_bytes=1 << 30,
        triggers=Triggers("nonfinite,loss>5"),
        gradients=True,
        strict=True,
    )


@pytest.mark.parametrize(
    ("text", "size"), [("1000", 1000), ("2k", 2048), ("3MB", 3 << 20), ("1GiB", 1 << 30)]
)
def test_bytes_may_have_a_unit(text: str, size: int) -> None:
    assert read(QUEUE_BYTES=text).queue_bytes == size


def test_the_names_of_relax_are_understood() -> None:
    names = {"RELAX_REPLAY_CAPTURE": "1", "RELAX_REPLAY_CAPTURE_STEPS": "0:0"}
    rest = {name: ON[name] for name in ("TRAJREPLAY_LAKE", "TRAJREPLAY_RUN_ID")}
    found = Switches.from_env(rest | names)
    assert found is not None
    assert found.selection.steps == "0:0"
    with pytest.raises(SchemaError, match="set one"):
        Switches.from_env(ON | {"RELAX_REPLAY_CAPTURE": "0"})


def test_a_training_with_the_environment_of_relax_is_captured_beside_its_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "replay-0-0").mkdir()
    for name, text in {
        "RELAX_REPLAY_CAPTURE": "1",
        "RELAX_REPLAY_CAPTURE_DIR": str(tmp_path),
        "RELAX_REPLAY_CAPTURE_STEPS": "0:0",
        "RELAX_REPLAY_CAPTURE_ROLLOUTS": "0",
    }.items():
        monkeypatch.setenv(name, text)
    recorder = capture.enable_from_env(settings=WAY.short)
    for number in range(2):
        record_step(recorder, record_rollout(recorder, number), number)
    assert recorder.close()
    lake = Lake.open(tmp_path)
    found = [(one.key.run_id, one.key.rollout_id, one.key.step_id) for one in captured(lake)]
    assert sorted(found, key=str) == [("relax", 0, 0), ("relax", 0, None)]
    assert lake.validate().ok
    assert (tmp_path / "replay-0-0").is_dir()


RELAX = {"RELAX_REPLAY_CAPTURE": "1", "RELAX_REPLAY_CAPTURE_DIR": "bundles"}


@pytest.mark.parametrize(
    ("more", "lake", "run"),
    [
        ({}, "bundles", "relax"),
        ({"TRAJREPLAY_LAKE": "lake"}, "lake", "relax"),
        ({"TRAJREPLAY_RUN_ID": "r"}, "bundles", "r"),
        ({"SLURM_JOB_ID": "7"}, "bundles", "slurm-7"),
    ],
    ids=str,
)
def test_what_is_named_goes_before_what_relax_says(
    more: dict[str, str], lake: str, run: str
) -> None:
    found = Switches.from_env(RELAX | more)
    assert found == Switches(lake=lake, run_id=run)


@pytest.mark.parametrize("prefix", ["TRAJREPLAY_CAPTURE", "RELAX_REPLAY_CAPTURE"])
@pytest.mark.parametrize(("switch", "text"), [("STEPS", "x"), ("STEPZ", "0"), ("WAIT_S", "-")])
def test_a_switch_is_named_as_it_was_set(prefix: str, switch: str, text: str) -> None:
    with pytest.raises(SchemaError) as caught:
        Switches.from_env(RELAX | {f"{prefix}_{switch}": text})
    (problem,) = caught.value.facts["problems"]
    assert problem.startswith(f"{prefix}_{switch}")
    assert "unset RELAX_REPLAY_CAPTURE to" in caught.value.hint


@pytest.mark.parametrize(
    ("variable", "scheduler"), [("SLURM_JOB_ID", "slurm"), ("LSB_JOBID", "lsf")]
)
def test_a_run_without_a_name_is_called_after_its_job(variable: str, scheduler: str) -> None:
    rest = {name: ON[name] for name in ("TRAJREPLAY_LAKE", "TRAJREPLAY_CAPTURE")}
    found = Switches.from_env(rest | {variable: "4711"})
    assert found is not None
    assert found.run_id == f"{scheduler}-4711"


@pytest.mark.parametrize(
    ("switch", "text"),
    [
        ("STEPS", "3.5"),
        ("ROLLOUTS", "one"),
        ("REDACTION", "prompt"),
        ("REDACTION", "prompt=hash,prompt=drop"),
        ("REDACTION", "prompt=keyed-hash"),  # without a key
        ("REDACTION", "password=hash"),
        ("REDACTION", "prompt=encrypt"),
        ("QUEUE_BYTES", "-1"),
        ("QUEUE_BYTES", "1T"),
        ("WAIT_S", "soon"),
        ("CLOSE_S", "nan"),
        ("STRICT", "maybe"),
        ("KEEP_LAST", "-1"),
        ("TRIGGERS", "loss=5"),
        ("TRIGGERS", "signal:KILL"),
        ("STEPZ", "0:0"),
    ],
)
def test_what_is_malformed_is_refused_and_named(switch: str, text: str) -> None:
    with pytest.raises(SchemaError) as caught:
        read(**{switch: text})
    assert f"TRAJREPLAY_CAPTURE_{switch}" in caught.value.message
    assert "unset TRAJREPLAY_CAPTURE" in caught.value.hint


@pytest.mark.parametrize("switch", ["TRAJREPLAY_CAPTURE", "RELAX_REPLAY_CAPTURE"])
def test_triggers_without_steps_to_hold_are_refused(switch: str) -> None:
    """Nobody would take the signal, and it would end the program."""
    given = {**ON, f"{switch}_TRIGGERS": "signal:USR1"}
    with pytest.raises(SchemaError) as caught:
        Switches.from_env(given)
    (problem,) = caught.value.facts["problems"]
    assert f"{switch}_TRIGGERS is set" in problem
    assert "KEEP_LAST" in problem
    with pytest.raises(SchemaError, match="keep_last is 0 and triggers is 'loss>5'"):
        Switches(lake="lake", run_id="r", triggers=Triggers("loss>5"))
    found = Switches.from_env({**given, "TRAJREPLAY_CAPTURE_KEEP_LAST": "1"})
    assert found is not None
    assert found.triggers == Triggers("signal:USR1")


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(SchemaError) as caught:
        Switches.from_env({"TRAJREPLAY_CAPTURE": "yes please", "TRAJREPLAY_CAPTURE_WAIT_S": "x"})
    problems = caught.value.facts["problems"]
    names = ("TRAJREPLAY_CAPTURE", "TRAJREPLAY_CAPTURE_WAIT_S", "TRAJREPLAY_LAKE", "_RUN_ID")
    assert [one for one in names if not any(one in text for text in problems)] == []


def test_a_malformed_switch_fails_when_capture_is_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (ON | {"TRAJREPLAY_CAPTURE_STEPS": "x"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SchemaError, match="STEPS"):
        capture.enable_from_env()


AMOUNTS = ("queue_bytes", "device_bytes", "wait_s", "close_s", "keep_last", "ring_bytes")
NO_AMOUNT = st.one_of(
    st.booleans(),
    st.none(),
    st.text(max_size=3),
    st.integers(max_value=-1),
    st.sampled_from([float("nan"), float("-inf"), float("inf"), -0.5, [1], b"1", np.True_]),
)


@given(name=st.sampled_from(AMOUNTS), value=NO_AMOUNT)
def test_an_amount_that_is_none_is_refused_at_start_by_name(name: str, value: Any) -> None:
    with pytest.raises(SchemaError, match=f"{name} is .*, expected (bytes|seconds|steps)"):
        Switches(lake="lake", run_id="r", **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("queue_bytes", 0.5),
        ("keep_last", 1.0),
        ("gradients", 1),
        ("strict", "1"),
        ("spool", True),
        ("selection", "0:0"),
        ("triggers", "nonfinite"),
    ],
)
def test_what_is_of_another_kind_is_refused_at_start_by_name(name: str, value: Any) -> None:
    with pytest.raises(SchemaError, match=f"{name} is .*, expected"):
        Switches(lake="lake", run_id="r", **{name: value})


def test_all_that_is_wrong_is_told_at_once() -> None:
    wrong: Any = {"wait_s": True, "close_s": False, "strict": 1}
    with pytest.raises(SchemaError) as told:
        Switches(lake="lake", run_id="r", **wrong)
    assert all(f"{name} is {value}" in str(told.value) for name, value in wrong.items())


@pytest.mark.parametrize("make", [lambda one: Selection(steps=one), Triggers])
def test_a_selection_that_is_no_text_is_refused(make: Any) -> None:
    with pytest.raises(SchemaError, match="expected"):
        make(True)


def test_numbers_of_numpy_are_amounts() -> None:
    found = Switches("lake", "r", queue_bytes=np.int64(5), wait_s=np.float32(0.5))  # type: ignore[arg-type]
    assert (found.queue_bytes, found.wait_s) == (5, 0.5)
