"""What a check of a gate is, and what its outcome says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from trajreplay.stages.gate.evidence import Evidence
from trajreplay.stages.gate.heartbeats import is_number
from trajreplay.stages.gate.policy import Policy

Phase = Literal["run", "captures", "signal", "mismatch", "routes", "replay", "sql"]
PHASES: tuple[Phase, ...] = get_args(Phase)
Parameters = Mapping[str, Any]
_STEPS = 'a whole number from 1 on, a list of steps such as ["0:0"], or "all"'


@dataclass(frozen=True)
class Judged:
    """The outcome of one check.

    Args:
        passed: Whether it holds; None where it is not judged.
        value: What was found.
        bound: What was demanded, in words.
        reason: Why it fails, or is not judged; of a pass, what it does not say.
    """

    passed: bool | None
    value: Any
    bound: str
    reason: str = ""


@dataclass(frozen=True)
class Parameter:
    """A parameter of a check.

    Args:
        name: Its key in the policy.
        doc: What it is.
        kind: `number`, `share` (0 to 1), `count` (from 1 on), `flag`, `text`, `steps` (so many, by
            name, or all), `list` (of what is allowed), or what else is allowed.
        allowed: The values it may have, if they can be listed.
    """

    name: str
    doc: str
    kind: Literal["number", "share", "count", "flag", "text", "steps", "list", "any"]
    allowed: tuple[str, ...] = ()

    def problem(self, value: Any) -> str:
        """What was expected instead; empty if the value is right."""
        if self.kind == "list":
            right = isinstance(value, list) and value and all(x in self.allowed for x in value)
            return "" if right else f"a list of {', '.join(self.allowed)}"
        if self.allowed:
            return "" if value in self.allowed else f"one of {', '.join(self.allowed)}"
        if self.kind == "count":
            return "" if type(value) is int and value >= 1 else "a whole number from 1 on"
        if self.kind == "share":
            return "" if is_number(value) and 0 <= value <= 1 else "a number from 0 to 1"
        if self.kind == "number":
            return "" if is_number(value) else "a finite number"
        if self.kind == "flag":
            return "" if isinstance(value, bool) else "true or false"
        if self.kind == "steps":
            named = isinstance(value, list) and value and all(map(_is_step, value))
            count = type(value) is int and value >= 1
            return "" if count or named or value == "all" else _STEPS
        if self.kind == "text":
            return "" if isinstance(value, str) and value else "text"
        return ""


@dataclass(frozen=True)
class Check:
    """One check.

    Args:
        name: Its name in policies and verdicts.
        phase: What it is about; the first failing phase heads a verdict.
        demand: What has to hold.
        judge: Finds out.
        parameters: What a policy may state.
        counts_steps: Whether it counts over `max_steps`.
        of: What fails it alone, before the run has ended: a `step`, `any` rollout or step, or none.
        unit: What its value is in, or counts.
        reads: What it needs of the columns of a step, beside the events, of `captured.SOURCES`.
    """

    name: str
    phase: Phase
    demand: str
    judge: Callable[[Evidence, Policy, Parameters], Judged]
    parameters: tuple[Parameter, ...] = ()
    counts_steps: bool = False
    of: Literal["step", "any", ""] = ""
    unit: str = ""
    reads: tuple[str, ...] = ()


def _is_step(value: Any) -> bool:
    """Whether it names a step as the command line takes one."""
    parts = value.split(":") if isinstance(value, str) else ()
    return len(parts) == 2 and all(one.isascii() and one.isdigit() for one in parts)
