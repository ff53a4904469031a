"""Measure the mismatch between trainer and sampler in one run or several."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal, Unpack

import pyarrow as pa

from trajreplay.query.manifest.catalog import Catalog
from trajreplay.query.mismatch.captured import Reading
from trajreplay.query.mismatch.compare import COMPARISON, comparison
from trajreplay.query.mismatch.findings import counts_by_step, findings, unversioned
from trajreplay.query.mismatch.keys import Step
from trajreplay.query.mismatch.pair import Pair
from trajreplay.query.mismatch.pairing import Pairing, usable
from trajreplay.query.mismatch.plan import SumPlan
from trajreplay.query.mismatch.report import MismatchFinding, MismatchReport
from trajreplay.query.mismatch.summary import Summary, group_columns, schema, summarise
from trajreplay.query.mismatch.sums import TokenSums
from trajreplay.query.selecting.conditions import Paired
from trajreplay.query.selecting.selection import Selected, Selection
from trajreplay.query.tables.connection import connect_empty, interruptible
from trajreplay.schema.errors import QueryError

Level = Literal["step", "rollout"]
DEFAULT_THRESHOLDS = (0.5, 1.0)
DEFAULT_CAP = 2.0


@dataclass(frozen=True)
class _Measured:
    """One run: its statistics, the level that was read, the pair in words, findings."""

    summary: Summary
    level: str
    pair: str
    without: Mapping[Step, int]
    of_other_version: Mapping[Step, int]
    interpolated: tuple[str, ...]
    unproven: tuple[str, ...]
    findings: tuple[MismatchFinding, ...]


def mismatch(
    catalog: Catalog,
    selection: Selection | None = None,
    *,
    by: Sequence[str] = (),
    level: Level | None = None,
    thresholds: Sequence[float] = DEFAULT_THRESHOLDS,
    cap: float = DEFAULT_CAP,
    **paired: Unpack[Paired],
) -> MismatchReport:
    """Statistics of the difference between the trainer's and the sampler's log-probs.

    Args:
        catalog: The lake.
        selection: Which samples; all if omitted. Its run is one of `runs`.
        by: What the tokens of a run are grouped by: rollout, step, rank, weight_version, position
            or length, the last two in powers of two from 256 on.
        level: Whether steps, as consumed, or rollouts are read; by default steps, where they or
            their rollouts hold the pair.
        thresholds: |d| beyond which tokens are counted, in nats.
        cap: Where importance ratios are truncated.
        paired: As of `Pairing`: `runs`, `pair`, `any_version`, `memory_bytes`, `threads`,
            `progress`.

    Returns:
        Statistics by run and group, their comparison, and findings.

    Raises:
        QueryError: The selection is wrong or holds no pair.
        DatasetError: One column is a copy of the other, or a file is not what its entry says.
    """
    pairing = Pairing(**paired)
    plan = _plan(by, thresholds, cap, any_version=pairing.any_version)
    columns = Pair.parse(pairing.pair)
    chosen = pairing.chosen(catalog, selection)
    done = 0
    sets = sum(map(len, chosen.runs.values()))
    measured: dict[str, _Measured] = {}
    for run_id, selected in chosen.runs.items():
        count = pairing.counting(done, sets)
        reading = Reading(catalog, columns, by_length="length" in by, with_versions=plan.by_version)
        with (
            connect_empty(
                catalog.store.folder, pairing.memory_bytes, pairing.threads
            ) as connection,
            interruptible(connection) as run,
        ):
            sums = TokenSums(connection, run, plan)
            measured[run_id] = _measure(run_id, selected, reading, sums, level, by, count)
        done += len(selected)
    rows = [row for one in measured.values() for row in one.summary.rows]
    by_step = {run_id: one.summary.by_step for run_id, one in measured.items()}
    return MismatchReport(
        pair="; ".join(dict.fromkeys(one.pair for one in measured.values())),
        levels={run_id: one.level for run_id, one in measured.items()},
        table=pa.Table.from_pylist(rows, schema=schema(by, plan.thresholds)),
        comparison=comparison(by_step) if len(measured) > 1 else COMPARISON.empty_table(),
        by_step=by_step,
        steps={run_id: one.summary.steps for run_id, one in measured.items()},
        without={run_id: one.without for run_id, one in measured.items()},
        of_other_version={run_id: one.of_other_version for run_id, one in measured.items()},
        interpolated={run_id: one.interpolated for run_id, one in measured.items()},
        unproven={run_id: one.unproven for run_id, one in measured.items()},
        findings=(
            *chain.from_iterable(one.findings for one in measured.values()),
            *chosen.findings(),
        ),
        thresholds=plan.thresholds,
    )


def _plan(
    by: Sequence[str], thresholds: Sequence[float], cap: float, *, any_version: bool
) -> SumPlan:
    group_columns(by)  # refuses what is no group
    wrong = [one for one in thresholds if not (math.isfinite(one) and one >= 0)]
    if wrong:
        raise QueryError(f"the threshold is {wrong[0]}, expected a number of nats from 0 on")
    if not (math.isfinite(cap) and cap >= 1):
        raise QueryError(f"the cap of importance ratios is {cap}, expected a number from 1 on")
    return SumPlan(
        thresholds=tuple(dict.fromkeys(map(float, thresholds))),
        cap=float(cap),
        by_key=bool(set(by) - {"run"}),
        by_position="position" in by,
        by_version="weight_version" in by,
        any_version=any_version,
    )


def _measure(
    run_id: str,
    selected: Selected,
    reading: Reading,
    sums: TokenSums,
    level: Level | None,
    by: Sequence[str],
    count: Callable[[int], None],
) -> _Measured:
    sets = [selected.sets[cohort] for cohort in selected.cohorts]
    taken = level or reading.level(sets)
    left_out: list[str] = []
    for piece in reading.pieces(usable(selected, taken, left_out, count)):
        sums.add(piece)
    if not sums.parts:
        raise _nothing(run_id, taken, reading, sums, left_out)
    summary = summarise(sums, reading.keys, by, sums.plan)
    return _Measured(
        summary,
        taken,
        pair=f"{reading.origins}, of {taken}s",
        without=reading.without,
        of_other_version=counts_by_step(reading, sums.of_other_version),
        interpolated=reading.origins.interpolated,
        unproven=(*reading.origins.unproven, *unversioned(reading, sums)),
        findings=tuple(findings(run_id, reading, sums, summary, left_out)),
    )


def _nothing(
    run_id: str, level: str, reading: Reading, sums: TokenSums, left_out: Sequence[str]
) -> QueryError:
    why = [f"no {level} that is selected holds a valid token of both"]
    hint = "To see what each capture holds: trajreplay inspect --rollout R"
    if reading.without.total():
        why.append(f"{reading.without.total()} samples lack one of them")
    others = counts_by_step(reading, sums.of_other_version)
    if others:
        why.append(f"{others.total()} tokens were sampled by other weights")
        hint = "To count tokens of other weights, too: --any-version"
    if left_out:
        why.append(f"{len(left_out)} incomplete {level}s were left out")
        hint = "To read incomplete ones as far as they go: --allow-partial"
    return QueryError(
        f"run {run_id!r}: nothing to compare of {reading.pair}: {'; '.join(why)}",
        hint=hint,
        compared=0,
        of_other_version=others,
    )
