"""The texts of switches in the environment, each read into the value that it is."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from trajreplay.capture.switching.selection import Selection
from trajreplay.capture.switching.triggers import Triggers
from trajreplay.schema.policy import Redaction

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_BYTES = re.compile(r"(\d{1,15})([KMG]?)i?B?")
_SECONDS = re.compile(r"\d{1,9}(\.\d{1,6})?")
_FLAGS = {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False, "": False}


def flag(text: str) -> bool:
    """Whether it says yes.

    Raises:
        ValueError: It says neither yes nor no.
    """
    if text.lower() not in _FLAGS:
        raise ValueError("1 or 0")
    return _FLAGS[text.lower()]


def _bytes(text: str) -> int:
    if not (found := _BYTES.fullmatch(text.upper().replace("IB", "B"))):
        raise ValueError("bytes, such as 268435456 or 256M")
    return int(found[1]) * _UNITS[found[2]]


def _seconds(text: str) -> float:
    if not _SECONDS.fullmatch(text):
        raise ValueError("seconds, such as 0.5")
    return float(text)


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 6):
        raise ValueError("a number of steps")
    return int(text)


def attempt(text: str) -> int:
    """The number of a restart.

    Raises:
        ValueError: It is none.
    """
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError("a restart's number, the first is 0")
    return int(text)


def _spool(text: str) -> str:
    if "://" in text:
        raise ValueError("a folder of this machine")
    return text


def _redaction(text: str) -> dict[str, str]:
    rules: dict[str, str] = {}
    for part in filter(None, (one.strip() for one in text.split(","))):
        name, separator, rule = part.partition("=")
        if not separator or name in rules:
            raise ValueError(
                "rules such as prompt=keyed-hash,response=truncate:64, one for each field"
            )
        rules[name] = rule
    Redaction(rules).check_key()
    return rules


def _steps(text: str) -> str:
    Selection(steps=text)
    return text


def _rollouts(text: str) -> str:
    Selection(rollouts=text)
    return text


# By the end of a name the field of `Switches`, and what reads its text; that raises ValueError or
# SchemaError.
READERS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "STEPS": ("steps", _steps),
    "ROLLOUTS": ("rollouts", _rollouts),
    "REDACTION": ("redaction", _redaction),
    "QUEUE_BYTES": ("queue_bytes", _bytes),
    "DEVICE_BYTES": ("device_bytes", _bytes),
    "WAIT_S": ("wait_s", _seconds),
    "CLOSE_S": ("close_s", _seconds),
    "KEEP_LAST": ("keep_last", _count),
    "RING_BYTES": ("ring_bytes", _bytes),
    "TRIGGERS": ("triggers", Triggers),
    "GRADIENTS": ("gradients", flag),
    "SPOOL": ("spool", _spool),
    "STRICT": ("strict", flag),
}
