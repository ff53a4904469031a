"""What a check of routes says: findings, the outcome of each rule, and the verdict."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pyarrow as pa

from trajreplay.query.routes.policy import STAGES, RoutePolicy
from trajreplay.query.routes.rules import RULES, RULES_BY_NAME

Severity = Literal["failure", "unverified", "remark"]
Status = Literal["pass", "fail", "unverified", "not-applicable"]
ROUTE_FINDINGS = pa.schema(
    [
        pa.field("severity", pa.string(), nullable=False),
        pa.field("rule", pa.string(), nullable=False),
        pa.field("message", pa.string(), nullable=False),
        pa.field("where", pa.string(), nullable=False),
    ]
)
_ORDER = {rule.name: number for number, rule in enumerate(RULES)}
# Those that a check begins with: where one is broken, nothing more is checked.
_FIRST = ("trace.json", "trace.record", "trace.empty", "trace.one_attempt")
_SEVERITIES: tuple[Severity, ...] = ("failure", "unverified", "remark")


@dataclass(frozen=True)
class RouteFinding:
    """One thing worth saying about a trace.

    Args:
        severity: `failure`; `unverified` for what the trace cannot decide; `remark`.
        rule: The rule it belongs to.
        message: What was found and what was expected.
        where: file and line, stage, trace_step, rank, cp_rank, layer, microbatch, sample_idx, key:
            those that apply.
    """

    severity: Severity
    rule: str
    message: str
    where: dict[str, Any]


@dataclass
class RouteFindings:
    """The findings of a check in the making."""

    found: list[RouteFinding] = field(default_factory=list)

    def fail(self, rule: str, message: str, **where: Any) -> None:
        """Say that a rule is broken."""
        self._add("failure", rule, message, where)

    def unverified(self, rule: str, message: str, **where: Any) -> None:
        """Say that the trace cannot decide a rule."""
        self._add("unverified", rule, message, where)

    def remark(self, rule: str, message: str, **where: Any) -> None:
        """Say something that breaks no rule."""
        self._add("remark", rule, message, where)

    def has_failed(self, *rules: str) -> bool:
        """Whether one of these rules is broken."""
        return any(one.severity == "failure" and one.rule in rules for one in self.found)

    def _add(self, severity: Severity, rule: str, message: str, where: dict[str, Any]) -> None:
        assert rule in RULES_BY_NAME, rule
        kept = {name: value for name, value in where.items() if value is not None}
        self.found.append(RouteFinding(severity, rule, message, kept))


@dataclass(frozen=True)
class RouteReport:
    """The outcome of a check.

    Args:
        path: The trace folder.
        policy: What it was held against.
        findings: Failures first, then what is unverified, then remarks; by rule in each.
        steps: Trace steps that were recorded, by stage: what is said holds for these.
        ranks: Ranks that have records.
        layers: MoE layers that are replayed.
        records: Records that were checked.
        left_out: Records of other processes, times or events.
        fallback_rows: Rows left to the trainer's own router, of `verified_rows`.
        verified_rows: Rows of all verified forwards.
        stopped: Whether rules after the first broken one could not be checked.
        of_attempt: Whether anything of the attempt was known beside its traces.
    """

    path: str
    policy: RoutePolicy
    findings: tuple[RouteFinding, ...]
    steps: dict[str, list[int]]
    ranks: tuple[int, ...]
    layers: tuple[int, ...]
    records: int
    left_out: int
    fallback_rows: int
    verified_rows: int
    stopped: bool
    of_attempt: bool = False

    @property
    def verdict(self) -> Literal["pass", "fail"]:
        """`fail` where a rule is broken, or required and unverified."""
        broken = any(one.severity == "failure" for one in self.findings)
        return "fail" if broken or self.undecided else "pass"

    @property
    def undecided(self) -> tuple[str, ...]:
        """Rules that the policy requires to be decided, and that are not."""
        statuses, policy = self.statuses, self.policy
        # A share that was never counted is not known to be within its bound.
        bounded = () if policy.max_fallback_share is None else ("route.fallback",)
        return tuple(
            name
            for name in dict.fromkeys((*policy.require, *bounded))
            if statuses[name] not in ("pass", "fail")
        )

    @property
    def statuses(self) -> dict[str, Status]:
        """The outcome of each rule."""
        return {rule.name: self._status(rule.name) for rule in RULES}

    def _status(self, name: str) -> Status:
        rule = RULES_BY_NAME[name]
        if self.policy.contract not in rule.contracts:
            return "not-applicable"
        if rule.of_attempt and not self.of_attempt:
            return "not-applicable"
        if rule.both_stages and len(self.policy.stages) < len(STAGES):
            return "not-applicable"
        found = {one.severity for one in self.findings if one.rule == name}
        if "failure" in found:
            return "fail"
        if "unverified" in found or (self.stopped and name not in _FIRST):
            return "unverified"
        return "pass"

    def arrow(self) -> pa.Table:
        """The findings as a table."""
        rows = [
            {
                "severity": one.severity,
                "rule": one.rule,
                "message": one.message,
                "where": " ".join(f"{name}={value}" for name, value in one.where.items()),
            }
            for one in self.findings
        ]
        return pa.Table.from_pylist(rows, schema=ROUTE_FINDINGS)

    def to_json(self) -> dict[str, Any]:
        """Everything, as plain values."""
        policy = {name: value for name, value in vars(self.policy).items() if value is not None}
        return {
            "path": self.path,
            "verdict": self.verdict,
            "policy": {
                name: list(value) if isinstance(value, tuple) else value
                for name, value in policy.items()
            },
            "steps": self.steps,
            "ranks": list(self.ranks),
            "layers": list(self.layers),
            "records": self.records,
            "left_out": self.left_out,
            "fallback_rows": self.fallback_rows,
            "verified_rows": self.verified_rows,
            "undecided": list(self.undecided),
            "rules": self.statuses,
            "findings": [vars(one) for one in self.findings],
        }


def in_order(found: list[RouteFinding]) -> tuple[RouteFinding, ...]:
    """Findings as a report lists them; the sort keeps the order in which a rule found them."""
    return tuple(sorted(found, key=lambda one: (_SEVERITIES.index(one.severity), _ORDER[one.rule])))
