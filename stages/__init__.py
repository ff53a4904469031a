"""Every stage from reward to loss, recomputed from what was captured, and judged."""

from trajreplay.stages.counterfactuals.changes import CohortChange, FieldChange, WhatIf
from trajreplay.stages.counterfactuals.what_if import what_if
from trajreplay.stages.plugins import RewardFunction
from trajreplay.stages.replaying.plan import replay
from trajreplay.stages.report import (
    CohortReport,
    Divergence,
    Finding,
    Report,
    StageResult,
)
from trajreplay.stages.reuse import AdvantageKernel, Kernel, KlKernel, LossKernel, RewardKernel

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
