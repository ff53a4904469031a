"""The search: every fault of a stage tried on a cohort, then pairs, ranked by fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch

from trajreplay.schema.errors import TrajReplayError
from trajreplay.stages.block import Block
from trajreplay.stages.explain.explanation import Explanation, Hypothesis
from trajreplay.stages.explain.findings import named
from trajreplay.stages.explain.residual import residual_shape
from trajreplay.stages.faults import Fault, Told, reported
from trajreplay.stages.group_sizes import group_size_looks
from trajreplay.stages.values import Values, recompute
from trajreplay.stages.variants import Variant, varied

# Singles that are combined: the most that a search of one stage recomputes is half its square.
PAIRED = 14
# Values that have to differ before pairs are tried: two mistakes at once fit a few by chance.
EVIDENCE = 3
SHORT = "group.short"


@dataclass(frozen=True, eq=False)
class Fit:
    """How a hypothesis fits: what it was, and how much of what was recorded it gives."""

    told: tuple[tuple[Fault, Told], ...]
    order: int
    values: int
    agree: int
    max_error: float
    undecided: int
    repaired: frozenset[str]
    moved: bool

    @property
    def faults(self) -> tuple[str, ...]:
        """The ids of its faults."""
        return tuple(fault.id for fault, _ in self.told)

    @property
    def reproduces(self) -> bool:
        """Whether it gives all of it."""
        return self.agree == self.values

    @property
    def rank(self) -> tuple[int, int, float]:
        """Fits of lower rank are believed first: exact before bounded, then as in the catalogue."""
        return int(self.undecided > 0), len(self.told), self.order


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
        _agreement(block, stage, explanation, faults)
        return
    mine = [(order, one) for order, one in enumerate(faults) if one.stage == stage and one.tries]
    fits = _known(block, stage, mine, base, first)
    explanation.searched = not fits and not only_first
    if explanation.searched:
        tried = list(_singles(block, stage, mine, base))
        fits = [one for one in tried if one.reproduces]
        if not fits:
            fits = [one for one in _pairs(block, stage, tried, base) if one.reproduces]
        if not fits:
            nearest = max(tried, key=lambda one: (one.agree, -one.order), default=None)
            if nearest is not None and nearest.agree > explanation.of - explanation.differ:
                explanation.nearest = _hypothesis([nearest])
    if not fits:
        explanation.residual = residual_shape(block, base)
    alike: dict[tuple[str, ...], list[Fit]] = {}
    for fit in sorted(fits, key=lambda one: one.rank):
        alike.setdefault(fit.faults, []).append(fit)
    explanation.hypotheses = [_hypothesis(one) for one in alike.values()]


def _known(
    block: Block,
    stage: str,
    faults: Sequence[tuple[int, Fault]],
    base: list[Values],
    first: Sequence[tuple[str, ...]],
) -> list[Fit]:
    """What explained a cohort before and does this one, too: singles, or else pairs."""
    ids = {one for known in first for one in known}
    tried = list(_singles(block, stage, [pair for pair in faults if pair[1].id in ids], base))
    fits = [one for one in tried if one.reproduces]
    if fits:
        return fits
    pairs = {frozenset(one) for one in first if len(one) > 1}
    moving = [one for one in tried if one.moved]
    found = (
        _fit_pair(block, stage, one, other, base)
        for one, other in combinations(moving, 2)
        if frozenset(one.faults + other.faults) in pairs
    )
    return [one for one in found if one is not None and one.reproduces]


def _describe(explanation: Explanation, base: list[Values]) -> None:
    nouns = {"sample": "samples", "token": "tokens", "scalar": "scalars"}
    explanation.noun = nouns[base[0].per] if base else "values"
    explanation.of = sum(int(one.counts.sum()) for one in base)
    explanation.differ = sum(int((one.disagree & one.counts).sum()) for one in base)
    explanation.audit = {
        one.field: (int((one.disagree & one.counts).sum()), int(one.counts.sum())) for one in base
    }
    explanation.misses_by = max([_largest(one, one.disagree & one.counts) for one in base] or [0.0])


def _largest(one: Values, where: torch.Tensor) -> float:
    error = (one.recorded - one.recomputed).abs()[where]
    error = error[~(one.recorded[where].isnan() & one.recomputed[where].isnan())]
    return float(error.max()) if len(error) else 0.0


def _agreement(block: Block, stage: str, explanation: Explanation, faults: Sequence[Fault]) -> None:
    """Why a stage diverged whose recorded values are right."""
    own = block.settings.reward
    sized = stage == "reward.post_process" and own.grouping != "none"
    if not sized or not group_size_looks(block, None)[0].mismatches:
        explanation.note = "values agree when the whole cohort is recomputed from its own columns"
        return
    size = own.n_samples_per_prompt
    said = f"values agree; groups are not of {size} members: some were lost or are not here"
    explanation.told = said
    explanation.hypotheses = [named(one, said) for one in faults if one.id == SHORT]


def _singles(
    block: Block, stage: str, faults: Sequence[tuple[int, Fault]], base: list[Values]
) -> Iterator[Fit]:
    for order, fault in faults:
        assert fault.tries is not None
        for told in fault.tries(block):
            fit = _fit(block, stage, ((fault, told),), order, base)
            if fit is not None:
                yield fit


def _pairs(block: Block, stage: str, tried: list[Fit], base: list[Values]) -> Iterator[Fit]:
    """Pairs of singles that repair a part, or that move the values and are settings or factors."""
    if sum(int((one.disagree & one.counts).sum()) for one in base) < EVIDENCE:
        return
    moving = [one for one in tried if one.moved and not one.told[0][0].alone]
    best = sorted(moving, key=lambda one: (-len(one.repaired), -one.agree, one.order))[:PAIRED]
    plain = [one for one in moving if one.told[0][1].variant.settings and one not in best]
    for one, other in combinations([*best, *plain[: PAIRED - 4]], 2):
        fit = _fit_pair(block, stage, one, other, base)
        if fit is not None:
            yield fit


def _fit_pair(block: Block, stage: str, one: Fit, other: Fit, base: list[Values]) -> Fit | None:
    """Both at once; None where they are one fault, or two arithmetics."""
    pair = (*one.told, *other.told)
    if pair[0][0].id == pair[1][0].id:
        return None
    if pair[0][1].variant.arithmetic and pair[1][1].variant.arithmetic:
        return None
    return _fit(block, stage, pair, one.order + other.order, base)


def _fit(
    block: Block,
    stage: str,
    told: tuple[tuple[Fault, Told], ...],
    order: int,
    base: list[Values],
) -> Fit | None:
    variant = told[0][1].variant
    for _, second in told[1:]:
        variant = variant.with_(second.variant)
    try:
        found = recompute(varied(block, variant, (stage,)), stage, quick=True)
    except (TrajReplayError, KeyError):
        return (
            None  # it asks for what these settings do not allow, or for a column they do not read
        )
    by_field = {one.field: one for one in found}
    agree, moved, undecided = 0, False, 0
    errors, repaired = [0.0], set[str]()
    for one in base:
        other = by_field.get(one.field)
        if other is None or len(other.recorded) != len(one.recorded):
            return None
        agree += int((one.counts & ~other.disagree).sum())
        undecided += other.undecided
        moved |= not torch.equal(
            other.recomputed.nan_to_num(nan=1e300), one.recomputed.nan_to_num(nan=1e300)
        )
        errors.append(_largest(other, one.counts & ~other.disagree))
        before, after = ((each.disagree & one.counts).any() for each in (one, other))
        if bool(before) and not bool(after):
            repaired.add(one.field)
    values = sum(int(one.counts.sum()) for one in base)
    return Fit(told, order, values, agree, max(errors), undecided, frozenset(repaired), moved)


def _hypothesis(alike: Sequence[Fit]) -> Hypothesis:
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
    )


def _sentence(fit: Fit) -> str:
    return ", and ".join(fault.says(told.detail) for fault, told in fit.told)
