"""Policies: how close recorded and recomputed values must be, and which text may be stored."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

from trajreplay.schema.errors import SchemaError

TEXT_FIELDS = ("prompt", "response", "label", "tool_output", "path", "endpoint")
_HASH_PREFIX = "sha256:"
_TRUNCATE_DEFAULT = 64


@dataclass(frozen=True)
class Tolerance:
    """|recorded - recomputed| <= atol + rtol * |recomputed| is a pass."""

    atol: float
    rtol: float

    def tightened(self, other: Tolerance) -> Tolerance:
        """The stricter of two, part by part."""
        return Tolerance(min(self.atol, other.atol), min(self.rtol, other.rtol))

    def loosens(self, other: Tolerance) -> bool:
        """Whether it would accept what `other` does not."""
        return self.atol > other.atol or self.rtol > other.rtol


# float32 as Relax's replay has it; the others are two units in the last place.
TOLERANCES: dict[str, Tolerance] = {
    "float64": Tolerance(1e-12, 1e-12),
    "float32": Tolerance(1e-6, 1e-5),
    "bfloat16": Tolerance(1e-6, 2.0**-7),
    "float16": Tolerance(1e-6, 2.0**-10),
}


def tolerance_of(dtype: str) -> Tolerance:
    """The comparison policy for values recorded in `dtype`; float32's for an unknown one."""
    return TOLERANCES.get(dtype, TOLERANCES["float32"])


class Redaction:
    """What may be kept of each text field: hash, truncate[:N] or drop; drop where nothing is said.

    >>> Redaction({"prompt": "truncate:3"}).apply("prompt", "hello")
    'hel'
    """

    def __init__(self, rules: Mapping[str, str] | None = None) -> None:
        self.rules = dict(rules or {})
        for name, rule in self.rules.items():
            if name not in TEXT_FIELDS:
                raise SchemaError(
                    f"redaction names {name!r}, expected one of {', '.join(TEXT_FIELDS)}"
                )
            _parse(name, rule)

    def apply(self, name: str, text: str | None) -> str | None:
        """What is stored of `text`."""
        if text is None:
            return None
        action, limit = _parse(name, self.rules.get(name, "drop"))
        if action == "hash":
            return _HASH_PREFIX + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
        return text[:limit] if action == "truncate" else None

    def tightens(self, other: Redaction, name: str) -> bool:
        """Whether it can be applied to what `other` left of a field, and keeps no more of it."""
        action, limit = _parse(name, self.rules.get(name, "drop"))
        before, kept = _parse(name, other.rules.get(name, "drop"))
        if action == "truncate":
            return before == "truncate" and limit <= kept
        return action in ("drop", before) or before == "truncate"

    def withholds(self, name: str, stored: str | None) -> str:
        """Why a stored value may be less than the text that there was, or nothing."""
        rule = self.rules.get(name, "drop")
        action, limit = _parse(name, rule)
        if action == "drop":
            return "was dropped by the redaction policy of the capture"
        if stored is None:
            return ""
        if action == "hash":
            return "was replaced by its hash by the redaction policy of the capture"
        return f"may have been cut by the redaction policy {rule}" * (len(stored) >= limit)

    def problem(self, name: str, stored: str | None) -> str:
        """Why a stored value is not what the policy leaves, or nothing."""
        if stored is None:
            return ""
        action, limit = _parse(name, self.rules.get(name, "drop"))
        if action == "drop":
            return "is stored, though the policy drops it"
        if action == "truncate":
            return f"has {len(stored)} characters, expected at most {limit}" * (len(stored) > limit)
        digest = stored.removeprefix(_HASH_PREFIX)
        hexadecimal = len(digest) == 64 and not set(digest) - set("0123456789abcdef")
        is_hash = stored.startswith(_HASH_PREFIX) and hexadecimal
        return "" if is_hash else "is plain text, though the policy says hash"


def _parse(name: str, rule: str) -> tuple[str, int]:
    action, _, number = rule.partition(":")
    if action == "truncate" and (not number or (number.isascii() and number.isdigit())):
        return action, int(number) if number else _TRUNCATE_DEFAULT
    if action in ("hash", "drop") and not number:
        return action, 0
    raise SchemaError(
        f"redaction of {name} is {rule!r}, expected hash, drop, truncate or truncate:CHARACTERS"
    )
