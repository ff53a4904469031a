"""The report of an import: what became of every source, and of which files it was read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

IMPORTED, UNCHANGED, CHECKED = "imported", "unchanged", "checked"
REFUSED, PARTIAL = "refused", "partial"


@dataclass
class ImportedSource:
    """What became of one source.

    Args:
        path: The file or folder.
        kind: What it was read as.
        status: imported, unchanged (all of it was there), checked (nothing was written), refused,
            or partial: the lake could not be written on, and some of its captures are there.
        files: The files that were read for it, all of them or, where it was refused, until then.
        captures: Its captures as (run, attempt, rollout, step, rank); events are of no rollout.
            Of a partial one those that are in the lake.
        samples: Samples in them.
        tokens: Response tokens in them.
        problem: Why it was refused, or is partial.
        hint: What to do about it.
        notes: What it holds that was not taken, or that was read with a remark.
    """

    path: str
    kind: str
    status: str = REFUSED
    files: list[str] = field(default_factory=list)
    captures: list[tuple[str, int, int | None, int | None, int]] = field(default_factory=list)
    samples: int = 0
    tokens: int = 0
    problem: str = ""
    hint: str = ""
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """All facts as JSON values."""
        names = ("run_id", "attempt", "rollout_id", "step_id", "rank")
        captures = [dict(zip(names, one, strict=True)) for one in self.captures]
        return {**vars(self), "captures": captures}


@dataclass
class ImportReport:
    """What became of every source of an import."""

    sources: list[ImportedSource] = field(default_factory=list)

    @property
    def refused(self) -> list[ImportedSource]:
        """The sources that were refused, or are there in part."""
        return [one for one in self.sources if one.status in (REFUSED, PARTIAL)]

    @property
    def exit_code(self) -> int:
        """3 if anything was refused, else 0."""
        return 3 if self.refused else 0

    def to_json(self) -> dict[str, Any]:
        """The stable JSON form."""
        return {"format": 1, "sources": [one.to_json() for one in self.sources]}
