"""What is stored and claimed: tables, identities, settings, contracts, errors, the lake on disk."""

from trajreplay.schema.columns import Column, Table
from trajreplay.schema.contracts import STAGES, Stage, StageContract
from trajreplay.schema.dtypes import restore
from trajreplay.schema.entry import Entry, LogProbOrigin, Output
from trajreplay.schema.errors import (
    CaptureError,
    DatasetError,
    QueryError,
    SchemaError,
    StageError,
    TrajReplayError,
)
from trajreplay.schema.identity import CaptureKey, ParallelCoordinates, ProducerInfo, ResumePoint
from trajreplay.schema.policy import Redaction, Tolerance
from trajreplay.schema.recompute import RecomputeConfig
from trajreplay.schema.records import SampleRecord
from trajreplay.schema.settings import (
    PROFILES,
    AdvantageSettings,
    KlSettings,
    LayoutSettings,
    LossSettings,
    Profile,
    RewardSettings,
    SamplingSettings,
    Settings,
    ValueSettings,
    profile,
    with_changes,
)
from trajreplay.schema.tables import TABLES

__all__ = [
    "PROFILES",
    "STAGES",
    "TABLES",
    "AdvantageSettings",
    "CaptureError",
    "CaptureKey",
    "Column",
    "DatasetError",
    "Entry",
    "KlSettings",
    "LayoutSettings",
    "LogProbOrigin",
    "LossSettings",
    "Output",
    "ParallelCoordinates",
    "ProducerInfo",
    "Profile",
    "QueryError",
    "RecomputeConfig",
    "Redaction",
    "ResumePoint",
    "RewardSettings",
    "SampleRecord",
    "SamplingSettings",
    "SchemaError",
    "Settings",
    "Stage",
    "StageContract",
    "StageError",
    "Table",
    "Tolerance",
    "TrajReplayError",
    "ValueSettings",
    "profile",
    "restore",
    "with_changes",
]
