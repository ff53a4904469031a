"""A policy held against one capture set as it completes, by the checks that one alone can fail."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise

from trajreplay.query import Catalog
from trajreplay.query.manifest.catalog import Cohort
from trajreplay.query.manifest.lineage import lineages
from trajreplay.schema.errors import QueryError
from trajreplay.stages.gate.check import Check, Judged
from trajreplay.stages.gate.checks import CHECKS, CHECKS_BY_NAME, judged, sources
from trajreplay.stages.gate.evidence import Evidence
from trajreplay.stages.gate.gathering import gather
from trajreplay.stages.gate.heartbeats import Values
from trajreplay.stages.gate.of_mismatch import PATIENCE, WINDOW
from trajreplay.stages.gate.of_run import unasked
from trajreplay.stages.gate.order import numbered
from trajreplay.stages.gate.policy import Policy, checked
from trajreplay.stages.gate.verdict import CheckVerdict, in_order
from trajreplay.stages.report import CohortReport

_OF_CAPTURES = ("captures", "replay")  # judged of the capture set alone, without its step's values


@dataclass
class CohortGate:
    """Holds capture sets against a policy, one by one in the order in which they complete.

    Args:
        policy: The policy; of its checks those are made that a rollout or step alone can fail, and
            the comparison with the run's own first steps.

    Raises:
        QueryError: The policy has no such check, or is malformed.
    """

    policy: Policy
    _history: dict[Cohort, Values] = field(default_factory=dict)
    _first: dict[tuple[str, tuple[int, ...]], tuple[dict[int, Values], int]] = field(
        default_factory=dict
    )

    def __post_init__(self) -> None:
        checked(self.policy, "the policy")
        self._checks = [one for one in CHECKS if one.name in self.policy.checks and one.of]
        self._reads = sources(self.policy, self._checks)
        self._of_values = any(one.name not in _OF_CAPTURES for one in self._checks)
        if not self._checks:
            able = ", ".join(one.name for one in CHECKS if one.of)
            raise QueryError(
                f"the policy demands nothing of a single rollout or step: its checks are "
                f"{', '.join(self.policy.checks) or 'statements'}, expected one of {able}",
                hint="To hold the run as a whole against it: trajreplay gate POLICY --attempt A",
            )

    def judge(self, catalog: Catalog, one: CohortReport) -> tuple[CheckVerdict, ...]:
        """The outcome of every check of this capture set, those that fail first.

        Args:
            catalog: A listing that shows the capture set, and the steps before it.
            one: Its replay.
        """
        cohort = Cohort(one.run_id, one.attempt, one.rollout_id, one.step_id)
        found = self._gathered(catalog, cohort)
        kind = "rollout" if cohort.step_id is None else "step"
        made = [
            CheckVerdict.of(
                check.name, check.phase, self._judged(check, found, cohort, one), check.unit
            )
            for check in self._checks
            if check.of in (kind, "any")
        ]
        named = {one.check for one in made}
        more = [CHECKS_BY_NAME[one] for one in unasked(found, self.policy) if one not in named]
        made += [
            CheckVerdict.of(of.name, of.phase, judged(of, found, self.policy), of.unit)
            for of in more
        ]
        return in_order(made)

    def _judged(self, check: Check, found: Evidence, cohort: Cohort, one: CohortReport) -> Judged:
        if check.name == "replay":
            allowed = ("pass", "precision") if self.policy.allow_precision else ("pass",)
            bound = f"verdict {' or '.join(allowed)}"
            passed = one.verdict in allowed
            return Judged(passed, one.verdict, bound, "" if passed else f"it is {one.verdict}")
        if check.name == "mismatch_baseline":
            given = self.policy.checks[check.name]
            window, patience = given.get("window", WINDOW), given.get("patience", PATIENCE)
            found, number = self._chained(found, cohort, window)
            if number < window + patience:
                count = window + patience - 1
                return Judged(None, None, check.demand, f"it is one of the first {count} steps")
        return judged(check, found, replace(self.policy, run="intermediate"))

    def _chained(self, found: Evidence, cohort: Cohort, window: int) -> tuple[Evidence, int]:
        """The steps up to this one of all attempts that its own continues, and its number.

        The first steps of a resumed attempt are no warm-up: what it continues may have drifted.
        Those that were captured may begin late, too, or skip some, of which heartbeats tell.
        """
        catalog = found.catalog
        lineage = lineages(catalog, cohort.run_id, cohort.attempt)[cohort.run_id]
        steps = [
            one
            for one in catalog.by_cohort
            if one.run_id == cohort.run_id
            and one.step_id is not None
            and one.order <= cohort.order
            and lineage.shows(one)
        ]
        for one in steps:
            if one not in self._history:
                self._gathered(catalog, one)
        values = _by_number({one: self._history[one] for one in steps})
        number = max(values)
        chain = replace(found, attempts=lineage.attempts, steps=values)
        if number > window and not set(range(1, window + 1)) <= set(values):
            heard = self._told(chain, window, number)
            chain.steps = heard | values
        return chain, number

    def _told(self, chain: Evidence, window: int, number: int) -> dict[int, Values]:
        """What heartbeats say of the first steps; where some lack, ever more seldom asked again."""
        key = chain.run_id, chain.attempts
        first, again = self._first.get(key, ({}, 0))
        if len(first) < window and number >= again:
            heard = gather(chain.catalog, chain.run_id, chain.attempts, reads=()).steps
            first = {one: heard[one] for one in range(1, window + 1) if one in heard}
            self._first[key] = first, 2 * number
        return first

    def _gathered(self, catalog: Catalog, cohort: Cohort) -> Evidence:
        if not self._of_values or cohort.step_id is None:
            return Evidence(catalog, cohort.run_id, (cohort.attempt,), only=cohort)
        found = gather(catalog, cohort.run_id, [cohort.attempt], only=cohort, reads=self._reads)
        self._history[cohort] = next(iter(found.steps.values()), {})
        return found


def _by_number(history: Mapping[Cohort, Values]) -> dict[int, Values]:
    """Steps by number: as the heartbeats tell, where those of all do, else counted by place."""
    ordered = sorted(history.items(), key=lambda one: (one[0][2:4], one[0].attempt))
    told = [values.get("step") for _, values in ordered]
    known = [one for one in told if one is not None]
    if len(known) == len(told) and all(one < later for one, later in pairwise(known)):
        return dict(zip(known, (values for _, values in ordered), strict=True))
    places = {(one.attempt, one.rollout_id, one.step_id or 0): values for one, values in ordered}
    return {number: values for number, (_, values) in numbered(places)}
