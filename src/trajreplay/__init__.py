"""A flight recorder for RL post-training of language models: capture, query, replay.

Names are resolved on first use: `import trajreplay` inside a trainer loads neither torch nor
duckdb.

>>> import trajreplay
>>> trajreplay.TrajReplayError.__name__
'TrajReplayError'
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trajreplay.lake import Lake
    from trajreplay.schema import (
        AdvantageSettings,
        CaptureError,
        DatasetError,
        KlSettings,
        LayoutSettings,
        LossSettings,
        ParallelCoordinates,
        ProducerInfo,
        QueryError,
        RecomputeConfig,
        ResumePoint,
        RewardSettings,
        SampleRecord,
        SamplingSettings,
        SchemaError,
        Settings,
        StageContract,
        StageError,
        Tolerance,
        TrajReplayError,
        ValueSettings,
        profile,
        with_changes,
    )

__version__ = "0.1.0"

__all__ = [
    "AdvantageSettings",
    "CaptureError",
    "DatasetError",
    "KlSettings",
    "Lake",
    "LayoutSettings",
    "LossSettings",
    "ParallelCoordinates",
    "ProducerInfo",
    "QueryError",
    "RecomputeConfig",
    "ResumePoint",
    "RewardSettings",
    "SampleRecord",
    "SamplingSettings",
    "SchemaError",
    "Settings",
    "StageContract",
    "StageError",
    "Tolerance",
    "TrajReplayError",
    "ValueSettings",
    "__version__",
    "profile",
    "with_changes",
]


def __getattr__(name: str) -> object:
    """Import an exported name from where it is defined, and keep it for the next look."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    source = "trajreplay.lake" if name == "Lake" else "trajreplay.schema"
    value: object = getattr(importlib.import_module(source), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the exported names beside those already loaded."""
    return sorted({*globals(), *__all__})
