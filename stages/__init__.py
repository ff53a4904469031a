"""Every stage from reward to loss, recomputed from what was captured, and judged."""

from trajreplay.stages.plan import replay
from trajreplay.stages.report import (
    CohortReport,
    Divergence,
    Finding,
    Report,
    StageResult,
)

__all__ = ["CohortReport", "Divergence", "Finding", "Report", "StageResult", "replay"]
