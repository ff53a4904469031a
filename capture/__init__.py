"""Recorders inside a trainer, and readers of other tools' files."""

from trajreplay.capture.enabling import enable, enable_from_env, recorder
from trajreplay.capture.reasons import CaptureWarning
from trajreplay.capture.recorder import Recorder
from trajreplay.capture.switching.selection import Selection
from trajreplay.capture.switching.switches import Switches

__all__ = [
    "CaptureWarning",
    "Recorder",
    "Selection",
    "Switches",
    "enable",
    "enable_from_env",
    "recorder",
]
