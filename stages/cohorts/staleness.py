"""Weights: whether those that sampled the tokens of a step can be older than those it trains."""

from __future__ import annotations

import numpy as np

from trajreplay.schema.columns import has_column
from trajreplay.stages.cohorts.cohort import LoadedCohort
from trajreplay.stages.cohorts.spans import UNKNOWN
from trajreplay.stages.report import Finding

_SPANS = "weight_versions"


def note_staleness(cohort: LoadedCohort) -> None:
    """Say where tokens were sampled by weights that the trainer did not have yet.

        staleness = version of the current log-probs - version that sampled the span >= 0

    Both are told by the producer, by its own count: where one is below 0, the two are not of one
    count, or a label is wrong, and a correction for staleness weighs what it should not.
    """
    if not any("log_probs" in entry.origins for entry in cohort.owners):
        return
    current = cohort.versions("log_probs")
    said = current != UNKNOWN
    if not said.any():
        return
    old = cohort.versions("old_log_probs")
    ranks = np.asarray(cohort.table["rank"].to_numpy(), np.int64)
    for rank in np.unique(ranks[said & (old > current)]).tolist():
        row = int((ranks == rank).argmax())
        message = (
            f"rank {rank} says that its old log-probs are of weights {old[row]}, newer than "
            f"{current[row]}, those of its current ones"
        )
        cohort.report.findings.append(Finding("weights.old-newer", "warning", message, "sample"))
    if not has_column(cohort.table, _SPANS):
        return
    spans = cohort.spans
    newer = said[spans.owner] & (spans.version > current[spans.owner])
    if newer.any():
        at = int(newer.argmax())
        row = int(spans.owner[at])
        message = (
            f"{int(newer.sum())} of {len(spans.version)} spans were sampled by weights newer than "
            f"those of the log-probs of this step, here {int(spans.version[at])} and "
            f"{int(current[row])}: they are not of one count, or one is wrong"
        )
        name = str(cohort.table["sample_id"][row].as_py())
        finding = Finding("weights.newer", "warning", message, "sample", sample_id=name)
        cohort.report.findings.append(finding)
