"""Policies: how close recorded and recomputed values must be, and which text may be stored."""

from __future__ import annotations

import hashlib
import hmac
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trajreplay.schema.errors import QueryError, SchemaError

TEXT_FIELDS = ("prompt", "response", "label", "tool_output", "path", "endpoint")
_PREFIXES = {"hash": "sha256:", "keyed-hash": "hmac-sha256:"}
KEY = "TRAJREPLAY_REDACTION_KEY"  # the variable that holds it; what it holds is stored nowhere
_KEY_BYTES = 16  # at least
_TRUNCATE_DEFAULT = 64


@dataclass(frozen=True)
class Tolerance:
    """|recorded - recomputed| <= atol + rtol * |recomputed| is a pass.

    Args:
        atol: Unit of what is compared.
        rtol: Dimensionless.
        accepted: A looser one that was asked for: what only it allows is precision, not a pass.
    """

    atol: float
    rtol: float
    accepted: Tolerance | None = None

    def tightened(self, other: Tolerance) -> Tolerance:
        """The stricter of two, part by part."""
        return Tolerance(min(self.atol, other.atol), min(self.rtol, other.rtol), self.accepted)

    def loosens(self, other: Tolerance) -> bool:
        """Whether it would accept what `other` does not."""
        return self.atol > other.atol or self.rtol > other.rtol


@dataclass(frozen=True)
class Comparison:
    """How a replay was asked to compare, beside the policy.

    Args:
        atol: Absolute part of the tolerance; the policy's if None.
        rtol: Relative part; the policy's if None.
        exact: Whether a pass must also have, bit for bit, what float32 arithmetic gives, rounded
            to the recorded dtype.

    Raises:
        QueryError: A part of the tolerance is negative or not finite.

    >>> Comparison(rtol=0.01).of(Tolerance(1e-6, 1e-5)).accepted
    Tolerance(atol=1e-06, rtol=0.01, accepted=None)
    """

    atol: float | None = None
    rtol: float | None = None
    exact: bool = False

    def __post_init__(self) -> None:
        for name, value in (("atol", self.atol), ("rtol", self.rtol)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise QueryError(
                    f"{name} is {value}, expected a finite number, 0 or more",
                    hint="A tolerance that allows everything compares nothing.",
                )

    def of(self, policy: Tolerance) -> Tolerance:
        """A tolerance of the policy under it: stricter where asked, never silently looser."""
        if self.atol is None and self.rtol is None:
            return policy
        asked = Tolerance(
            policy.atol if self.atol is None else self.atol,
            policy.rtol if self.rtol is None else self.rtol,
        )
        strict = policy.tightened(asked)
        accepted = asked if asked.loosens(policy) else None
        return Tolerance(strict.atol, strict.rtol, accepted)

    def __str__(self) -> str:
        parts = (("atol", self.atol), ("rtol", self.rtol))
        named = [f"{name} {value:g}" for name, value in parts if value is not None]
        return ", ".join([*named, *(["exact"] if self.exact else [])])

    def to_json(self) -> dict[str, Any]:
        """All facts as JSON values."""
        return {"atol": self.atol, "rtol": self.rtol, "exact": self.exact}


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
    """What may be kept of each text field: hash, keyed-hash, truncate[:N] or drop, if not said.

    Texts that can be guessed are found again by their plain hash. That of `keyed-hash` is made with
    a secret of the environment, and equal texts are then equal to whoever has none.

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
        if action in _PREFIXES:
            data = text.encode("utf-8", "surrogatepass")
            if action == "keyed-hash":
                digest = hmac.digest(_key(), data, "sha256").hex()
            else:
                digest = hashlib.sha256(data).hexdigest()
            return _PREFIXES[action] + digest
        return text[:limit] if action == "truncate" else None

    def check_key(self) -> None:
        """Refuse a keyed hash without a key, before there is anything to hash.

        Raises:
            SchemaError: A rule needs the key, and the environment has none, or a short one.
        """
        if any(_parse(name, rule)[0] == "keyed-hash" for name, rule in self.rules.items()):
            _key()

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
        if action in _PREFIXES:
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
        prefix = _PREFIXES[action]
        digest = stored.removeprefix(prefix)
        hexadecimal = len(digest) == 64 and not set(digest) - set("0123456789abcdef")
        is_hash = stored.startswith(prefix) and hexadecimal
        return "" if is_hash else f"is plain text, though the policy says {action}"


def _key() -> bytes:
    key = os.environ.get(KEY, "").encode("utf-8", "surrogateescape")
    if len(key) < _KEY_BYTES:
        raise SchemaError(
            f"redaction says keyed-hash and {KEY} has {len(key)} bytes, expected at least "
            f"{_KEY_BYTES}",
            hint="Set it to a secret, the same in all processes of a run; it is never stored.",
        )
    return key


def _parse(name: str, rule: str) -> tuple[str, int]:
    action, _, number = rule.partition(":")
    if action == "truncate" and (not number or (number.isascii() and number.isdigit())):
        return action, int(number) if number else _TRUNCATE_DEFAULT
    if action in (*_PREFIXES, "drop") and not number:
        return action, 0
    raise SchemaError(
        f"redaction of {name} is {rule!r}, expected hash, keyed-hash, drop, truncate or "
        "truncate:CHARACTERS"
    )
