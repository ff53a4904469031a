"""All contract checks over one cohort."""

from __future__ import annotations

from trajreplay.stages.cohort import LoadedCohort
from trajreplay.stages.contract_checks.columns import Columns
from trajreplay.stages.contract_checks.log_probs import check_log_probs
from trajreplay.stages.contract_checks.samples import check_samples
from trajreplay.stages.report import Finding

# Columns that are read for the checks alone, where they were captured.
CHECKED = ("raw_reward", "reward", "rollout_log_probs", "old_log_probs", "weight_versions")


def check_contracts(cohort: LoadedCohort) -> list[Finding]:
    """Look for what no healthy training records, without recomputing anything.

    Args:
        cohort: A cohort whose columns are as long as they say.

    Returns:
        Named findings with sample, token and evidence. Of severity error is only what cannot be
        legal: a column shifted against another, permuted samples, a rank that is there twice.
    """
    if not cohort.table.num_rows:
        return []
    given = Columns(
        cohort.table, cohort.settings, cohort.dtypes, cohort.report.rollout_id, cohort.stages
    )
    return [*check_log_probs(given), *check_samples(given)]
