"""Train-versus-rollout statistics: how far the trainer's log-probs are from the sampler's."""

from trajreplay.query.mismatch.measure import mismatch
from trajreplay.query.mismatch.pairing import Pairing
from trajreplay.query.mismatch.report import MismatchFinding, MismatchReport, statistic_rows
from trajreplay.query.mismatch.statistic import Statistic
from trajreplay.query.mismatch.statistics import STATISTICS

__all__ = [
    "STATISTICS",
    "MismatchFinding",
    "MismatchReport",
    "Pairing",
    "Statistic",
    "mismatch",
    "statistic_rows",
]
