"""All contract checks over the cohorts of a block."""

from __future__ import annotations

from trajreplay.stages.block import Block
from trajreplay.stages.contract_checks.advantages import check_advantages
from trajreplay.stages.contract_checks.columns import Together
from trajreplay.stages.contract_checks.log_probs import check_log_probs
from trajreplay.stages.contract_checks.metrics import check_metrics
from trajreplay.stages.contract_checks.recorded import check_recorded
from trajreplay.stages.contract_checks.samples import check_samples
from trajreplay.stages.contract_checks.weights import check_weights
from trajreplay.stages.report import Finding

# Columns that are read for the checks alone, where they were captured.
CHECKED = (
    *("raw_reward", "reward", "rollout_log_probs", "old_log_probs", "log_probs", "kl"),
    *("ref_log_probs", "advantages", "weight_versions", "group_size", "tokens"),
)
_CHECKS = (
    *(check_log_probs, check_samples, check_advantages),
    *(check_weights, check_recorded, check_metrics),
)


def check_contracts(block: Block) -> list[list[Finding]]:
    """Look for what no healthy training records, without recomputing anything.

    Args:
        block: Cohorts whose columns are as long as they say.

    Returns:
        Of each cohort, named findings with sample, token and evidence. Of severity error is only
        what cannot be legal: a column shifted against another, permuted samples, a rank that is
        there twice, a number of all ranks that one of them has a multiple of, and weights older or
        more mixed than the settings allow.
    """
    found: list[list[Finding]] = [[] for _ in block.cohorts]
    given = Together(block)
    for check in _CHECKS:
        for index, finding in check(given):
            found[index].append(finding)
    return found
