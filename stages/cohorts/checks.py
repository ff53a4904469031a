"""What must hold of the captures of a cohort before any arithmetic, and what is worth saying."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from trajreplay.query.files.scanning import decoded_bytes
from trajreplay.schema.columns import Table, has_column
from trajreplay.schema.entry import Entry
from trajreplay.schema.errors import DatasetError, listed
from trajreplay.schema.lists import list_place
from trajreplay.schema.settings import RewardSettings
from trajreplay.schema.tables import RESPONSE_LISTS, SAMPLE_TABLES
from trajreplay.stages.capability import Ability
from trajreplay.stages.cohorts.packed import list_lengths
from trajreplay.stages.report import CohortReport, StageResult, StageVerdict


def check_agreement(owners: list[Entry]) -> None:
    """Refuse ranks that claim different settings or stages.

    Raises:
        DatasetError: They do.
    """
    for entry in owners[1:]:
        for name in ("settings_tree", "contracts"):
            if getattr(entry, name) != getattr(owners[0], name):
                raise DatasetError(
                    f"ranks {owners[0].key.rank} and {entry.key.rank} disagree on their "
                    f"{name.removesuffix('_tree')}: the ranks of a capture set share one arithmetic"
                )


def check_memory(
    owners: list[Entry], table: Table, columns: Sequence[str], memory_bytes: int
) -> None:
    """Refuse a cohort that would not fit, from the counts of its entries, before it is read.

    Raises:
        DatasetError: Its columns take more than the replay may.
    """
    needed = sum(
        decoded_bytes(file, [table[name] for name in columns if name in file.columns])
        for entry in owners
        if (file := entry.file(table.name)) is not None
    )
    if needed > memory_bytes:
        raise DatasetError(
            f"{owners[0].key}: its samples take {needed:,} bytes in memory, expected at most "
            f"{memory_bytes:,}; allow more with --memory"
        )


def check_sources(entry: Entry, rows: pa.Table) -> None:
    """Refuse rows that come from other rollouts than their manifest entry lists.

    Raises:
        DatasetError: They do; what a replay reads besides a step is found by that list.
    """
    if not has_column(rows, "source_rollout_id"):
        return
    found = source_pairs(rows)
    if found != set(entry.sources):
        raise DatasetError(
            f"{entry.key}: its samples come from (attempt, rollout) {sorted(found)}, its entry "
            f"lists {sorted(entry.sources)}"
        )


def source_pairs(rows: pa.Table) -> set[tuple[int, int]]:
    """The (attempt, rollout) pairs that the rows of a step come from."""
    attempts, rollouts = (rows[name].to_numpy() for name in ("source_attempt", "source_rollout_id"))
    if not len(attempts):
        return set()
    if (attempts == attempts[0]).all() and (rollouts == rollouts[0]).all():
        return {(int(attempts[0]), int(rollouts[0]))}
    return set(zip(attempts.tolist(), rollouts.tolist(), strict=True))


def check_lengths(table: pa.Table) -> None:
    """Refuse a response column that is not as long as its sample says.

    Raises:
        DatasetError: One is not, or a length is negative.
    """
    expected = np.asarray(table["response_length"].to_numpy(), np.int64)
    lists = {name: table[name] for name in RESPONSE_LISTS if has_column(table, name)}
    right: set[Any] = set()  # columns made with the same offsets are looked at once
    wrong: dict[str, np.ndarray[Any, Any]] = {}
    for name, column in lists.items():
        place = list_place(column)
        if place in right:
            continue
        found = list_lengths(column)
        if np.array_equal(found, expected):
            right |= {place} - {None}
        elif ((found != expected) & (found >= 0)).any():
            wrong[name] = found
    if wrong or (len(expected) and expected.min() < 0):
        raise DatasetError(listed(_length_problems(table, expected, wrong)))


def _length_problems(
    table: pa.Table, expected: np.ndarray[Any, Any], wrong: Mapping[str, np.ndarray[Any, Any]]
) -> list[str]:
    problems: list[str] = []

    def add(row: int, what: str) -> None:
        sample, rank = table["sample_id"][row].as_py(), table["rank"][row].as_py()
        problems.append(f"sample {sample!r} (rank {rank}): {what}")

    for row in (expected < 0).nonzero()[0].tolist():
        add(row, f"response_length is {expected[row]}, expected 0 or more")
    for name, found in wrong.items():
        for row in ((found != expected) & (found >= 0)).nonzero()[0].tolist():
            what = f"{name} has {found[row]} values, expected response_length = {expected[row]}"
            add(row, what)
    return problems


def check_components(table: pa.Table, settings: RewardSettings) -> None:
    """Refuse rewards of more or fewer components than the settings weigh.

    Raises:
        DatasetError: There are some.
    """
    if not has_column(table, "reward_components"):
        return
    expected, found = len(settings.weights), list_lengths(table["reward_components"])
    problems = [
        f"sample {table['sample_id'][row].as_py()!r} (rank {table['rank'][row].as_py()}): "
        f"reward_components has {found[row]} values, expected {expected}, one for each of "
        f"reward.weights: {', '.join(settings.weights) or 'none'}"
        for row in ((found != expected) & (found >= 0)).nonzero()[0].tolist()
    ]
    if problems:
        raise DatasetError(listed(problems))


def check_missing(
    nulls_of: Mapping[str, int], rows: int, abilities: dict[str, Ability], report: CohortReport
) -> None:
    """Refuse a stage whose input is missing, and leave out one whose recorded output is.

    Args:
        nulls_of: How many rows lack each column that was read.
        rows: How many rows there are.
        abilities: The stages; those that cannot run are taken out.
        report: Gets the results of those.
    """
    for stage, needs in list(abilities.items()):
        columns = [name for name in needs.writes if name in SAMPLE_TABLES["step"]]
        for kind, names in (("input", needs.reads), ("recorded output", columns)):
            short = next((name for name in names if nulls_of.get(name, rows)), None)
            if short is None:
                continue
            nulls = nulls_of.get(short, rows)
            message = f"{kind} {short} is missing for {nulls} of {rows} samples"
            if kind == "input":
                stages = "rollout_stages" if report.step_id is None else "step_stages"
                message += (
                    f"; capture {short}, or do not declare {stage}: leave it out of {stages} of "
                    "capture.enable, or of the stages that the capture was given"
                )
            verdict: StageVerdict = "refused" if kind == "input" else "unverified"
            report.stages.append(StageResult(stage, verdict, message=message))
            del abilities[stage]
            break


def check_whole(abilities: dict[str, Ability], report: CohortReport) -> None:
    """Leave out stages that take all samples, of a cohort of which not all are here."""
    for stage in [name for name, one in abilities.items() if one.whole]:
        message = "needs the whole cohort; --closure cohort asks for it"
        report.stages.append(StageResult(stage, "skipped", message=message))
        del abilities[stage]
