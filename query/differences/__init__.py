"""Two runs, attempts or lakes held against each other, sample by sample."""

from trajreplay.query.differences.compare import FieldDifference
from trajreplay.query.differences.diff import diff
from trajreplay.query.differences.report import DiffReport, Distribution, SettingDifference
from trajreplay.query.differences.side import Side, side_of

__all__ = [
    "DiffReport",
    "Distribution",
    "FieldDifference",
    "SettingDifference",
    "Side",
    "diff",
    "side_of",
]
