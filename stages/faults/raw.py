"""Known ways in which a raw reward is not the score that was received, or the sum of its parts."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from trajreplay.stages.faults.fault import Fault, Handed, Hands, Made

_STAGE = "reward.raw"


def _zero_as_missing(given: Handed) -> Iterable[Made]:
    """Wherever the score is 0, and only there, one other number was used."""
    zero = given.origin == 0
    used = torch.unique(given.recorded[zero])
    # Any raw rewards are of that kind where every score is 0.
    if len(used) == 1 and float(used) and not bool(zero.all()):
        detail = f"the score, but {float(used):g} at all {int(zero.sum())} samples whose score is 0"
        yield torch.where(zero, used, given.origin), detail


def _by_position(given: Handed) -> Iterable[Made]:
    """Each rank has the first scores of the whole batch beside its own samples."""
    ranks = given.ranks
    if len(ranks) != len(given.origin) or len(torch.unique(ranks)) < 2:
        return
    taken, beside = torch.empty_like(given.origin), torch.empty_like(given.origin)
    for rank in torch.unique(ranks):
        mine = ranks == rank
        count = int(mine.sum())
        beside[mine], taken[mine] = given.recorded[:count], given.origin[:count]
    detail = "the first of the whole batch on every rank, not those of the rank's own samples"
    yield taken, f"the scores of other samples: {detail}"
    if torch.equal(beside, given.origin):  # the proof lies in the scores: these are of others
        yield (
            given.recorded.clone(),
            f"right, and the scores beside them are of other samples: {detail}",
        )


def _parts(given: Handed) -> Iterable[Made]:
    yield from ((values, what) for what, values in given.others.items())


def _negated(given: Handed) -> Iterable[Made]:
    yield -given.origin, "the opposite of the score"


def _fault(name: str, known: str, look: str, hands: Hands, *references: str) -> Fault:
    return Fault(f"raw.{name}", known, _STAGE, "{}", look, references, hands=hands)


FAULTS = (
    _fault(
        "zero-as-missing",
        "a score of 0 read as no score",
        "tests of a score by its truth: compare with None",
        _zero_as_missing,
        "K-022",
    ),
    _fault(
        "by-position",
        "whole-batch rewards paired with rank-local samples",
        "which scope each list has: join by sample id",
        _by_position,
        "K-014",
    ),
    _fault(
        "components",
        "components added up by other weights",
        "reward.weights and reward.missing",
        _parts,
    ),
    _fault(
        "negated",
        "score with the opposite sign",
        "signs between the reward function and the buffer",
        _negated,
    ),
)
