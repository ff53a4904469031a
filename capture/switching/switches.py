"""The switches of capture, read from the environment once, at start."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from trajreplay.capture.switching.selection import Selection
from trajreplay.capture.switching.texts import READERS, flag
from trajreplay.capture.switching.texts import attempt as read_attempt
from trajreplay.capture.switching.triggers import Triggers
from trajreplay.schema.attempt import job_in
from trajreplay.schema.errors import SchemaError, listed, shown
from trajreplay.schema.identity import check_id
from trajreplay.schema.policy import Redaction

PREFIX, ALIAS = "TRAJREPLAY_CAPTURE", "RELAX_REPLAY_CAPTURE"
# Relax names no run, and a folder for its own files, which a lake does not mind.
_ALIAS_LAKE, _ALIAS_RUN = f"{ALIAS}_DIR", "relax"
LAKE, RUN_ID, ATTEMPT = "TRAJREPLAY_LAKE", "TRAJREPLAY_RUN_ID", "TRAJREPLAY_ATTEMPT"
# Fields of `Switches` that are no text, what they are, and in words.
_AMOUNTS: Mapping[str, str] = {
    **dict.fromkeys(("queue_bytes", "device_bytes", "ring_bytes"), "bytes, a whole number from 0"),
    **dict.fromkeys(("wait_s", "close_s"), "seconds, a number from 0 to 1e9"),
    "keep_last": "steps, a whole number from 0",
}
_KINDS: Mapping[str, type] = {
    "selection": Selection,
    "triggers": Triggers,
    "gradients": bool,
    "strict": bool,
    "spool": str,
}
_LONGEST_S = 1e9


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
        triggers: When they are written; none but the default without steps to hold.
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
        problems = [
            f"{name} is {shown(getattr(self, name))}, expected {what}"
            for name, what in _AMOUNTS.items()
            if not _is_amount(getattr(self, name), whole=not name.endswith("_s"))
        ] + [
            f"{name} is {shown(getattr(self, name))}, expected a {kind.__name__}"
            for name, kind in _KINDS.items()
            if not isinstance(getattr(self, name), kind)
        ]
        if not problems and not self.keep_last and self.triggers != Triggers():
            problems.append(
                f"keep_last is 0 and triggers is {self.triggers.text!r}, expected steps to hold"
            )
        if problems:
            raise SchemaError(
                f"capture cannot start:\n  {listed(problems)}",
                hint="Correct these arguments of Switches.",
                problems=problems,
            )
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
        on = _read(switch, text, flag, problems)
        if not on and not problems:
            return None
        values: dict[str, Any] = {}
        for end, (name, text) in found.items():
            if end not in READERS:
                known = ", ".join(f"{PREFIX}_{one}" for one in READERS)
                problems.append(f"{name} is set, expected one of {known}")
                continue
            field_name, reader = READERS[end]
            values[field_name] = _read(name, text, reader, problems)
        if values.get("triggers") and values.get("keep_last", 0) == 0:
            problems.append(f"{found['TRIGGERS'][0]} is set, and {PREFIX}_KEEP_LAST holds no step")
        chosen = {name: values.pop(name, None) for name in ("steps", "rollouts")}
        values["lake"] = given.get(LAKE) or given.get(_ALIAS_LAKE)
        if not values["lake"]:
            problems.append(f"{LAKE} is not set")
        values["run_id"] = _run_id(given, problems, _ALIAS_RUN if switch == ALIAS else "")
        if attempt := given.get(ATTEMPT):
            values["attempt"] = _read(ATTEMPT, attempt, read_attempt, problems)
        if problems:
            raise SchemaError(
                f"capture is switched on and cannot start:\n  {listed(problems)}",
                hint=f"Correct the environment, or unset {switch} to train without capture.",
                problems=problems,
            )
        return cls(selection=Selection(**chosen), **values)


def _is_amount(value: object, *, whole: bool) -> bool:
    """Whether it is a number from 0 on; True and False are none."""
    if isinstance(value, bool) or not isinstance(value, Integral if whole else Real):
        return False
    return 0 <= float(value) <= (math.inf if whole else _LONGEST_S)


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


def _run_id(given: Mapping[str, str], problems: list[str], default: str) -> str:
    """The run as it is given, else after the job of the scheduler, else the default, if any."""
    if run_id := given.get(RUN_ID):
        _read(RUN_ID, run_id, lambda text: check_id("run_id", text), problems)
        return run_id
    scheduler, job = job_in(given)
    if job:
        return f"{scheduler}-{job}"
    if default:
        return default
    problems.append(f"{RUN_ID} is not set, and no scheduler's job is known to name the run after")
    return ""
