"""Rules of configurations as data: read from TOML, those of the package and those of users."""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any, Literal

from trajreplay.query.preflight.expressions import Expression
from trajreplay.schema.errors import QueryError

FRAMEWORKS = ("nemo-rl", "verl", "trl", "slime", "relax", "openrlhf", "areal", "prime-rl")
Severity = Literal["error", "warning"]
_FOLDER = Path(__file__).with_name("rules")
_MOST_BYTES = 1 << 20
_NAME = re.compile(r"[a-z0-9][a-z0-9-]*/[a-z0-9][a-z0-9-]*\Z")
_BOUND = re.compile(r"(<=|>=|<|>|==)(\d+(?:\.\d+)*)\Z")


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
        for bound in filter(None, self.versions.split(",")):
            if not _BOUND.match(bound):
                raise QueryError(
                    f"rule {self.name}: versions are {self.versions!r}, expected as >=0.22,<1.10"
                )

    @property
    def framework(self) -> str:
        """The framework whose configurations it is for."""
        return self.name.partition("/")[0]

    def holds_for(self, version: str | None) -> bool | None:
        """Whether it is for a version; None where that hangs on one that was not stated."""
        bounds = [_BOUND.match(one) for one in filter(None, self.versions.split(","))]
        if not bounds:
            return True
        if version is None:
            return None
        return all(_compares(version, one[1], one[2]) for one in bounds if one)


@dataclass(frozen=True)
class RuleSet:
    """Rules of one file, with the values that a framework takes where nothing is written.

    Args:
        framework: Whose.
        version: Of the set.
        facts: What conditions ask beside the configuration: in words, or the values there are.
        defaults: Dotted paths and values.
        rules: The rules.
    """

    framework: str
    version: int
    facts: dict[str, str | list[str]]
    defaults: dict[str, Any]
    rules: tuple[Rule, ...]


@cache
def built_in(framework: str) -> RuleSet:
    """The rules that come with the package.

    Raises:
        QueryError: There is no such framework.
    """
    if framework not in FRAMEWORKS:
        raise QueryError(f"no rules for {framework!r}, expected one of {', '.join(FRAMEWORKS)}")
    return load_rules(_FOLDER / f"{framework}.toml")


def load_rules(path: str | os.PathLike[str]) -> RuleSet:
    """Read a file of rules.

    Args:
        path: TOML with `framework`, `version`, tables `facts` and `defaults`, and tables `rule`,
            each with the fields of `Rule`, where `name` is without the framework.

    Raises:
        QueryError: It is malformed.
    """
    file = Path(path)
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise QueryError(f"{path}: more than {_MOST_BYTES} bytes")
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise QueryError(f"{path}: no rules can be read: {error}") from error
    framework, version = tree.get("framework"), tree.get("version")
    if framework not in FRAMEWORKS or type(version) is not int:
        raise QueryError(
            f"{path}: framework {framework!r}, version {version!r}, expected one of "
            f"{', '.join(FRAMEWORKS)} and a whole number"
        )
    listed, defaults, facts = tree.get("rule", []), tree.get("defaults", {}), tree.get("facts", {})
    if unknown := sorted(tree.keys() - {"framework", "version", "rule", "defaults", "facts"}):
        raise QueryError(f"{path}: unknown {', '.join(unknown)}")
    tables = isinstance(listed, list) and isinstance(defaults, dict) and isinstance(facts, dict)
    if not tables or not all(_is_fact(one) for one in facts.values()):
        raise QueryError(f"{path}: expected tables [[rule]], [defaults] and [facts]")
    rules = tuple(_rule(one, str(framework), str(path)) for one in listed)
    names = [one.name for one in rules]
    if twice := sorted({one for one in names if names.count(one) > 1}):
        raise QueryError(f"{path}: twice: {', '.join(twice)}")
    return RuleSet(str(framework), version, facts, defaults, rules)


def _is_fact(value: Any) -> bool:
    many = isinstance(value, list) and all(isinstance(one, str) for one in value)
    return isinstance(value, str) or many


def _rule(tree: Any, framework: str, where: str) -> Rule:
    known = {one.name: str(one.type) for one in fields(Rule) if one.init}
    if not isinstance(tree, dict) or not isinstance(tree.get("name"), str):
        raise QueryError(f"{where}: a rule without a name")
    name = tree["name"]
    if unknown := sorted(tree.keys() - known.keys()):
        raise QueryError(f"{where}: rule {name} has unknown {', '.join(unknown)}")
    if missing := sorted({"when", "path", "why", "instead"} - tree.keys()):
        raise QueryError(f"{where}: rule {name} lacks {', '.join(missing)}")
    values: dict[str, Any] = {}
    for key, value in tree.items():
        if known[key].startswith("tuple"):
            if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
                raise QueryError(f"{where}: rule {name}: {key} is no list of text")
            values[key] = tuple(value)
        elif type(value) is not (int if known[key] == "int" else str):
            raise QueryError(f"{where}: rule {name}: {key} is {value!r}")
        else:
            values[key] = value
    try:
        return Rule(**(values | {"name": f"{framework}/{name}"}))
    except QueryError as error:
        raise QueryError(f"{where}: {error.message}") from error


def _compares(version: str, sign: str, bound: str) -> bool:
    numbers = [int(one) for one in re.findall(r"\d+", version)]
    other = [int(one) for one in bound.split(".")]
    width = max(len(numbers), len(other))
    left = numbers + [0] * (width - len(numbers))
    right = other + [0] * (width - len(other))
    return {
        "<": left < right,
        "<=": left <= right,
        ">": left > right,
        ">=": left >= right,
        "==": left == right,
    }[sign]
