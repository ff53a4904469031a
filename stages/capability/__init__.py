"""What can be recomputed: decided from contract version, settings, layout and columns."""

from trajreplay.stages.capability.ability import LOG_PROB_SOURCES, Ability
from trajreplay.stages.capability.advantages import OF_NO_RETURNS, message_faults
from trajreplay.stages.capability.batches import over_batches, over_trajectories
from trajreplay.stages.capability.limits import limits
from trajreplay.stages.capability.matrix import ability
from trajreplay.stages.capability.reused import reused_ability
from trajreplay.stages.capability.unread import not_read
from trajreplay.stages.capability.v1 import is_plain

__all__ = [
    "LOG_PROB_SOURCES",
    "OF_NO_RETURNS",
    "Ability",
    "ability",
    "is_plain",
    "limits",
    "message_faults",
    "not_read",
    "over_batches",
    "over_trajectories",
    "reused_ability",
]
