"""The stage sample: lengths and masks of each sample, and what a step took over from rollouts."""

from __future__ import annotations

import numpy as np

from trajreplay.schema.columns import has_column
from trajreplay.schema.lists import elements
from trajreplay.stages.cohorts.cohort import LoadedCohort
from trajreplay.stages.cohorts.constant_groups import check_constant_groups
from trajreplay.stages.cohorts.packed import list_lengths, packed_values
from trajreplay.stages.cohorts.sources import Sources
from trajreplay.stages.compare import EXAMPLES, Look
from trajreplay.stages.report import Divergence, Finding, StageResult
from trajreplay.stages.sample.handoff import compare_handoffs


def judge_samples(cohort: LoadedCohort, sources: Sources) -> None:
    """Judge the stage sample of one cohort and record its result."""
    look = _check_lengths(cohort).merged(_check_masks(cohort))
    look.compared += cohort.table.num_rows
    if has_column(cohort.table, "source_rollout_id"):
        look = look.merged(compare_handoffs(cohort, sources))
        check_constant_groups(cohort, sources)
    result = StageResult("sample", look.verdict, isolated=look.verdict)
    result.compared, result.mismatches = look.compared, look.mismatches
    result.divergences, result.ranks = look.divergences, sorted(look.ranks)
    result.max_abs_error = look.max_abs_error
    if look.mismatches:
        result.message = f"{look.mismatches} differences in {cohort.table.num_rows} samples"
    if cohort.apart and look.verdict != "diverged":
        result.verdict, result.message = "unverified", cohort.apart
    cohort.report.stages.append(result)


def _check_lengths(cohort: LoadedCohort) -> Look:
    table, look = cohort.table, Look()
    response = np.asarray(table["response_length"].to_numpy(), np.int64)
    total = np.asarray(table["total_length"].to_numpy(), np.int64)
    short = (total < response).nonzero()[0]
    for row in short.tolist():
        _add(cohort, look, "total_length", row, total[row], response[row])
    if len(short):
        row = int(short[0])
        message = (
            f"total_length of {len(short)} samples is below response_length, here {total[row]} "
            f"and {response[row]}: it counts the prompt, too"
        )
        _find(cohort, "sample.length", message, row)
    if has_column(table, "tokens"):
        found = list_lengths(table["tokens"])
        wrong = (found != total) & (found != response) & (found >= 0)
        for row in wrong.nonzero()[0].tolist():
            _add(cohort, look, "tokens", row, found[row], total[row])
        if wrong.any():
            row = int(wrong.nonzero()[0][0])
            message = (
                f"{int(wrong.sum())} samples have other tokens than they say, here {found[row]}, "
                f"and total_length is {total[row]}, response_length {response[row]}"
            )
            _find(cohort, "sample.length", message, row)
    return look


def _check_masks(cohort: LoadedCohort) -> Look:
    look, mask = Look(), cohort.table["loss_mask"]
    parts = (elements(chunk).to_numpy() for chunk in mask.chunks)
    if all(not len(part) or int(part.max()) <= 1 for part in parts):
        return look
    values = packed_values(mask)
    offsets = np.concatenate([[0], np.cumsum(list_lengths(mask))])
    odd = (values > 1).nonzero().squeeze(1).numpy()
    rows = np.unique(np.searchsorted(offsets, odd, side="right") - 1)
    for row in rows.tolist():
        first = int(odd[np.searchsorted(odd, offsets[row])])
        _add(cohort, look, "loss_mask", row, float(values[first]), 1.0, first - int(offsets[row]))
    first = int(odd[0])
    message = (
        f"loss_mask of {len(rows)} samples is neither 0 nor 1 at {len(odd)} tokens, here "
        f"{int(values[first])}: it says which tokens are trained, and weighs none"
    )
    _find(cohort, "sample.mask", message, int(rows[0]), first - int(offsets[rows[0]]))
    return look


def _find(
    cohort: LoadedCohort, check: str, message: str, row: int, token: int | None = None
) -> None:
    sample_id = cohort.table["sample_id"][row].as_py()
    cohort.report.findings.append(Finding(check, "error", message, "sample", sample_id, token))


def _add(
    cohort: LoadedCohort,
    look: Look,
    field: str,
    row: int,
    found: float,
    expected: float,
    token: int | None = None,
) -> None:
    look.mismatches += 1
    look.ranks |= {cohort.table["rank"][row].as_py()}
    if len(look.divergences) < EXAMPLES:
        table = cohort.table
        look.divergences.append(
            Divergence(
                field,
                float(found),
                float(expected),
                sample_id=table["sample_id"][row].as_py(),
                group_id=table["group_id"][row].as_py(),
                rank=table["rank"][row].as_py(),
                token=token,
            )
        )
