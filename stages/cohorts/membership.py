"""Whether the groups that are normalised over are here with all of their members."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa

from trajreplay.query.selecting.closure import short_groups
from trajreplay.schema.columns import has_column
from trajreplay.schema.errors import listed
from trajreplay.stages.capability import Ability
from trajreplay.stages.cohorts.checks import source_pairs
from trajreplay.stages.cohorts.sources import Source, Sources
from trajreplay.stages.report import CohortReport, StageResult, StageVerdict


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
    """
    grouped = [stage for stage, one in abilities.items() if "group_id" in one.reads]
    if not grouped:
        return
    problems = _short_groups(table, report.run_id, sources)
    if report.partial and not problems:
        problems = _cut_groups(table, expected)
    for stage in grouped if problems else ():
        verdict: StageVerdict = "skipped" if report.partial else "refused"
        message = f"not all members of its groups are here: {listed(problems)}"
        if not report.partial:
            message = (
                "it normalises over whole groups, and not all members are here: "
                f"{listed(problems)}; capture whole groups, or declare the stage at rollout level"
            )
        report.stages.append(StageResult(stage, verdict, message=message))
        del abilities[stage]


def _cut_groups(table: pa.Table, expected: int | None) -> list[str]:
    """Groups that ranks which are not there may have members of."""
    sizes = table["group_size"].to_pylist() if has_column(table, "group_size") else []
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
    pairs = sorted(source_pairs(table)) if has_column(table, coordinates[0]) else []
    found = [(*pair, sources.find(run_id, *pair)) for pair in pairs]
    there_are = [one for one in found if isinstance(one[2], Source)]
    sizes = table["group_size"].to_pylist() if has_column(table, "group_size") else []
    if not sizes and not there_are:
        return []
    names = [table[name].to_pylist() for name in (*(coordinates if pairs else ()), "group_id")]
    groups = list(zip(*names, strict=True))
    problems = [str(one) for one in short_groups(groups, sizes)] if sizes else []
    for attempt, rollout_id, source in there_are:
        if isinstance(source, str) or not has_column(source.table, "group_id"):
            continue
        there = Counter(source.table["group_id"].to_pylist())
        from_here = (group[2] for group in groups if group[:2] == (attempt, rollout_id))
        problems += [
            f"group {name!r}: {count} of {there[name]} members of rollout {rollout_id} are here"
            for name, count in Counter(from_here).items()
            if there[name] > count
        ]
    return problems
