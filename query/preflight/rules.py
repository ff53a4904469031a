"""Rules of configurations: what one is, and for which versions of a framework it is."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from trajreplay.query.preflight.expressions import Expression
from trajreplay.schema.errors import QueryError

FRAMEWORKS = ("nemo-rl", "verl", "trl", "slime", "relax", "openrlhf", "areal", "prime-rl")
Severity = Literal["error", "warning"]
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*/[a-z0-9][a-z0-9-]*\Z")
_BOUND = re.compile(r"(<=|>=|<|>|==)(\d+(?:\.\d+)*)\Z", re.ASCII)
# A release, and the same one built or packaged again.
_RELEASE = re.compile(r"v?(\d+(?:\.\d+)*)(?:\.?post\d+)?(?:\+[\w.]+)?\Z", re.ASCII)


@dataclass(frozen=True)
class Rule:
    """One rule: a condition that no configuration may meet.

    Args:
        name: `framework/name`.
        when: The condition under which it is broken.
        path: The setting to change, where findings point.
        why: What would go wrong.
        instead: What to write.
        severity: `error` for what cannot work or does nothing, `warning` for what means something
            else than its name says elsewhere.
        versions: Versions of the framework it holds for, such as `>=0.22,<1.10`; all if empty.
        revision: Counted up when its meaning changes.
        fails: Overrides that make a configuration that breaks it.
        passes: Overrides that make one that does not.
        facts: Facts that go with these two.
        source: Where this is known from.
    """

    name: str
    when: str
    path: str
    why: str
    instead: str
    severity: Severity = "error"
    versions: str = ""
    revision: int = 1
    fails: tuple[str, ...] = ()
    passes: tuple[str, ...] = ()
    facts: tuple[str, ...] = ()
    source: str = ""
    condition: Expression = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "condition", Expression(self.when))
        if not _NAME.match(self.name):
            raise QueryError(f"rule {self.name!r}: expected a name such as nemo-rl/async-engine")
        if self.severity not in ("error", "warning"):
            raise QueryError(f"rule {self.name}: severity {self.severity!r}, not error or warning")
        check_range(self.versions, f"rule {self.name}: versions")

    @property
    def framework(self) -> str:
        """The framework whose configurations it is for."""
        return self.name.partition("/")[0]

    @property
    def reads(self) -> frozenset[str]:
        """The settings that it is about."""
        return self.condition.paths | {self.path}

    def holds_for(self, version: str | None) -> bool | None:
        """Whether it is for a version; None where that hangs on one that was not stated.

        Raises:
            QueryError: The version is no number.
        """
        if not self.versions:
            return True
        return None if version is None else _is_within(version, self.versions)


@dataclass(frozen=True)
class RuleSet:
    """Rules of one file, with the values that a framework takes where nothing is written.

    Args:
        framework: Whose.
        version: Of the set.
        facts: What conditions ask beside the configuration: in words, or the values there are.
        defaults: Dotted paths and values.
        rules: The rules.
        releases: Those that the rules were read from, such as `>=0.22,<1.17`; none if empty.
    """

    framework: str
    version: int
    facts: dict[str, str | list[str]]
    defaults: dict[str, Any]
    rules: tuple[Rule, ...]
    releases: str = ""

    def knows(self, version: str) -> bool:
        """Whether the rules say anything of a version.

        Raises:
            QueryError: The version is no number.
        """
        return bool(self.releases) and _is_within(version, self.releases)


def parse_version(text: str) -> tuple[int, ...]:
    """The numbers of a release.

    Raises:
        QueryError: It is none: a branch, or a version before a release, whose sources may be those
            of either side.

    >>> parse_version("v1.10.0+cu128")
    (1, 10, 0)
    """
    found = _RELEASE.match(text)
    if found is None:
        raise QueryError(
            f"version {text!r}, expected the numbers of a release such as 0.6",
            hint="Of other sources state the release they are nearest to, or no version: what "
            "hangs on it is then named.",
        )
    return tuple(int(one) for one in found[1].split("."))


def check_range(text: str, where: str) -> None:
    """Refuse what is no range of versions.

    Raises:
        QueryError: A bound of it is none.
    """
    for bound in filter(None, text.split(",")):
        if not _BOUND.match(bound):
            raise QueryError(f"{where} are {text!r}, expected as >=0.22,<1.10")


def _is_within(version: str, versions: str) -> bool:
    numbers = parse_version(version)
    bounds = [_BOUND.match(one) for one in filter(None, versions.split(","))]
    return all(_compares(numbers, one[1], one[2]) for one in bounds if one)


def _compares(version: tuple[int, ...], sign: str, bound: str) -> bool:
    other = [int(one) for one in bound.split(".")]
    width = max(len(version), len(other))
    left = [*version, *[0] * (width - len(version))]
    right = other + [0] * (width - len(other))
    return {
        "<": left < right,
        "<=": left <= right,
        ">": left > right,
        ">=": left >= right,
        "==": left == right,
    }[sign]
