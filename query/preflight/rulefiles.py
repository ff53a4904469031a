"""Files of rules, those of the package and those of users: read, and tried on their examples."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any

from trajreplay.query.preflight.configs import parse_overrides, parse_value, with_defaults
from trajreplay.query.preflight.evaluation import Undecided
from trajreplay.query.preflight.rules import FRAMEWORKS, Rule, RuleSet, check_range
from trajreplay.schema.errors import QueryError
from trajreplay.schema.toml_files import read_toml

_TOP = {"framework", "version", "releases", "rule", "defaults", "facts"}
_FOLDER = Path(__file__).with_name("rules")


@cache
def built_in(framework: str) -> RuleSet:
    """The rules that come with the package.

    Raises:
        QueryError: There is no such framework.
    """
    if framework not in FRAMEWORKS:
        raise QueryError(f"no rules for {framework!r}, expected one of {', '.join(FRAMEWORKS)}")
    return _read(_FOLDER / f"{framework}.toml", of_users=False)


def load_rules(path: str | os.PathLike[str]) -> RuleSet:
    """Read a file of rules.

    Args:
        path: TOML with `framework`, `version`, tables `facts` and `defaults`, and tables `rule`,
            each with the fields of `Rule`, where `name` is without the framework; `releases` where
            the rules are of releases of the framework that those of the package do not know.

    Raises:
        QueryError: It is malformed, a rule asks for a fact that neither it nor the rules of the
            package declare, or an example of a rule does not do what it is for.
    """
    found = _read(path, of_users=True)
    defaults = built_in(found.framework).defaults | found.defaults
    for rule in found.rules:
        _try_examples(rule, defaults, str(path))
    return found


def _read(path: str | os.PathLike[str], *, of_users: bool) -> RuleSet:
    tree = read_toml(path, "rules")
    framework, version = tree.get("framework"), tree.get("version")
    if framework not in FRAMEWORKS or type(version) is not int:
        raise QueryError(
            f"{path}: framework {framework!r}, version {version!r}, expected one of "
            f"{', '.join(FRAMEWORKS)} and a whole number"
        )
    listed, defaults, facts = tree.get("rule", []), tree.get("defaults", {}), tree.get("facts", {})
    if unknown := sorted(tree.keys() - _TOP):
        raise QueryError(f"{path}: unknown {', '.join(unknown)}")
    tables = isinstance(listed, list) and isinstance(defaults, dict) and isinstance(facts, dict)
    if not tables or not all(_is_fact(*one) for one in facts.items()):
        raise QueryError(f"{path}: expected tables [[rule]], [defaults] and [facts]")
    declared = (built_in(str(framework)).facts if of_users else {}) | facts
    rules = tuple(_rule(one, str(framework), str(path)) for one in listed)
    names = [one.name for one in rules]
    if twice := sorted({one for one in names if names.count(one) > 1}):
        raise QueryError(f"{path}: twice: {', '.join(twice)}")
    for rule in rules:
        _check_facts(rule, declared, str(path))
    releases = tree.get("releases", "")
    if not isinstance(releases, str):
        raise QueryError(f"{path}: releases are {releases!r}, expected as >=0.22,<1.10")
    check_range(releases, f"{path}: releases")
    return RuleSet(str(framework), version, facts, defaults, rules, releases)


def _is_fact(name: str, value: Any) -> bool:
    if not name.isidentifier():
        return False
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


def _facts_of(rule: Rule, where: str) -> dict[str, Any]:
    """The facts of its examples."""
    found = {}
    for one in rule.facts:
        name, sign, value = one.partition("=")
        try:
            if not sign:
                raise ValueError("expected NAME=VALUE")
            found[name] = parse_value(value)
        except ValueError as error:
            raise QueryError(f"{where}: rule {rule.name}: fact {one!r}: {error}") from error
    return found


def _check_facts(rule: Rule, declared: Mapping[str, str | list[str]], where: str) -> None:
    stated = _facts_of(rule, where)
    if unknown := sorted((rule.condition.facts | stated.keys()) - declared.keys()):
        raise QueryError(
            f"{where}: rule {rule.name} asks for fact {', '.join(unknown)}, expected one of "
            f"{', '.join(declared) or 'none'}",
            hint="Declare it under [facts]: its name, and what it is or the values that it has.",
        )
    for name, value in stated.items():
        allowed = declared[name]
        if isinstance(allowed, list) and value not in allowed:
            raise QueryError(
                f"{where}: rule {rule.name}: fact {name} is {value!r}, expected one of "
                f"{', '.join(allowed)}"
            )


def _try_examples(rule: Rule, defaults: Mapping[str, Any], where: str) -> None:
    """Refuse a rule that its own examples do not bear out: a path in it may be misspelt."""
    for name, example, wanted in (("fails", rule.fails, True), ("passes", rule.passes, False)):
        if not example:
            continue
        try:
            tree = with_defaults(parse_overrides(example), defaults)
        except QueryError as error:
            raise QueryError(f"{where}: rule {rule.name}: {name}: {error.message}") from error
        found = rule.condition.holds(tree, _facts_of(rule, where))
        open_for = found.facts | found.paths if isinstance(found, Undecided) else frozenset()
        # What hangs on a path that is merely absent is not refused, as an example may show.
        is_refused = True if found is True else None if open_for else False
        if is_refused is not wanted:
            told = "is not decided" if is_refused is None else f"is {str(is_refused).lower()}"
            on = f", which hangs on {', '.join(sorted(open_for))}" if open_for else ""
            raise QueryError(
                f"{where}: rule {rule.name}: {rule.when!r} {told} of its example {name}{on}; "
                f"expected {str(wanted).lower()}",
                hint="Compare the paths in the condition with those in the example.",
            )
