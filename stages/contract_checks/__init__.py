"""Contract checks: what no healthy training records, found in the columns before any arithmetic."""

from trajreplay.stages.contract_checks.checks import CHECKED, check_contracts

__all__ = ["CHECKED", "check_contracts"]
