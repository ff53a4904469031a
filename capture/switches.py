"""The switches of capture, read from the environment once, at start."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trajreplay.capture.selection import Selection
from trajreplay.capture.triggers import Triggers
from trajreplay.schema.errors import SchemaError, listed
from trajreplay.schema.identity import check_id
from trajreplay.schema.policy import Redaction

PREFIX, ALIAS = "TRAJREPLAY_CAPTURE", "RELAX_REPLAY_CAPTURE"
# Relax names no run, and a folder for its own files, which a lake does not mind.
_ALIAS_LAKE, _ALIAS_RUN = f"{ALIAS}_DIR", "relax"
LAKE, RUN_ID, ATTEMPT = "TRAJREPLAY_LAKE", "TRAJREPLAY_RUN_ID", "TRAJREPLAY_ATTEMPT"
_JOBS = {"SLURM_JOB_ID": "slurm", "LSB_JOBID": "lsf", "PBS_JOBID": "pbs"}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_BYTES = re.compile(r"(\d{1,15})([KMG]?)i?B?")
_SECONDS = re.compile(r"\d{1,9}(\.\d{1,6})?")
_FLAGS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False, "": False}


@dataclass(frozen=True)
class Switches:
    """What is captured, where to, and how much it may cost.

    Args:
        lake: The lake; made where it is missing.
        run_id: The run. Chained jobs of one training share it, so it is not a job's number.
        selection: The rollouts and steps that are captured.
        redaction: What may be kept of each text field; all text is dropped where nothing is said.
        queue_bytes: Copies that may wait to be written. Bytes.
        device_bytes: Device memory that copies from there may take, so that they are made beside
            the training; none for copies in its own stream. Bytes.
        wait_s: How long training may wait for room in that queue before a capture is dropped.
        close_s: How long the end of the program may wait for what is not yet written.
        keep_last: Steps that are held in memory, with the rollouts that they consumed from, and
            written when a trigger fires; 0 for none.
        ring_bytes: Most that they take, and rollouts whose consumer is not known yet. Bytes.
        triggers: When they are written.
        gradients: Also record what is propagated back to each log-probability of a policy loss. A
            step then ends after its last backward pass.
        spool: A folder on a disk of this machine, which captures go to first, to be brought into
            the lake in the background, several in one file; none for the lake itself.
        strict: Raise what would only be warned of. For tests, never for production.
        attempt: The attempt, where whoever started the job reserved one, as certify does.
    """

    lake: str
    run_id: str
    selection: Selection = field(default_factory=Selection)
    redaction: Mapping[str, str] = field(default_factory=dict)
    queue_bytes: int = 1 << 28
    device_bytes: int = 0
    wait_s: float = 0.0
    close_s: float = 30.0
    keep_last: int = 0
    ring_bytes: int = 1 << 28
    triggers: Triggers = field(default_factory=Triggers)
    gradients: bool = False
    spool: str = ""
    strict: bool = False
    attempt: int | None = None

    def __post_init__(self) -> None:
        check_id("run_id", self.run_id)
        Redaction(self.redaction).check_key()

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Switches | None:
        """Read the switches, or None where capture is off.

        Args:
            environ: The environment; that of the process if omitted. `RELAX_REPLAY_CAPTURE` and
                what begins with it are other names of `TRAJREPLAY_CAPTURE...`; the folder
                `RELAX_REPLAY_CAPTURE_DIR` is the lake where no other one is named, and a run
                switched on by Relax's name is called relax where nothing says how.

        Raises:
            SchemaError: A value is malformed, a switch is unknown or set twice, or there is no
                lake or run; all problems at once.

        >>> Switches.from_env({}) is None
        True
        >>> on = {"TRAJREPLAY_CAPTURE": "1", "TRAJREPLAY_LAKE": "lake", "TRAJREPLAY_RUN_ID": "r"}
        >>> Switches.from_env(on | {"TRAJREPLAY_CAPTURE_STEPS": "every:10"}).selection.steps
        'every:10'
        """
        given = os.environ if environ is None else environ
        problems: list[str] = []
        found = _switches(given, problems)
        switch, text = found.pop("", (PREFIX, ""))
        on = _read(switch, text, _flag, problems)
        if not on and not problems:
            return None
        values: dict[str, Any] = {}
        for end, (name, text) in found.items():
            if end not in _READERS:
                known = ", ".join(f"{PREFIX}_{one}" for one in _READERS)
                problems.append(f"{name} is set, expected one of {known}")
                continue
            field_name, reader = _READERS[end]
            values[field_name] = _read(name, text, reader, problems)
        chosen = {name: values.pop(name, None) for name in ("steps", "rollouts")}
        values["lake"] = given.get(LAKE) or given.get(_ALIAS_LAKE)
        if not values["lake"]:
            problems.append(f"{LAKE} is not set")
        values["run_id"] = _run_id(given, problems, _ALIAS_RUN if switch == ALIAS else "")
        if attempt := given.get(ATTEMPT):
            values["attempt"] = _read(ATTEMPT, attempt, _attempt, problems)
        if problems:
            raise SchemaError(
                f"capture is switched on and cannot start:\n  {listed(problems)}",
                hint=f"Correct the environment, or unset {switch} to train without capture.",
                problems=problems,
            )
        return cls(selection=Selection(**chosen), **values)


def _switches(given: Mapping[str, str], problems: list[str]) -> dict[str, tuple[str, str]]:
    """Switches by the end of their name, under either beginning: the name that is set, its text."""
    found: dict[str, tuple[str, str]] = {}
    for prefix in (ALIAS, PREFIX):
        for name, text in given.items():
            if (name != prefix and not name.startswith(f"{prefix}_")) or name == _ALIAS_LAKE:
                continue
            end = name.removeprefix(prefix).removeprefix("_")
            other, before = found.setdefault(end, (name, text))
            if before != text:
                problems.append(f"{other} is {before!r} and {name} is {text!r}: set one")
    return found


def _read(name: str, text: str, reader: Callable[[str], Any], problems: list[str]) -> Any:
    try:
        return reader(text.strip())
    except SchemaError as error:
        problems.append(f"{name}: {error.message}")
    except ValueError as error:
        problems.append(f"{name} is {text!r}, expected {error}")
    return None


def _flag(text: str) -> bool:
    if text.lower() not in _FLAGS:
        raise ValueError("1 or 0")
    return _FLAGS[text.lower()]


def _bytes(text: str) -> int:
    if not (found := _BYTES.fullmatch(text.upper().replace("IB", "B"))):
        raise ValueError("bytes, such as 268435456 or 256M")
    return int(found[1]) * _UNITS[found[2]]


def _seconds(text: str) -> float:
    if not _SECONDS.fullmatch(text):
        raise ValueError("seconds, such as 0.5")
    return float(text)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise ValueError("a number of steps")
    return int(text)


def _attempt(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError("a restart's number, the first is 0")
    return int(text)


def _spool(text: str) -> str:
    if "://" in text:
        raise ValueError("a folder of this machine")
    return text


def _redaction(text: str) -> dict[str, str]:
    rules: dict[str, str] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, separator, rule = part.partition("=")
        if not separator or name in rules:
            raise ValueError(
                "rules such as prompt=keyed-hash,response=truncate:64, one for each field"
            )
        rules[name] = rule
    Redaction(rules).check_key()
    return rules


def _steps(text: str) -> str:
    Selection(steps=text)
    return text


def _rollouts(text: str) -> str:
    Selection(rollouts=text)
    return text


_READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "STEPS": ("steps", _steps),
    "ROLLOUTS": ("rollouts", _rollouts),
    "REDACTION": ("redaction", _redaction),
    "QUEUE_BYTES": ("queue_bytes", _bytes),
    "DEVICE_BYTES": ("device_bytes", _bytes),
    "WAIT_S": ("wait_s", _seconds),
    "CLOSE_S": ("close_s", _seconds),
    "KEEP_LAST": ("keep_last", _count),
    "RING_BYTES": ("ring_bytes", _bytes),
    "TRIGGERS": ("triggers", Triggers),
    "GRADIENTS": ("gradients", _flag),
    "SPOOL": ("spool", _spool),
    "STRICT": ("strict", _flag),
}


def _run_id(given: Mapping[str, str], problems: list[str], default: str) -> str:
    """The run as it is given, else after the job of the scheduler, else the default, if any."""
    if run_id := given.get(RUN_ID):
        _read(RUN_ID, run_id, lambda text: check_id("run_id", text), problems)
        return run_id
    for variable, scheduler in _JOBS.items():
        if job := given.get(variable):
            return f"{scheduler}-{job}"
    if default:
        return default
    problems.append(f"{RUN_ID} is not set, and no scheduler's job is known to name the run after")
    return ""
