"""The search: every fault of a stage tried on a cohort, then pairs, ranked by fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

from trajreplay.schema.errors import TrajReplayError
from trajreplay.stages.block import Block
from trajreplay.stages.counterfactuals.sparing import Values
from trajreplay.stages.counterfactuals.values import recompute
from trajreplay.stages.counterfactuals.variants import Variant, varied
from trajreplay.stages.explain.explanation import Explanation, Hypothesis
from trajreplay.stages.explain.fit import (
    COUNTS,
    EVIDENCE,
    Fit,
    can_join,
    fit_of,
    fit_pair,
    largest_error,
    resting_on_counts,
)
from trajreplay.stages.explain.ranks import at_some_ranks
from trajreplay.stages.explain.residual import residual_shapes
from trajreplay.stages.explain.target import Target
from trajreplay.stages.explain.trying import told_of
from trajreplay.stages.faults import Fault, reported

# Singles that are combined, and settings beside them: of half the square of both together, a search
# of one stage recomputes those pairs that can be right by what each moves.
PAIRED, BESIDE = 14, 10
# Clauses on the error of one field, and of all.
CLAUSES, CLAUSES_IN_ALL = 3, 6
# What explains no more than this part of what differs is near to nothing.
NEAREST = 0.1
# So many ways of one fault that repair nothing are enough where others are there.
WAYS = 3


def explain_stage(
    block: Block,
    stage: str,
    explanation: Explanation,
    faults: Sequence[Fault],
    first: Sequence[tuple[str, ...]] = (),
    *,
    only_first: bool = False,
) -> None:
    """Search what reproduces the recorded values of a stage.

    Args:
        block: One cohort.
        stage: The stage.
        explanation: Gets what is found.
        faults: The catalogue.
        first: Ids of faults, or of pairs of them, that explained a cohort before: where they do
            this one, too, nothing else is tried, which is said.
        only_first: Whether nothing else is tried in any case.
    """
    try:
        base = recompute(varied(block, Variant(), (stage,)), stage)
    except TrajReplayError as error:
        explanation.note = f"cannot be explained: {error.message}"
        return
    _describe(explanation, base)
    if not explanation.differ:
        explanation.note = "values agree when the whole cohort is recomputed from its own columns"
        return
    by_chance = resting_on_counts(base)
    mine = [(order, one) for order, one in enumerate(faults) if one.stage == stage and one.tries]
    target = Target(block, stage, base, explanation.failed)
    fits = _known(target, mine, first)
    explanation.searched = not fits and not only_first
    if explanation.searched:
        wrong = {one.field.partition(".")[0] for one in base if one.differs}
        able = [one for one in mine if not one[1].touches or wrong <= {*one[1].touches}]
        found = list(_singles(target, able))
        fits = [one for one in found if one.reproduces]
        if not fits:  # only a pair can, or one that comes near to it
            found += _singles(target, [one for one in mine if one not in able])
            found.sort(key=lambda one: one.order)
        if not fits:
            parts = (at_some_ranks(block, base, one) for one in found if one.moved)
            fits = [one for one in parts if one is not None]
        if not fits:
            fits = [one for one in _pairs(target, found) if one.reproduces]
        if not fits:
            nearest = max(found, key=lambda one: (one.agree, -one.order), default=None)
            right = explanation.of - explanation.differ
            if nearest is not None and nearest.agree - right > NEAREST * explanation.differ:
                explanation.nearest = _hypothesis([nearest], by_chance)
    if not fits:
        _describe_residual(explanation, block, base)
    alike: dict[tuple[str, ...], list[Fit]] = {}
    for fit in sorted(fits, key=lambda one: one.rank):
        alike.setdefault(fit.faults, []).append(fit)
    explanation.hypotheses = [_hypothesis(one, by_chance) for one in alike.values()]


def _known(
    target: Target, faults: Sequence[tuple[int, Fault]], first: Sequence[tuple[str, ...]]
) -> list[Fit]:
    """What explained a cohort before and does this one, too: singles, or else pairs."""
    ids = {one for known in first for one in known}
    found = list(_singles(target, [pair for pair in faults if pair[1].id in ids]))
    fits = [one for one in found if one.reproduces]
    if fits:
        return fits
    pairs = {frozenset(one) for one in first if len(one) > 1}
    moving = [one for one in found if one.moved]
    joined = (
        fit_pair(target, one, other)
        for one, other in combinations(moving, 2)
        if frozenset(one.faults + other.faults) in pairs
    )
    return [one for one in joined if one is not None and one.reproduces]


def _describe(explanation: Explanation, base: list[Values]) -> None:
    nouns = {"sample": "samples", "token": "tokens", "scalar": "scalars"}
    kinds = {nouns[one.per] for one in base}
    explanation.noun = kinds.pop() if len(kinds) == 1 else "values"
    explanation.of = sum(int(one.counts.sum()) for one in base)
    explanation.differ = sum(int(one.wrong.sum()) for one in base)
    explanation.audit = {}
    for one in base:
        bad, of = explanation.audit.get(one.field, (0, 0))
        mine = int(one.wrong.sum()), int(one.counts.sum())
        explanation.audit[one.field] = bad + mine[0], of + mine[1]
    explanation.misses_by = max([largest_error(one, one.wrong) for one in base] or [0.0])


def _describe_residual(explanation: Explanation, block: Block, base: list[Values]) -> None:
    """The shape of the error, of each field a few clauses, and the kind that it is of."""
    shapes = residual_shapes(block, base)
    by_field: Counter[str] = Counter()
    for one in shapes:
        name, colon, _ = one.says.partition(": ")
        by_field[name if colon else ""] += 1
        if by_field[name if colon else ""] <= CLAUSES:
            explanation.residual.append(one.says)
    del explanation.residual[CLAUSES_IN_ALL:]
    wrong = [one.field for one in base if one.differs]
    named = [one for one in wrong if one.partition(".")[0] not in COUNTS] or wrong
    differs = {f"differs: {one}" for one in named}
    explanation.kind = frozenset(differs | {one.kind for one in shapes if one.certain})
    explanation.fits = frozenset(differs | {one.kind for one in shapes})


def _singles(target: Target, faults: Sequence[tuple[int, Fault]]) -> Iterator[Fit]:
    for order, fault in faults:
        for told in told_of(fault, target.block, target.failed):
            fit = fit_of(target, ((fault, told),), order)
            if fit is not None:
                yield fit


def _pairs(target: Target, singles: list[Fit]) -> Iterator[Fit]:
    """Pairs of singles that repair a part, or that move the values and are settings or factors."""
    base = target.base
    if sum(int(one.wrong.sum()) for one in base) < EVIDENCE:
        return
    moving = [one for one in singles if one.moved and not one.told[0][0].alone]
    ranked = sorted(moving, key=lambda one: (-len(one.repaired), -one.agree, one.order))
    best = _some_of_each(ranked)[:PAIRED]
    rest = [one for one in moving if one.told[0][1].variant.settings and one not in best]
    plain = _some_of_each(rest)
    wrong = frozenset(one.key for one in base if one.differs)
    for one, other in combinations([*best, *plain[:BESIDE]], 2):
        if not can_join(one, other, wrong):
            continue
        fit = fit_pair(target, one, other)
        if fit is not None:
            yield fit


def _some_of_each(singles: list[Fit]) -> list[Fit]:
    """Singles, of those that repair nothing the first few ways of each fault before the others."""
    seen: Counter[tuple[str, ...]] = Counter()
    first, others = list[Fit](), list[Fit]()
    for one in singles:
        seen[one.faults] += not one.repaired
        (first if seen[one.faults] <= WAYS else others).append(one)
    return [*first, *others]


def _hypothesis(alike: Sequence[Fit], by_chance: int) -> Hypothesis:
    """The best of some fits by the same faults; the others cannot be told from it."""
    fit = alike[0]
    settings: dict[str, Any] = {}
    for _, told in fit.told:
        settings |= told.variant.settings
    faults = [fault for fault, _ in fit.told]
    sentences = list(dict.fromkeys(_sentence(one) for one in alike))
    return Hypothesis(
        fit.faults,
        " and ".join(one.name for one in faults),
        sentences[0],
        "; ".join(one.look for one in faults),
        tuple(dict.fromkeys(report for one in faults for report in reported(one.references))),
        settings,
        fit.values,
        fit.agree,
        fit.max_error,
        fit.undecided == 0,
        tuple(sentences[1:]),
        by_chance,
    )


def _sentence(fit: Fit) -> str:
    said = ", and ".join(fault.says(told.detail) for fault, told in fit.told)
    return f"{said}, {fit.where}" if fit.where else said
