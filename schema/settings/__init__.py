"""The arithmetic in force, as data: a tree of small frozen dataclasses, stored resolved."""

from trajreplay.schema.settings.advantage import (
    KL_ESTIMATORS,
    LOW_VAR_KL_CLAMP,
    AdvantageSettings,
    KlSettings,
)
from trajreplay.schema.settings.layout import LayoutSettings
from trajreplay.schema.settings.loss import (
    CORRECTIONS,
    CRITERIA,
    LOSS_TERMS,
    LossSettings,
    ValueSettings,
)
from trajreplay.schema.settings.profiles import (
    PROFILES,
    Profile,
    differences,
    profile,
    with_changes,
)
from trajreplay.schema.settings.reward import RewardSettings
from trajreplay.schema.settings.sampling import SamplingSettings
from trajreplay.schema.settings.tree import HANDOFFS, SECTIONS, Settings

__all__ = [
    "CORRECTIONS",
    "CRITERIA",
    "HANDOFFS",
    "KL_ESTIMATORS",
    "LOSS_TERMS",
    "LOW_VAR_KL_CLAMP",
    "PROFILES",
    "SECTIONS",
    "AdvantageSettings",
    "KlSettings",
    "LayoutSettings",
    "LossSettings",
    "Profile",
    "RewardSettings",
    "SamplingSettings",
    "Settings",
    "ValueSettings",
    "differences",
    "profile",
    "with_changes",
]
