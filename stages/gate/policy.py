"""What a run is held against: named checks with their bounds, from a TOML file or a preset."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, get_args

from trajreplay.schema.errors import QueryError
from trajreplay.schema.toml_files import read_toml
from trajreplay.stages.gate.statement import SqlCheck, check_known, check_statement_of, statement_of

RunKind = Literal["direct", "intermediate", "final"]
RUN_KINDS: tuple[RunKind, ...] = get_args(RunKind)
PRESETS = ("router-replay", "replay-clean", "mismatch-baseline")
_FOLDER = Path(__file__).parent / "presets"
# A run of more optimizer steps is a slip of the pen.
MOST_STEPS = 1_000_000_000
# What a policy states of routes to the gate itself, and not to the check of the traces.
GATE_KEYS = ("traces", "traced_steps")
# Keys of a policy of `trajreplay routes`, which is no table of checks.
_OF_ROUTES = {"contract", "stages", "layers", "experts", "require", "max_fallback_share"}
_TOP = ("preset", "max_steps", "run", "allow_precision", "checks", "sql")


@dataclass(frozen=True)
class Policy:
    """What a run is held against.

    Args:
        checks: By name, the parameters of the checks to make.
        sql: Statements that return a number, with a bound.
        max_steps: Optimizer steps that the whole chain has; needed where steps are counted.
        run: `direct`, a job of its own; `final`, the last of a chain; `intermediate`, one that may
            end before `max_steps` and certifies nothing.
        allow_precision: Whether a replay within rounding errors, not tolerances, passes.
    """

    checks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sql: tuple[SqlCheck, ...] = ()
    max_steps: int | None = None
    run: RunKind = "direct"
    allow_precision: bool = False

    def to_json(self) -> dict[str, Any]:
        """Everything it says, as plain data."""
        return {
            "checks": {name: dict(found) for name, found in sorted(self.checks.items())},
            "sql": [vars(one) | {"bounds": dict(one.bounds)} for one in self.sql],
            "max_steps": self.max_steps,
            "run": self.run,
            "allow_precision": self.allow_precision,
        }

    @property
    def digest(self) -> str:
        """The same for two policies only if they demand the same."""
        text = json.dumps(self.to_json(), sort_keys=True, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(text.encode()).hexdigest()

    def with_parameters(self, check: str, **stated: Any) -> Policy:
        """The policy with parameters of one of its checks stated; None states nothing.

        Raises:
            QueryError: The policy does not make the check.
        """
        given = {name: value for name, value in stated.items() if value is not None}
        if not given:
            return self
        if check not in self.checks:
            raise QueryError(
                f"{' and '.join(given)} given, and the policy makes no check {check}",
                hint=f"Leave it out, or add a line [checks.{check}] to the policy.",
            )
        changed = {**self.checks, check: {**self.checks[check], **given}}
        return checked(replace(self, checks=changed), "the policy")


def load_gate_policy(named: str | os.PathLike[str], **stated: Any) -> Policy:
    """Read a policy.

    Args:
        named: A TOML file, or the name of a preset. A file may say `preset = NAME` and then states
            only what is other or more than in the preset.
        stated: Top-level fields that count before those of the file.

    Raises:
        QueryError: It is no TOML, or a key or value is none of those allowed.

    >>> load_gate_policy("router-replay").checks["generation_kl"]["below"]
    0.001
    """
    given = {name: value for name, value in stated.items() if value is not None}
    if os.fspath(named) in PRESETS:
        return policy_of(_preset(os.fspath(named)) | given, f"preset {named}")
    tree = read_toml(named, "policy", f"Or name a preset: {', '.join(PRESETS)}")
    where = os.fspath(named)
    return policy_of(_resolved(tree, where) | given, where)


def _preset(name: str) -> dict[str, Any]:
    return read_toml(_FOLDER / f"{name}.toml", "policy")


def _resolved(tree: dict[str, Any], where: str) -> dict[str, Any]:
    """A tree with what its preset says beneath; a check that is `false` is not made."""
    name = tree.pop("preset", None)
    if name is None:
        return tree
    if name not in PRESETS:
        raise QueryError(f"{where}: preset is {name!r}, expected one of {', '.join(PRESETS)}")
    base = _preset(name)
    checks = {**base["checks"]}
    given = tree.get("checks", {})
    if not isinstance(given, dict):
        raise QueryError(f"{where}: checks is {given!r}, expected a table")
    for check, parameters in given.items():
        if parameters is False:
            checks.pop(check, None)
        elif isinstance(parameters, dict):
            checks[check] = {**checks.get(check, {}), **parameters}
        else:
            checks[check] = parameters
    return base | tree | {"checks": checks}


def policy_of(tree: Mapping[str, Any], where: str) -> Policy:
    """A policy from plain values.

    Raises:
        QueryError: A key or value is none of those allowed.
    """
    if tree.keys() & _OF_ROUTES and not tree.keys() & {"checks", "preset"}:
        raise QueryError(
            f"{where}: {', '.join(sorted(tree.keys() & _OF_ROUTES))} at the top, as in a policy of "
            "trajreplay routes; expected the policy of a gate",
            hint="A gate reads what routes are held against from below a line [checks.routes].",
        )
    check_known(tree, _TOP, where)
    sql = tree.get("sql", [])
    if not isinstance(sql, list):
        raise QueryError(f"{where}: sql is {sql!r}, expected tables [[sql]]")
    policy = Policy(
        checks=tree.get("checks", {}),
        sql=tuple(statement_of(one, where) for one in sql),
        max_steps=tree.get("max_steps"),
        run=tree.get("run", "direct"),
        allow_precision=tree.get("allow_precision", False),
    )
    return checked(policy, where)


def checked(policy: Policy, where: str) -> Policy:
    """The policy, if every check, parameter and statement of it can be, and it checks anything.

    Whoever judges asks, since a policy may have been put together without a file.

    Raises:
        QueryError: It does not.
    """
    from trajreplay.query.routes import CONTRACTS
    from trajreplay.query.routes import policy_of as routes_policy
    from trajreplay.stages.gate.checks import CHECKS_BY_NAME

    checks: Any = policy.checks
    run = policy.run
    _check_tables(checks, where)
    if run not in RUN_KINDS:
        raise QueryError(f"{where}: run is {run!r}, expected one of {', '.join(RUN_KINDS)}")
    if not isinstance(policy.allow_precision, bool):
        raise QueryError(
            f"{where}: allow_precision is {policy.allow_precision!r}, expected true or false"
        )
    if not checks and not policy.sql:
        raise QueryError(f"{where}: no check is named, and a policy that checks nothing passes all")
    _check_parameters(checks, where)
    routes = {name: one for name, one in checks.get("routes", {}).items() if name not in GATE_KEYS}
    # What is stated has to be right under either contract; the command line may name it later.
    routes_policy({"contract": CONTRACTS[0], **routes}, f"{where}: checks.routes")
    steps = policy.max_steps
    if steps is not None and (type(steps) is not int or not 1 <= steps <= MOST_STEPS):
        raise QueryError(
            f"{where}: max_steps is {steps!r}, expected a number from 1 to {MOST_STEPS}"
        )
    counted = [name for name in checks if CHECKS_BY_NAME[name].counts_steps]
    if counted and steps is None:
        raise QueryError(
            f"{where}: max_steps is missing, which {counted[0]} counts over",
            hint="State it: max_steps = 10, or --max-steps 10",
        )
    for one in policy.sql:
        check_statement_of(one, where)
    twice = [one.name for one in policy.sql if [o.name for o in policy.sql].count(one.name) > 1]
    if twice:
        raise QueryError(f"{where}: two statements are called {twice[0]!r}")
    return policy


def _check_tables(checks: Any, where: str) -> None:
    """Refuse checks that are no tables, or that there are not."""
    from trajreplay.stages.gate.checks import CHECKS_BY_NAME

    if not isinstance(checks, Mapping):
        raise QueryError(f"{where}: checks is {checks!r}, expected a table of tables")
    check_known(checks, tuple(CHECKS_BY_NAME), where)
    for name, found in checks.items():
        if not isinstance(found, Mapping):
            raise QueryError(
                f"{where}: checks.{name} is {found!r}, expected a table",
                hint=f"Write [checks.{name}] and its parameters below it, or {name} = {{}} without "
                f"any, under\n[checks]; {name} = false leaves a check of the preset out.",
            )


def _check_parameters(checks: Mapping[str, Mapping[str, Any]], where: str) -> None:
    """Refuse parameters that a check does not have, and values that they cannot have."""
    from trajreplay.stages.gate.checks import CHECKS_BY_NAME

    for name, parameters in checks.items():
        declared = {one.name: one for one in CHECKS_BY_NAME[name].parameters}
        check_known(parameters, tuple(declared), f"{where}: checks.{name}")
        for key, value in parameters.items():
            problem = declared[key].problem(value)
            if problem:
                raise QueryError(f"{where}: checks.{name}.{key} is {value!r}, expected {problem}")
