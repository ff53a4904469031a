"""What a validation says: findings, and how much was looked at."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa

from trajreplay.schema.errors import TrajReplayError

Severity = Literal["error", "warning", "info"]
FINDINGS = pa.schema(
    [
        pa.field("severity", pa.string(), nullable=False),
        pa.field("check", pa.string(), nullable=False),
        pa.field("path", pa.string()),
        pa.field("message", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True)
class ValidationFinding:
    """One thing worth saying about a lake.

    Args:
        severity: `error` for what a replay would refuse, `warning` for what it ignores, `info`.
        check: integrity, completeness, closure, redaction, or what else was looked at.
        path: The file concerned, relative to the lake.
        message: What was found and what was expected.
    """

    severity: Severity
    check: str
    path: str | None
    message: str


@dataclass
class ValidationReport:
    """What a validation found, and how much it looked at."""

    findings: list[ValidationFinding] = field(default_factory=list)
    captures: int = 0
    files: int = 0
    bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether there is no finding of severity error."""
        return not any(one.severity == "error" for one in self.findings)

    @property
    def counts(self) -> dict[str, int]:
        """Findings by severity."""
        return dict(Counter(one.severity for one in self.findings))

    def arrow(self) -> pa.Table:
        """The findings as a table."""
        return pa.Table.from_pylist([vars(one) for one in self.findings], schema=FINDINGS)

    def add(self, severity: Severity, check: str, path: str | None, message: str) -> None:
        """Add a finding."""
        self.findings.append(ValidationFinding(severity, check, path, message))

    def raised(self, check: str, path: str | None, error: TrajReplayError) -> None:
        """Add an error for one that was raised."""
        self.findings.append(finding_of(check, path, error))


def finding_of(check: str, path: str | None, error: TrajReplayError) -> ValidationFinding:
    """The finding of an error that was raised while a file was looked at."""
    return ValidationFinding("error", check, error.facts.get("path") or path, error.message)
