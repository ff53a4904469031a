"""What is worth saying of a loaded cohort beside its stages: dtypes, copies, tolerances, NaN."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from trajreplay.query.manifest.capture_sets import CaptureSet
from trajreplay.schema.columns import has_column
from trajreplay.schema.contracts import STAGE_NAMES, STAGE_OF_COLUMN, stage_named
from trajreplay.schema.entry import Entry, Output
from trajreplay.schema.identity import UNPROVEN
from trajreplay.schema.tables import SAMPLE_TABLES
from trajreplay.stages.cohorts.cohort import LoadedCohort
from trajreplay.stages.cohorts.not_finite import Samples
from trajreplay.stages.cohorts.packed import packed_values
from trajreplay.stages.report import CohortReport, Finding

_SCALAR_STAGES = ("loss.policy", "loss.value")  # these compare every scalar, or say why not
HALF_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def note_unproven(owners: Sequence[Entry], report: CohortReport) -> None:
    """Say why nothing shows that all ranks are there, where an import says so: it is no pass."""
    facts = [one.producer.get("extra") for one in owners]
    told = [one.get(UNPROVEN) for one in facts if isinstance(one, Mapping)]
    for why in dict.fromkeys(one for one in told if isinstance(one, str)):
        report.unproven = True
        report.findings.append(Finding("completeness", "warning", why))


def held_dtypes(owners: list[Entry], table: pa.Table, report: CohortReport) -> dict[str, str]:
    """The finest dtype in which a rank held each column of its samples.

    A half-precision dtype loosens the comparison, so that one which the values contradict is
    reported and not believed.
    """
    precision = {"float64": 0, "float32": 1, "float16": 2, "bfloat16": 3}
    found: dict[str, str] = {}
    for entry in owners:
        file = entry.file(SAMPLE_TABLES[entry.key.kind].name)
        for name, seal in file.columns.items() if file is not None else ():
            dtype = seal.source_dtype or ""
            if dtype in HALF_DTYPES and has_column(table, name):
                mine = table[name].filter(pc.equal(table["rank"], entry.key.rank))
                if not _holds(mine, HALF_DTYPES[dtype]):
                    message = (
                        f"rank {entry.key.rank} says that it held {name} in {dtype}, which its "
                        "values do not fit; judged as float32"
                    )
                    report.findings.append(Finding("dtype", "warning", message))
                    dtype = "float32"
            if dtype in precision and precision[dtype] < precision.get(found.get(name, ""), 9):
                found[name] = dtype
    return found


def _holds(column: pa.ChunkedArray, dtype: torch.dtype) -> bool:
    """Whether every value is one of a narrower dtype."""
    if pa.types.is_list(column.type):
        values = packed_values(column)
    else:
        values = torch.from_numpy(np.array(column.drop_null().to_numpy()))
    return torch.equal(values.to(dtype).to(values.dtype).nan_to_num(), values.nan_to_num())


def note_not_read(cohort: LoadedCohort, stated: Mapping[str, Sequence[str]]) -> None:
    """Say which settings are stated and change nothing: they may be meant to be in force."""
    cohort.report.findings += [
        Finding("settings.not-read", "warning", f"stated, and nothing reads it: {one}", stage=stage)
        for stage, clauses in stated.items()
        for one in clauses
    ]


def note_non_finite(cohort: LoadedCohort, names: Sequence[str]) -> None:
    """Locate NaN and infinities in columns that no stage reads: on trained tokens they diverge."""
    samples = Samples(cohort.table)
    for name in names:
        odd = samples.not_finite(name)
        if odd is None:
            continue
        stage = "sample" if not odd.masked and "sample" in cohort.stages else None
        cohort.report.findings.append(
            Finding(
                "non-finite.masked" if odd.masked else "non-finite.unread",
                "error" if stage else "warning",
                f"{name}, which no declared stage reads, holds {odd.count} NaN or infinite values, "
                f"{odd.trained} of them trained, first {odd.value} at {odd.where}",
                stage=stage,
                sample_id=odd.sample_id,
                token=odd.token,
            )
        )


def note_copies(captures: CaptureSet, report: CohortReport) -> None:
    """Report parallel copies that are not what their owner captured, at the earliest stage."""
    differing_ranks = {one.rank for one in captures.copy_differences}
    for copy in captures.copies:
        owner = captures.owner_of(copy)
        if owner is None or copy.key.rank in differing_ranks:
            continue
        # Often one rank records the scalars of all: one that a copy lacks is no difference.
        theirs = {_scalar(one): repr(one) for one in owner.outputs}
        for mine in copy.outputs:
            if theirs.get(_scalar(mine), repr(mine)) != repr(mine):
                message = (
                    f"rank {copy.key.rank} is a copy of rank {owner.key.rank} and recorded another "
                    f"{mine.field}: {mine.value if mine.values is None else mine.values}"
                )
                report.findings.append(Finding("copy", "error", message, stage=mine.stage))
                break
    for one in captures.copy_differences:
        stages = {STAGE_OF_COLUMN.get(name, "sample") for name in one.columns}
        stage = min(stages, key=STAGE_NAMES.index)
        report.findings.append(Finding("copy", "error", str(one), stage=stage))


def _scalar(output: Output) -> tuple[str | None, ...]:
    """Which scalar of a capture an output is; compared by its text, a NaN equals itself."""
    return output.stage, output.field, output.scope, output.micro_batch_id


def note_unread_outputs(cohort: LoadedCohort) -> None:
    """Say which recorded scalars no stage compares, since one that is wrong would not show."""
    left: set[str] = set()
    for entry in cohort.owners:
        for one in entry.outputs:
            echo = one.values is not None and one.field in stage_named(one.stage).scalars
            echo |= one.values is not None and one.field in ("raw_reward", "reward")
            if one.stage in cohort.stages and one.stage not in _SCALAR_STAGES and not echo:
                left.add(f"{one.stage} {one.field} at scope {one.scope}")
    if left:
        message = f"recorded and compared with nothing: {', '.join(sorted(left))}"
        cohort.report.findings.append(Finding("outputs.not-compared", "warning", message))


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
