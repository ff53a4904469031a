"""Dumps that frameworks leave: samples to import, copies of them to break, and what comes of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trajreplay import Lake
from trajreplay.capture.importers import ImportedSource, ImportOptions
from trajreplay.stages import Report

DUMPS = Path(__file__).parents[1] / "cases" / "dumps"
NEMO_RL = DUMPS / "nemo-rl" / "logs" / "exp_001"
PRIME_RL = DUMPS / "prime-rl" / "outputs"
EXPORT = PRIME_RL / "token_exports" / "step_5"
TRANSPORT = PRIME_RL / "rollouts" / "step_5"
VERL = DUMPS / "verl"
TRL = DUMPS / "trl" / "log_completions_1.16.0"
AREAL = DUMPS / "areal" / "logs" / "root" / "exp" / "trial" / "rollout" / "2"
# Every kind with its sample.
SAMPLES = {
    "nemo-rl": NEMO_RL,
    "prime-rl-export": PRIME_RL,
    "prime-rl-rollout": PRIME_RL,
    "verl": VERL,
    "trl": TRL,
    "areal": AREAL,
}
Tree = dict[str, Any]


def imported(lake: Lake, kind: str, path: Path, **options: Any) -> ImportedSource:
    """What became of the one source at a path."""
    (source,) = lake.import_files(kind, path, options=ImportOptions(**options)).sources
    return source


def copied(path: Path, to: Path) -> Path:
    """A copy of a file or folder, to be edited, under its own name."""
    to.mkdir(parents=True, exist_ok=True)
    target = to / path.name
    if path.is_dir():
        return Path(shutil.copytree(path, target))
    return Path(shutil.copy(path, target))


def edited(path: Path, edit: Callable[[list[Tree]], object]) -> Path:
    """Change the lines of a file of one JSON object a line; an edit may return other lines."""
    lines = [json.loads(one) for one in path.read_text().splitlines()]
    changed = edit(lines)
    lines = changed if isinstance(changed, list) else lines
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


def verdicts(report: Report) -> dict[str, str]:
    """The verdict of each stage of the only cohort."""
    (cohort,) = report.cohorts
    return {one.stage: one.verdict for one in cohort.stages}


def reasons(report: Report) -> dict[str, str]:
    """What is said of each stage of the only cohort."""
    (cohort,) = report.cohorts
    return {one.stage: one.message for one in cohort.stages}


def rows(lake: Lake, sql: str) -> list[tuple[Any, ...]]:
    """The rows of a query."""
    return [tuple(one.values()) for one in lake.sql(sql, threads=1).arrow().to_pylist()]
