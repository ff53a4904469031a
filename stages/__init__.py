"""Every stage from reward to loss, recomputed from what was captured, and judged."""

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

__all__ = [
    "AdvantageKernel",
    "CohortReport",
    "Divergence",
    "Finding",
    "Kernel",
    "KlKernel",
    "LossKernel",
    "Report",
    "RewardFunction",
    "RewardKernel",
    "StageResult",
    "replay",
]
