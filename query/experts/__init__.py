"""Captured expert choices: read, checked, and the sampler's held against the trainer's."""

from trajreplay.query.experts.agreement import route_agreement
from trajreplay.query.experts.agreement_report import AGREEMENT, AgreementReport
from trajreplay.query.experts.captured import RoutedRows, expert_columns, routed_rows
from trajreplay.query.experts.checks import RouteProblem, route_problems

__all__ = [
    "AGREEMENT",
    "AgreementReport",
    "RouteProblem",
    "RoutedRows",
    "expert_columns",
    "route_agreement",
    "route_problems",
    "routed_rows",
]
