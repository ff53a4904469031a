"""Known mistakes, as data: what each makes of a stage, what it is called, and where to look."""

from trajreplay.stages.faults.catalogue import FAULTS, catalogue, fault_named, not_loaded
from trajreplay.stages.faults.fault import (
    Fault,
    Told,
    WrongAdvantages,
    WrongKl,
    WrongLosses,
    WrongRewards,
)
from trajreplay.stages.faults.reports import REPORTS, Report, reported

__all__ = [
    "FAULTS",
    "REPORTS",
    "Fault",
    "Report",
    "Told",
    "WrongAdvantages",
    "WrongKl",
    "WrongLosses",
    "WrongRewards",
    "catalogue",
    "fault_named",
    "not_loaded",
    "reported",
]
