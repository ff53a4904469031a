"""The check of captured choices of experts: what the sampler chose, the trainer replayed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress

from trajreplay.query.experts.replayed import TRAINER_OF, Replayed, ReplayedReading
from trajreplay.query.routes.policy import STAGES
from trajreplay.schema.entry import Entry
from trajreplay.schema.errors import TrajReplayError
from trajreplay.schema.identity import DROPPED
from trajreplay.stages.gate.check import Judged, Parameters
from trajreplay.stages.gate.evidence import Evidence
from trajreplay.stages.gate.heartbeats import Values
from trajreplay.stages.gate.policy import Policy

Place = tuple[int, int, int | None]  # attempt, rollout, and step of one
NAME = "route_agreement"
_EVERY = 1.0


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
    reading = ReplayedReading(found.catalog, _names(policy))
    whole = {name: Replayed(name) for name in _names(policy)}
    compared: dict[str, set[Place]] = {name: set() for name in whole}
    lacking: dict[str, list[tuple[Place, int]]] = {name: [] for name in whole}
    for entry in _entries(found):
        key = entry.key
        place = key.attempt, key.rollout_id or 0, key.step_id
        for one in reading.of(entry, _told(place)):
            whole[one.name].take(one)
            if one.rows:
                compared[one.name].add(place)
        for name in set(whole) - set(reading.held(entry)) if entry.owner else ():
            lacking[name].append((place, entry.rows))
    for name, ranks in lacking.items():  # the other ranks of a step have them
        whole[name].without += sum(count for place, count in ranks if place in compared[name])
    rows = sum(one.rows for one in whole.values())
    fallback = sum(one.fallback for one in whole.values())
    if not rows:
        reason = "of no token are the choices of both sides captured" + _without(whole)
        both = any(one.samples for one in whole.values())
        return Judged(False if named or both else None, None, bound, reason)
    agreement = 1 - sum(one.differing for one in whole.values()) / rows
    share = fallback / (rows + fallback)
    value = {
        "agreement": agreement,
        "rows": rows,
        "without_route": share,
        "steps": {name: len(places) for name, places in compared.items() if places},
    }
    first = next((one.first for one in whole.values() if one.first), "")
    if agreement < at_least:
        return Judged(False, value, bound, first)
    if most is not None and share > most:
        reason = f"{fallback} of {rows + fallback} rows have no route on one of the sides"
        return Judged(False, value, bound, reason)
    open_ = _open(found, whole, compared)
    return Judged(not (named and open_), value, bound, "; ".join(x for x in (first, open_) if x))


def _names(policy: Policy) -> tuple[str, ...]:
    """The trainer's choices in the stages that replay."""
    stated = policy.checks.get(NAME, {}).get("stages")
    stages = policy.checks.get("routes", {}).get("stages", STAGES) if stated is None else stated
    return tuple(TRAINER_OF[one] for one in stages)


def _entries(found: Evidence) -> Iterator[Entry]:
    """The captures of the attempts; the other pipeline stages' too, which hold other layers."""
    for key in found.captures():
        if key.kind != "events" and key.part != DROPPED:
            with suppress(TrajReplayError):  # what cannot be read is told by `attempt`
                yield found.catalog.entry(key)


def _told(place: Place) -> str:
    """A capture set as the command line takes it."""
    _, rollout_id, step_id = place
    return f"rollout {rollout_id}" if step_id is None else f"step {rollout_id}:{step_id}"


def _without(whole: Mapping[str, Replayed]) -> str:
    """What one of the sides lacks, as the end of a reason."""
    count = sum(one.without for one in whole.values())
    return f": {count} samples lack those of one side" if count else ""


def _open(
    found: Evidence, whole: Mapping[str, Replayed], compared: Mapping[str, set[Place]]
) -> str:
    """What was not compared: steps, samples, layers."""
    told = []
    for name, places in compared.items():
        steps = [step for step, one in sorted(found.steps.items()) if not places & _places(one)]
        if steps:
            told.append(f"{name} of step {found.names(steps)} not captured beside the sampler's")
        if count := whole[name].without:
            told.append(f"{name} or the sampler's choices of {count} samples not captured")
        if layers := sorted(whole[name].layers):
            told.append(f"layer {', '.join(map(str, layers))} of {name} none of the sampler's")
    return ", ".join(told)


def _places(values: Values) -> set[Place]:
    """Where the choices of a step may be captured: with it, or with its rollout."""
    attempt, rollout_id, step_id = (values.get(one) for one in ("attempt", "rollout_id", "step_id"))
    if attempt is None or rollout_id is None:
        return set()
    return {(attempt, rollout_id, step_id), (attempt, rollout_id, None)}
