"""The check of captured choices of experts: what the sampler chose, the trainer replayed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain

from trajreplay.query.experts import RouteProblem
from trajreplay.query.experts.replayed import TRAINER_OF, Replayed, ReplayedReading
from trajreplay.query.routes.policy import STAGES
from trajreplay.schema.entry import Entry
from trajreplay.schema.errors import TrajReplayError
from trajreplay.schema.identity import DROPPED, CaptureKey
from trajreplay.stages.gate.check import Judged, Parameters
from trajreplay.stages.gate.evidence import Evidence
from trajreplay.stages.gate.heartbeats import Values
from trajreplay.stages.gate.policy import Policy

Place = tuple[int, int, int | None]  # attempt, rollout, and step of one
NAME = "route_agreement"
_EVERY = 1.0
_SHOWN = 8  # layers that a reason names


def holds_experts(found: Evidence, policy: Policy) -> bool:
    """Whether choices of the trainer were captured of a stage that replays."""
    reading = ReplayedReading(found.catalog, _names(policy))
    return any(reading.held(entry) for entry in _entries(found))


def judge_route_agreement(found: Evidence, policy: Policy, given: Parameters) -> Judged:
    """The trainer's captured choices are the sampler's.

    Where the policy names the check, every step has them; else those that have are compared.
    """
    routes = policy.checks.get("routes", {})
    at_least = given.get("at_least", _EVERY)
    most = given.get("max_fallback_share", routes.get("max_fallback_share"))
    named = NAME in policy.checks and not given.get("chosen", False)
    bound = f"share of routes that are the sampler's >= {at_least:g}"
    if most is not None:
        bound += f", of rows without a route <= {most:g}"
    held = _Compared.of(found, policy)
    if not held.rows:
        both = any(one.samples for one in held.whole.values())
        reason = "of no token are the choices of both sides captured" + held.lacking()
        if both:
            reason = (
                f"of no token do both sides have a route: each of {held.fallback} rows is -1 on "
                "one of them, and left to the trainer's own router"
            )
        return Judged(False if named or both else None, None, bound, reason)
    value = {
        "agreement": held.agreement,
        "rows": held.rows,
        "without_route": held.fallback_share,
        "captures": {name: len(found) for name, found in held.places.items() if found},
    }
    if held.problems:
        return Judged(False, value, bound, held.problems[0])
    if held.agreement < at_least:
        return Judged(False, value, bound, held.first)
    if most is not None and held.fallback_share > most:
        told = f"{held.fallback} of {held.rows + held.fallback} rows"
        return Judged(False, value, bound, f"{told} have no route on one of the sides")
    open_ = held.open(found)
    reasons = [one for one in (held.first, open_) if one]
    return Judged(not (named and open_), value, bound, "; ".join(reasons))


@dataclass
class _Compared:
    """What the captures of the attempts come to.

    Args:
        whole: Of all of them, by name of the trainer's choices.
        places: By name, what was found of each capture set.
        problems: What is no route that a router chose, in words.
    """

    whole: dict[str, Replayed]
    places: dict[str, dict[Place, Replayed]]
    problems: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, found: Evidence, policy: Policy) -> _Compared:
        """Read the captures of the attempts, of every rank."""
        names = _names(policy)
        reading = ReplayedReading(found.catalog, names)
        held = cls({name: Replayed(name) for name in names}, {name: {} for name in names})
        without: list[tuple[str, Place, int]] = []
        for entry in _entries(found):
            place = entry.key.attempt, entry.key.rollout_id or 0, entry.key.step_id
            told = _told(place)
            compared, problems = reading.of(entry, told)
            held.note(told, problems)
            for one in compared:
                held.places[one.name].setdefault(place, Replayed(one.name)).take(one)
            lacks = set(names) - set(reading.held(entry)) if entry.owner else set()
            without += [(name, place, entry.rows) for name in lacks]
        for key in sorted(reading.givers, key=str):
            held.note(f"rollout {key.rollout_id}", reading.problems(key))
        for name, place, count in without:  # the other ranks of a step have them
            if place in held.places[name]:
                held.places[name][place].without += count
        for name, places in held.places.items():
            for one in places.values():
                held.whole[name].take(one)
        return held

    def note(self, told: str, problems: Sequence[RouteProblem]) -> None:
        """Take note of what cannot be a route, of a capture set in words."""
        self.problems += [
            f"{one.check}: {told}, sample {one.sample_id}: {one.message}"
            for one in problems
            if one.severity == "error"
        ]

    @property
    def rows(self) -> int:
        """Rows of which both sides have a route."""
        return sum(one.rows for one in self.whole.values())

    @property
    def fallback(self) -> int:
        """Rows of which one has none."""
        return sum(one.fallback for one in self.whole.values())

    @property
    def fallback_share(self) -> float:
        """Their share."""
        return self.fallback / (self.rows + self.fallback)

    @property
    def agreement(self) -> float:
        """Share of the rows that are the same experts."""
        return 1 - sum(one.differing for one in self.whole.values()) / self.rows

    @property
    def first(self) -> str:
        """The first row that is not."""
        return next((one.first for one in self.whole.values() if one.first), "")

    def lacking(self) -> str:
        """What one of the sides lacks, as the end of a reason."""
        count = sum(one.without for one in self.whole.values())
        return f": {count} samples lack those of one side" if count else ""

    def open(self, found: Evidence) -> str:
        """What was not compared: steps, samples, layers."""
        told = []
        for name, places in self.places.items():
            compared = {place for place, one in places.items() if one.rows}
            steps = [
                step for step, one in sorted(found.steps.items()) if not compared & _places(one)
            ]
            if steps:
                told.append(
                    f"{name} of step {found.names(steps)} not captured beside the sampler's"
                )
            if count := self.whole[name].without:
                told.append(f"{name} or the sampler's choices of {count} samples not captured")
            if others := sorted(self.whole[name].others):
                told.append(f"layer {_numbers(others)} of {name} none of the sampler's")
            for place, one in sorted(places.items(), key=str):
                if missing := sorted(one.sampled - one.layers):
                    told.append(
                        f"layer {_numbers(missing)} of the sampler's in no {name} of {_told(place)}"
                    )
                    break
        return ", ".join(told)


def _numbers(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers[:_SHOWN])) + (" ..." if len(layers) > _SHOWN else "")


def _names(policy: Policy) -> tuple[str, ...]:
    """The trainer's choices in the stages that replay."""
    stated = policy.checks.get(NAME, {}).get("stages")
    stages = policy.checks.get("routes", {}).get("stages", STAGES) if stated is None else stated
    return tuple(TRAINER_OF[one] for one in stages)


def _entries(found: Evidence) -> Iterator[Entry]:
    """The captures of the attempts; the other pipeline stages' too, which hold other layers.

    Of a single step those of its rollout, too: what replays may be captured there.
    """
    keys = chain(found.captures(), _of_rollout(found))
    for key in keys:
        if key.kind != "events" and key.part != DROPPED:
            with suppress(TrajReplayError):  # what cannot be read is told by `attempt`
                yield found.catalog.entry(key)


def _of_rollout(found: Evidence) -> Iterator[CaptureKey]:
    """The captures of the rollout of the one step that is judged."""
    if found.only is None or found.only.step_id is None:
        return
    yield from found.catalog.by_cohort.get(found.only._replace(step_id=None), ())


def _told(place: Place) -> str:
    """A capture set as the command line takes it."""
    _, rollout_id, step_id = place
    return f"rollout {rollout_id}" if step_id is None else f"step {rollout_id}:{step_id}"


def _places(values: Values) -> set[Place]:
    """Where the choices of a step may be captured: with it, or with its rollout."""
    attempt, rollout_id, step_id = (values.get(one) for one in ("attempt", "rollout_id", "step_id"))
    if attempt is None or rollout_id is None:
        return set()
    return {(attempt, rollout_id, step_id), (attempt, rollout_id, None)}
