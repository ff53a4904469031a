"""A run held against a policy: checks that fail closed, and one verdict."""

from trajreplay.stages.gate.beforehand import check_meetable
from trajreplay.stages.gate.check import Check
from trajreplay.stages.gate.checks import CHECKS
from trajreplay.stages.gate.judge import gate
from trajreplay.stages.gate.of_cohort import CohortGate
from trajreplay.stages.gate.policy import PRESETS, Policy, load_gate_policy
from trajreplay.stages.gate.statement import SqlCheck
from trajreplay.stages.gate.verdict import CheckVerdict, GateVerdict

__all__ = [
    "CHECKS",
    "PRESETS",
    "Check",
    "CheckVerdict",
    "CohortGate",
    "GateVerdict",
    "Policy",
    "SqlCheck",
    "check_meetable",
    "gate",
    "load_gate_policy",
]
