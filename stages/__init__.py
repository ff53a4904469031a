"""Every stage from reward to loss, recomputed from what was captured, and judged."""

from trajreplay.stages.counterfactual import CohortChange, FieldChange, WhatIf
from trajreplay.stages.plan import replay
from trajreplay.stages.plugins import RewardFunction
from trajreplay.stages.report import (
    CohortReport,
    Divergence,
    Finding,
    Report,
    StageResult,
)
from trajreplay.stages.reuse import AdvantageKernel, Kernel, KlKernel, LossKernel, RewardKernel
from trajreplay.stages.what_if import what_if

__all__ = [
    "AdvantageKernel",
    "CohortChange",
    "CohortReport",
    "Divergence",
    "FieldChange",
    "Finding",
    "Kernel",
    "KlKernel",
    "LossKernel",
    "Report",
    "RewardFunction",
    "RewardKernel",
    "StageResult",
    "WhatIf",
    "replay",
    "what_if",
]
