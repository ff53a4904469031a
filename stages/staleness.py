"""Weights: whether those that sampled the tokens of a step can be older than those it trains."""

from __future__ import annotations

import numpy as np
import pyarrow.compute as pc

from trajreplay.stages.cohort import LoadedCohort
from trajreplay.stages.packed import list_lengths
from trajreplay.stages.report import Finding

_SPANS = "weight_versions"


def note_staleness(cohort: LoadedCohort) -> None:
    """Say where tokens were sampled by weights that the trainer did not have yet.

        staleness = version of the current log-probs - version that sampled the span >= 0

    Both are told by the producer, by its own count: where one is below 0, the two are not of one
    count, or a label is wrong, and a correction for staleness weighs what it should not.
    """
    current = _versions(cohort, "log_probs")
    if not current:
        return
    old = _versions(cohort, "old_log_probs")
    for rank, version in old.items():
        if version > current.get(rank, version):
            message = (
                f"rank {rank} says that its old log-probs are of weights {version}, newer than "
                f"{current[rank]}, those of its current ones"
            )
            cohort.report.findings.append(
                Finding("weights.old-newer", "warning", message, "sample")
            )
    if _SPANS not in cohort.table.column_names or not cohort.table.num_rows:
        return
    column = cohort.table[_SPANS]
    sampled = pc.struct_field(pc.list_flatten(column), "version").to_numpy()
    owners = np.repeat(np.arange(len(column)), list_lengths(column))
    known = np.array([current.get(one, np.iinfo(np.int64).max) for one in _ranks(cohort)])
    newer = sampled > known[owners]
    if newer.any():
        at = int(newer.argmax())
        row = int(owners[at])
        found, limit = int(sampled[at]), int(known[row])
        message = (
            f"{int(newer.sum())} of {len(sampled)} spans were sampled by weights newer than those "
            f"of the log-probs of this step, here {found} and {limit}: they are not of one count, "
            "or one is wrong"
        )
        name = str(cohort.table["sample_id"][row].as_py())
        finding = Finding("weights.newer", "warning", message, "sample", sample_id=name)
        cohort.report.findings.append(finding)


def _ranks(cohort: LoadedCohort) -> list[int]:
    found: list[int] = cohort.table["rank"].to_pylist()
    return found


def _versions(cohort: LoadedCohort, column: str) -> dict[int, int]:
    """The weights that each rank says its log-probs are of."""
    return {
        entry.key.rank: origin.weight_version
        for entry in cohort.owners
        if (origin := entry.origins.get(column)) is not None and origin.weight_version is not None
    }
