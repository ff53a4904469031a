"""What a router-replay trace is held against: the transport contract, and what the run states."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, fields
from typing import Any

from trajreplay.query.routes.rules import CONTRACTS, RULES_BY_NAME, Contract
from trajreplay.schema.bundles.r3.records import Origin
from trajreplay.schema.errors import QueryError
from trajreplay.schema.toml_files import read_toml

STAGES = ("prev-logprob", "train")


@dataclass(frozen=True)
class RoutePolicy:
    """What holds for one run.

    Args:
        contract: How routes travel from sampler to trainer; declared, never inferred.
        stages: Stages that replay; leave out prev-logprob where an on-policy ratio skips it. Any
            other stage in the trace fails.
        layers: The MoE layers, counted from 1; the union over stages and ranks if empty.
        experts: Experts of a layer; the width of the router's scores if 0.
        require: Rules that must have been decided: unverified is a failure.
        max_fallback_share: Share of rows that may be left to the trainer's own router; where it is
            stated it must have been decided, and where it is None any share passes, unverified.
        ignore: Events of other versions of the emitter that are left out, instead of refused.
        processes: The attempt's processes as `host:pid`; all if empty.
        since: The attempt's first second since the epoch; all times if None.
        until: Its last.

    Raises:
        QueryError: A value is none of those allowed.

    >>> RoutePolicy("legacy-async", stages=("train",)).stages
    ('train',)
    """

    contract: Contract
    stages: tuple[str, ...] = STAGES
    layers: tuple[int, ...] = ()
    experts: int = 0
    require: tuple[str, ...] = ()
    max_fallback_share: float | None = None
    ignore: tuple[str, ...] = ()
    processes: tuple[str, ...] = ()
    since: float | None = None
    until: float | None = None

    def __post_init__(self) -> None:
        _check("contract", [self.contract], CONTRACTS)
        _check("stages", self.stages, STAGES)
        _check("require", self.require, tuple(RULES_BY_NAME))
        if not self.stages:
            raise QueryError(f"stages is empty, expected one or both of {', '.join(STAGES)}")
        share = self.max_fallback_share
        if share is not None and not 0 <= share <= 1:
            raise QueryError(f"max_fallback_share is {share}, expected 0 to 1")
        if self.experts < 0:
            raise QueryError(f"experts is {self.experts}, expected a number from 0 on")
        if any(one < 1 for one in self.layers):
            raise QueryError(f"layers has {min(self.layers)}, expected numbers from 1 on")
        for name, time in (("since", self.since), ("until", self.until)):
            if time is not None and not abs(time) < math.inf:
                raise QueryError(f"{name} is {time}, expected a finite number of seconds")

    def keeps(self, origin: Origin) -> bool:
        """Whether a record is of the attempt, by its process and time."""
        if self.processes and origin.process not in self.processes:
            return False
        first = -math.inf if self.since is None else self.since
        last = math.inf if self.until is None else self.until
        return first <= origin.time <= last


def load_policy(path: str | os.PathLike[str], **stated: Any) -> RoutePolicy:
    """Read a policy from a TOML file; its keys are the fields of `RoutePolicy`.

    Args:
        path: The file.
        stated: Fields that count instead of those of the file.

    Raises:
        QueryError: It is no TOML, or a key or value is none of those allowed.
    """
    return policy_of(read_toml(path, "policy") | stated, str(path))


def policy_of(tree: dict[str, Any], where: str) -> RoutePolicy:
    """A policy from plain values, such as a section of a larger policy file.

    Raises:
        QueryError: A key or value is none of those allowed.
    """
    known = {field.name: str(field.type) for field in fields(RoutePolicy)}
    if of_gate := sorted(tree.keys() & {"checks", "preset", "sql"}):
        raise QueryError(
            f"{where}: {', '.join(of_gate)}, as in the policy of a gate; expected what routes "
            f"alone are held against: {', '.join(known)}",
            hint="Put what stands below [checks.routes] there, without traces, at the top of a "
            "file of its own.",
        )
    if unknown := sorted(tree.keys() - known.keys()):
        raise QueryError(
            f"{where}: unknown {', '.join(unknown)}, expected one of {', '.join(known)}"
        )
    if "contract" not in tree:
        raise QueryError(
            f"{where}: contract is missing, expected {' or '.join(CONTRACTS)}",
            hint="State how routes travel from sampler to trainer: it is never inferred.",
        )
    values = {name: _typed(name, value, known[name], where) for name, value in tree.items()}
    try:
        return RoutePolicy(**values)
    except QueryError as error:
        raise QueryError(f"{where}: {error.message}", hint=error.hint) from error


def _typed(name: str, value: Any, declared: str, where: str) -> Any:
    if value is None and "None" in declared:
        return None
    if declared.startswith("tuple"):
        item = int if "int" in declared else str
        if isinstance(value, list | tuple) and all(type(one) is item for one in value):
            return tuple(value)
        raise QueryError(f"{where}: {name} is {value!r}, expected a list of {item.__name__}")
    wanted = (int, float) if "float" in declared else (int,) if declared == "int" else (str,)
    if type(value) not in wanted:
        raise QueryError(f"{where}: {name} is {value!r}, expected {wanted[-1].__name__}")
    return value


def _check(name: str, values: Any, allowed: tuple[str, ...]) -> None:
    for value in values:
        if value not in allowed:
            raise QueryError(f"{name} has {value!r}, expected one of {', '.join(allowed)}")
