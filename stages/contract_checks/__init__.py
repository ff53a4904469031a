"""Contract checks: what no healthy training records, found in the columns before any arithmetic."""

from trajreplay.stages.contract_checks.checks import CHECKED, check_contracts
from trajreplay.stages.contract_checks.metrics import columns_of_metrics
from trajreplay.stages.contract_checks.routes import check_routes

__all__ = ["CHECKED", "check_contracts", "check_routes", "columns_of_metrics"]
