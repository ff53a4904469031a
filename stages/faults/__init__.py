"""Known mistakes, as data: what each makes of a stage, what it is called, and where to look."""

from trajreplay.stages.faults.catalogue import FAULTS, catalogue, fault_named
from trajreplay.stages.faults.fault import (
    Fault,
    Told,
    WrongAdvantages,
    WrongKl,
    WrongLosses,
    WrongRewards,
)

__all__ = [
    "FAULTS",
    "Fault",
    "Told",
    "WrongAdvantages",
    "WrongKl",
    "WrongLosses",
    "WrongRewards",
    "catalogue",
    "fault_named",
]
