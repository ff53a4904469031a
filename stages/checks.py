"""What must hold of the captures of a cohort before any arithmetic, and what is worth saying."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from trajreplay.query.capture_sets import CaptureSet
from trajreplay.query.closure import short_groups
from trajreplay.schema.contracts import STAGE_NAMES, STAGE_OF_COLUMN
from trajreplay.schema.entry import Entry
from trajreplay.schema.errors import DatasetError, listed
from trajreplay.schema.tables import SAMPLE_TABLES
from trajreplay.stages.block import LoadedCohort
from trajreplay.stages.capability import Ability
from trajreplay.stages.packed import list_lengths, packed_values
from trajreplay.stages.report import CohortReport, Finding, StageResult
from trajreplay.stages.sources import Source, Sources

_HALF = {"bfloat16": torch.bfloat16, "float16": torch.float16}
SAMPLE_KEY = ("sample_id", "source_attempt", "source_rollout_id")


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


def check_unique(entry: Entry, rows: pa.Table, seen: set[tuple[object, ...]]) -> None:
    """Refuse a sample that a shard holds twice, within a capture or with one `seen` before.

    Raises:
        DatasetError: It does; sample ids are unique within the rollout that generated them.
    """
    names = [rows[name].to_pylist() for name in SAMPLE_KEY if name in rows.column_names]
    mine = [(*name, entry.parallel.shard) for name in zip(*names, strict=True)]
    before = len(seen)
    there = seen.copy() if before else seen
    seen.update(mine)
    if len(seen) != before + len(mine):
        twice = [name for name, count in Counter(mine).items() if count > 1 or name in there]
        raise DatasetError(
            f"{entry.key}: {len(twice)} samples are there twice, first {twice[0][0]!r}; sample ids "
            "are unique within a rollout, and a parallel copy states its tensor rank"
        )


def check_sources(entry: Entry, rows: pa.Table) -> None:
    """Refuse rows that come from other rollouts than their manifest entry lists.

    Raises:
        DatasetError: They do; what a replay reads besides a step is found by that list.
    """
    if "source_rollout_id" not in rows.column_names:
        return
    found = source_pairs(rows)
    if found != set(entry.sources):
        raise DatasetError(
            f"{entry.key}: its samples come from (attempt, rollout) {sorted(found)}, its entry "
            f"lists {sorted(entry.sources)}"
        )


def source_pairs(rows: pa.Table) -> set[tuple[int, int]]:
    """The (attempt, rollout) pairs that the rows of a step come from."""
    pairs = np.stack([rows[name].to_numpy() for name in ("source_attempt", "source_rollout_id")], 1)
    if len(pairs) and bool((pairs == pairs[0]).all()):
        pairs = pairs[:1]
    return set(map(tuple, pairs.tolist()))


def check_lengths(table: pa.Table) -> None:
    """Refuse a response column that is not as long as its sample says.

    Raises:
        DatasetError: One is not, or a length is negative.
    """
    expected = np.asarray(table["response_length"].to_numpy(), np.int64)
    problems = [
        f"sample {table['sample_id'][row].as_py()!r} (rank {table['rank'][row].as_py()}): "
        f"response_length is {expected[row]}, expected 0 or more"
        for row in (expected < 0).nonzero()[0].tolist()
    ]
    for name, column in zip(table.column_names, table.columns, strict=True):
        if not pa.types.is_list(column.type) or name in ("tokens", "weight_versions"):
            continue
        found = list_lengths(column)
        if np.array_equal(found, expected):
            continue
        problems += [
            f"sample {table['sample_id'][row].as_py()!r} (rank {table['rank'][row].as_py()}): "
            f"{name} has {found[row]} values, expected response_length = {expected[row]}"
            for row in ((found != expected) & (found >= 0)).nonzero()[0].tolist()
        ]
    if problems:
        raise DatasetError(listed(problems))


def check_missing(table: pa.Table, abilities: dict[str, Ability], report: CohortReport) -> None:
    """Refuse a stage whose input is missing, and leave out one whose recorded output is.

    Raises:
        DatasetError: An input of a stage that is declared recompute is missing.
    """
    nulls_of = {
        name: column.null_count
        for name, column in zip(table.column_names, table.columns, strict=True)
    }
    for stage, needs in list(abilities.items()):
        for name in needs.reads:
            nulls = nulls_of.get(name, table.num_rows)
            if nulls:
                where = "of its samples" if nulls < table.num_rows else "samples"
                raise DatasetError(
                    f"{stage} is declared recompute and its input {name} is missing for {nulls} "
                    f"of {table.num_rows} {where}; capture {name}, or do not declare {stage}"
                )
        columns = [name for name in needs.writes if name in SAMPLE_TABLES["step"]]
        for name in columns:
            nulls = nulls_of.get(name, table.num_rows)
            if nulls and stage in abilities:
                message = (
                    f"recorded output {name} is missing for {nulls} of {table.num_rows} samples"
                )
                report.stages.append(StageResult(stage, "unverified", message=message))
                del abilities[stage]


def check_groups(
    table: pa.Table,
    abilities: dict[str, Ability],
    report: CohortReport,
    sources: Sources,
    expected: int | None,
) -> None:
    """Refuse groups that are known to have members that were not captured here.

    An incomplete capture set that is replayed as far as it goes may hold parts of groups, which
    say nothing of the whole ones: the stage is skipped unless each is known to be whole.

    Raises:
        DatasetError: Some are, by their `group_size` or by the rollout that generated them.
    """
    if "group_id" not in abilities.get("reward.post_process", Ability("unsupported")).reads:
        return
    problems = _short_groups(table, report.run_id, sources)
    if report.partial and not problems:
        problems = _cut_groups(table, expected)
    if problems and report.partial:
        message = f"not all members of its groups are here: {listed(problems)}"
        report.stages.append(StageResult("reward.post_process", "skipped", message=message))
        del abilities["reward.post_process"]
    elif problems:
        raise DatasetError(
            "reward.post_process normalises over whole groups, and not all members are here: "
            f"{listed(problems)}; capture whole groups, or declare the stage at rollout level"
        )


def _cut_groups(table: pa.Table, expected: int | None) -> list[str]:
    """Groups that ranks which are not there may have members of."""
    sizes = table["group_size"].to_pylist() if "group_size" in table.column_names else []
    if sizes and None not in sizes:
        return []
    if expected is None:
        return ["nothing says how many they have"]
    captured = Counter(table["group_id"].to_pylist())
    return [
        f"group {name!r}: {count} of {expected} members were captured"
        for name, count in captured.items()
        if count < expected
    ]


def _short_groups(table: pa.Table, run_id: str, sources: Sources) -> list[str]:
    coordinates = ("source_attempt", "source_rollout_id")
    pairs = sorted(source_pairs(table)) if coordinates[0] in table.column_names else []
    found = [(*pair, sources.find(run_id, *pair)) for pair in pairs]
    there_are = [one for one in found if isinstance(one[2], Source)]
    sizes = table["group_size"].to_pylist() if "group_size" in table.column_names else []
    if not sizes and not there_are:
        return []
    names = [table[name].to_pylist() for name in (*(coordinates if pairs else ()), "group_id")]
    groups = list(zip(*names, strict=True))
    problems = [str(one) for one in short_groups(groups, sizes)] if sizes else []
    for attempt, rollout_id, source in there_are:
        if isinstance(source, str) or "group_id" not in source.table.column_names:
            continue
        there = Counter(source.table["group_id"].to_pylist())
        from_here = (group[2] for group in groups if group[:2] == (attempt, rollout_id))
        problems += [
            f"group {name!r}: {count} of {there[name]} members of rollout {rollout_id} are here"
            for name, count in Counter(from_here).items()
            if there[name] > count
        ]
    return problems


def held_dtypes(owners: list[Entry], table: pa.Table, report: CohortReport) -> dict[str, str]:
    """The coarsest dtype in which a producer held each column of its samples.

    A half-precision dtype loosens the comparison, so that one which the values contradict is
    reported and not believed.
    """
    precision = {"float64": 0, "float32": 1, "float16": 2, "bfloat16": 3}
    found: dict[str, str] = {}
    for entry in owners:
        file = entry.file(SAMPLE_TABLES[entry.key.kind].name)
        for name, seal in file.columns.items() if file is not None else ():
            dtype = seal.source_dtype or ""
            if dtype in _HALF and name in table.column_names:
                mine = table[name].filter(pc.equal(table["rank"], entry.key.rank))
                if not _holds(mine, _HALF[dtype]):
                    message = (
                        f"rank {entry.key.rank} says that it held {name} in {dtype}, which its "
                        "values do not fit; judged as float32"
                    )
                    report.findings.append(Finding("dtype", "warning", message))
                    dtype = "float32"
            if precision.get(dtype, -1) > precision.get(found.get(name, ""), -1):
                found[name] = dtype
    return found


def _holds(column: pa.ChunkedArray, dtype: torch.dtype) -> bool:
    """Whether every value is one of a narrower dtype."""
    if pa.types.is_list(column.type):
        values = packed_values(column)
    else:
        values = torch.from_numpy(np.array(column.drop_null().to_numpy()))
    return torch.equal(values.to(dtype).to(values.dtype).nan_to_num(), values.nan_to_num())


def note_copies(captures: CaptureSet, report: CohortReport) -> None:
    """Report parallel copies that are not what their owner captured, at the earliest stage."""
    for one in captures.copy_differences:
        stages = {STAGE_OF_COLUMN.get(name, "sample") for name in one.columns}
        stage = min(stages, key=STAGE_NAMES.index)
        report.findings.append(Finding("copy", "error", str(one), stage=stage))


def note_tolerances(cohort: LoadedCohort) -> None:
    """Report captures that ask for a looser comparison than the policy's."""
    for entry in cohort.owners:
        for stage, own in entry.tolerances.items():
            policy = cohort.tolerance(stage)
            if own.loosens(policy):
                cohort.report.findings.append(
                    Finding(
                        "tolerance",
                        "warning",
                        f"rank {entry.key.rank} asks for atol {own.atol:g}, rtol {own.rtol:g} at "
                        f"{stage}, looser than the policy; judged by atol {policy.atol:g}, "
                        f"rtol {policy.rtol:g}",
                        stage=stage,
                    )
                )
