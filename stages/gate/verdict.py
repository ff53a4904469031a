"""The verdict of a gate: every check with value and bound, the failing phase first."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from trajreplay.stages.gate.check import PHASES, Judged, Phase

FORMAT = 1
NAMED = 100  # steps that a verdict names


@dataclass(frozen=True)
class CheckVerdict:
    """The outcome of one check of a policy.

    Args:
        check: Its name; of a statement `sql:` and its name.
        phase: What it is about.
        verdict: pass, fail, or not-judged.
        value: What was found.
        bound: What was demanded.
        reason: Why it fails, or is not judged; of a pass, what it does not say.
        unit: What the value is in, or counts.
    """

    check: str
    phase: Phase
    verdict: Literal["pass", "fail", "not-judged"]
    value: Any
    bound: str
    reason: str
    unit: str = ""

    @classmethod
    def of(cls, check: str, phase: Phase, judged: Judged, unit: str = "") -> CheckVerdict:
        """The outcome under the name of its check."""
        told: Literal["pass", "fail", "not-judged"]
        told = "not-judged" if judged.passed is None else "pass" if judged.passed else "fail"
        return cls(check, phase, told, judged.value, judged.bound, judged.reason, unit)


@dataclass(frozen=True)
class GateVerdict:
    """The verdict on the attempts of a run that were named.

    Args:
        run_id, attempts: What was judged.
        run: The policy's kind of run.
        checks: The outcome of every check; those of the first failing phase first.
        policy: The policy, resolved.
        policy_digest: Its digest.
        lake: The lake's path.
        lake_digest: Digest of everything that the attempts committed.
        steps: Every step that was recorded, by name.
        not_captured: Those of which heartbeats alone tell, or whose captures are not all there.
        command_exit, command_signal: How the command ended, where that is known.
    """

    run_id: str
    attempts: tuple[int, ...]
    run: str
    checks: tuple[CheckVerdict, ...]
    policy: dict[str, Any]
    policy_digest: str
    lake: str
    lake_digest: str
    steps: tuple[str, ...] = ()
    not_captured: tuple[str, ...] = ()
    command_exit: int | None = None
    command_signal: int | None = None

    @property
    def verdict(self) -> Literal["pass", "fail"]:
        """`pass` if nothing fails, and something holds: nothing judged is never a pass."""
        holds = any(one.verdict == "pass" for one in self.checks)
        return "pass" if holds and not self.failing else "fail"

    @property
    def captured(self) -> int:
        """How many of the steps were captured, of all their ranks."""
        return len(self.steps) - len(self.not_captured)

    @property
    def certifies(self) -> bool:
        """Whether the chain is whole, and passes in all that the policy names.

        An intermediate run never certifies.
        """
        return self.verdict == "pass" and self.run != "intermediate" and not self.open

    @property
    def open(self) -> tuple[str, ...]:
        """The checks that the policy names and that were not judged."""
        named = self.policy.get("checks", {})
        return tuple(
            one.check for one in self.checks if one.verdict == "not-judged" and one.check in named
        )

    @property
    def failing(self) -> tuple[str, ...]:
        """The checks that fail, those of the first failing phase first."""
        return tuple(one.check for one in self.checks if one.verdict == "fail")

    @property
    def failing_phase(self) -> str | None:
        """The first phase of which a check fails."""
        return next((one.phase for one in self.checks if one.verdict == "fail"), None)

    @property
    def exit_code(self) -> int:
        """0 for a pass, else 1."""
        return 0 if self.verdict == "pass" else 1

    def arrow(self) -> pa.Table:
        """One row a check; the value as JSON."""
        names = ("check", "phase", "verdict", "unit", "bound", "reason")
        rows = [
            {name: getattr(one, name) for name in names}
            | {"value": json.dumps(one.value, default=str)}
            for one in self.checks
        ]
        fields = [pa.field(name, pa.string()) for name in (*names[:3], "value", *names[3:])]
        return pa.Table.from_pylist(rows, pa.schema(fields))

    def to_json(self) -> dict[str, Any]:
        """The whole verdict, as plain data."""
        return {
            "format": FORMAT,
            "verdict": self.verdict,
            "certifies": self.certifies,
            "failing_phase": self.failing_phase,
            "failing": list(self.failing),
            "run_id": self.run_id,
            "attempts": list(self.attempts),
            "run": self.run,
            "command": {"exit": self.command_exit, "signal": self.command_signal},
            "steps": {
                "recorded": len(self.steps),
                "captured": self.captured,
                "not_captured": list(self.not_captured[:NAMED]),
            },
            "checks": [vars(one) for one in self.checks],
            "policy": self.policy,
            "policy_digest": self.policy_digest,
            "lake": self.lake,
            "lake_digest": self.lake_digest,
        }


def in_order(checks: list[CheckVerdict]) -> tuple[CheckVerdict, ...]:
    """Checks by phase, the first failing phase before all others."""
    place = {phase: number for number, phase in enumerate(PHASES)}
    failing = min((place[one.phase] for one in checks if one.verdict == "fail"), default=-1)
    return tuple(
        sorted(
            checks,
            key=lambda one: (
                place[one.phase] != failing,
                one.verdict != "fail" if place[one.phase] == failing else False,
                place[one.phase],
            ),
        )
    )
