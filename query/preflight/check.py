"""A configuration held against the rules of its framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from trajreplay.query.preflight.configs import with_defaults
from trajreplay.query.preflight.evaluation import FACT, Undecided, look_up
from trajreplay.query.preflight.recognise import unrecognised
from trajreplay.query.preflight.rulefiles import built_in
from trajreplay.query.preflight.rules import Rule, RuleSet, Severity, parse_version
from trajreplay.schema.errors import QueryError

PREFLIGHT_FINDINGS = pa.schema(
    [
        pa.field("severity", pa.string(), nullable=False),
        pa.field("rule", pa.string(), nullable=False),
        pa.field("path", pa.string(), nullable=False),
        pa.field("value", pa.string(), nullable=False),
        pa.field("why", pa.string(), nullable=False),
        pa.field("instead", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True)
class PreflightFinding:
    """A rule that a configuration breaks.

    Args:
        rule: The rule.
        value: What is at its path, with the framework's default where nothing is written.
    """

    rule: Rule
    value: Any

    @property
    def severity(self) -> Severity:
        """`error` or `warning`."""
        return self.rule.severity


@dataclass(frozen=True)
class PreflightReport:
    """The outcome.

    Args:
        framework: Whose rules.
        version: Of the framework, where stated.
        checked: Rules that were decided.
        findings: Those that are broken, errors first.
        undecided: Names of rules that facts or a version would decide, and which.
        unread: Names of rules that hang on settings whose value does not tell, an interpolation or
            one of another type, and these: path and value.
        unverified: Why the rules say nothing of this file; empty where they do.
    """

    framework: str
    version: str | None
    checked: int
    findings: tuple[PreflightFinding, ...]
    undecided: dict[str, tuple[str, ...]]
    unread: dict[str, dict[str, Any]]
    unverified: str = ""

    @property
    def verdict(self) -> Literal["ok", "refused", "unverified"]:
        """`refused` where an error was found; `unverified` where the rules say nothing of it."""
        if any(one.severity == "error" for one in self.findings):
            return "refused"
        return "unverified" if self.unverified else "ok"

    @property
    def ok(self) -> bool:
        """Whether the rules were held against it and no error was found."""
        return self.verdict == "ok"

    def arrow(self) -> pa.Table:
        """The findings as a table."""
        rows = [
            {
                "severity": one.severity,
                "rule": one.rule.name,
                "path": one.rule.path,
                "value": shown(one.value),
                "why": one.rule.why,
                "instead": one.rule.instead,
            }
            for one in self.findings
        ]
        return pa.Table.from_pylist(rows, schema=PREFLIGHT_FINDINGS)


def preflight(
    config: Mapping[str, Any],
    framework: str,
    *,
    version: str | None = None,
    facts: Mapping[str, Any] | None = None,
    more: Sequence[RuleSet] = (),
) -> PreflightReport:
    """Check a configuration before anything starts.

    Args:
        config: The resolved configuration, from `load_config`.
        framework: Whose it is.
        version: Of the framework; rules for some versions stay undecided without it.
        facts: What no configuration says, such as `dataset_size`.
        more: Rules of users for the same framework.

    Raises:
        QueryError: There are no rules for the framework, its version is no number, a fact or its
            value is none that the rules know, a user's rules are for another framework, or one
            has the name of another.

    >>> report = preflight({"num_generations": 1}, "trl")
    >>> [(one.rule.name, one.value) for one in report.findings]
    [('trl/group-of-one', 1)]
    """
    sets = [built_in(framework), *more]
    for of in more:
        if of.framework != framework:
            raise QueryError(
                f"these rules are for {of.framework}, the configuration is of {framework}",
                hint="Leave them out, or state the other framework.",
            )
    if version is not None:
        parse_version(version)
    stated = facts or {}
    _check_facts(stated, sets)
    tree = with_defaults(config, {key: one for of in sets for key, one in of.defaults.items()})
    found: list[PreflightFinding] = []
    undecided: dict[str, tuple[str, ...]] = {}
    unread: dict[str, dict[str, Any]] = {}
    checked = 0
    names: set[str] = set()
    for rule in (rule for of in sets for rule in of.rules):
        if rule.name in names:
            raise QueryError(f"rule {rule.name} is there twice: give yours another name")
        names.add(rule.name)
        applies = rule.holds_for(version)
        if applies is False:
            continue
        value = rule.condition.holds(tree, stated)
        if isinstance(value, Undecided):
            if value.facts:
                undecided[rule.name] = tuple(sorted(value.facts))
            if value.paths:
                unread[rule.name] = {
                    path: _written(path, tree, stated) for path in sorted(value.paths)
                }
            continue
        if value and applies is None:
            undecided[rule.name] = ("version",)
            continue
        checked += 1
        if value:
            found.append(PreflightFinding(rule, look_up(tree, rule.path)))
    found.sort(key=lambda one: one.severity != "error")
    unverified = unrecognised(config, framework, sets) or _unknown(version, sets)
    return PreflightReport(framework, version, checked, tuple(found), undecided, unread, unverified)


def _unknown(version: str | None, sets: Sequence[RuleSet]) -> str:
    """Why the rules say nothing of a version: they were read from other releases."""
    if version is None or any(of.knows(version) for of in sets):
        return ""
    known = [of.releases for of in sets if of.releases]
    told = f"the rules are of {' and '.join(known)}" if known else "the rules are of no release"
    return (
        f"nothing is known of version {version}: {told}; state the release that it is nearest to, "
        "or no version: what hangs on it is then named"
    )


def _check_facts(facts: Mapping[str, Any], sets: Sequence[RuleSet]) -> None:
    known = {name: one for of in sets for name, one in of.facts.items()}
    for name, value in facts.items():
        if name not in known:
            raise QueryError(
                f"no rule of {sets[0].framework} asks for {name}, expected one of "
                f"{', '.join(known) or 'none'}"
            )
        allowed = known[name]
        if isinstance(allowed, list) and value not in allowed:
            raise QueryError(f"fact {name} is {value!r}, expected one of {', '.join(allowed)}")


def _written(path: str, tree: Mapping[str, Any], facts: Mapping[str, Any]) -> Any:
    head, _, name = path.partition(".")
    return facts.get(name) if head == FACT else look_up(tree, path)


def shown(value: Any) -> str:
    """A value as a configuration writes it."""
    if value is None:
        return "not set"
    if isinstance(value, Undecided):
        return value.text or "not known"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "a section"
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    return str(value)
