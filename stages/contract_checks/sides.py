"""Log-probs of sampler and trainer that lie to one side: another token's, filtered, or steeper."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from trajreplay.stages.contract_checks.columns import Columns, Flags, Floats
from trajreplay.stages.contract_checks.shifts import APART, ENOUGH, SURE
from trajreplay.stages.report import Finding

SAMPLED = "rollout_log_probs"
# A column of so many trained tokens, nearly all of them exactly 0, is of no sampled response.
MANY, NEARLY_ALL = 8, 0.95
# What an engine's noise moves down, all but a few of the tokens lie above; it moves no farther.
FEW, NOISE = 0.02, 0.25
# A column lies above another at so many tokens, by more than that noise twice.
ABOVE = 0.05
# The most likely token was sampled at some tokens, as often as its probability says.
CHOSEN, AS_SAID, ERRORS = 0.05, 0.1, 4.0
# Two tokens of one distribution share a probability of 1; a few of them, as an engine rounds, more.
SHARED, MORE = 0.9, 0.05
# A filter keeps so much of the probability at least where it was half of the tokens that it moved.
MIDDLE = 0.5
# A temperature is behind a slope so far from 1, so many errors from it, that explains so much.
STEEP = 0.1
CERTAIN = 8.0
EXPLAINED = 0.7
NEARLY = 0.05
# A slope of less than this is of a column that does not move, which no temperature makes.
FLAT = 0.01


def one_sided(given: Columns, one: str, other: str, finite: Flags) -> Iterator[Finding]:
    """What a column has that lies to one side of another, or is steeper: in all samples or a rank.

    Args:
        given: The cohort.
        one: The column that was made first: the sampler's, or one of the same weights.
        other: The other one.
        finite: (N,) Trained tokens at which both can be compared.
    """
    usable = _of_one_version(given, one, other, finite)
    first, second = given.tokens(one), given.tokens(other)
    whole = _told(one, other, first[usable], second[usable])
    owned = given.ranks.repeat(given.lengths)
    ranks = {rank: usable & (owned == rank) for rank in np.unique(given.ranks).tolist()}
    # A few tokens in the tail of one of many ranks may make a slope by chance.
    large = {rank: own for rank, own in ranks.items() if np.count_nonzero(own) >= SURE}
    of_rank = {rank: _told(one, other, first[own], second[own]) for rank, own in large.items()}
    told = [rank for rank, found in of_rank.items() if found is not None]
    single = bool(told) and 2 * len(told) <= len(ranks)  # of most, it is of the cohort
    found, places = (of_rank[told[0]], ranks[told[0]]) if single else (whole, usable)
    if found is not None:
        check, message = found
        where = f"on rank {told[0]}, " if single else ""
        yield given.at(check, "warning", where + message, int(places.argmax()))


def _of_one_version(given: Columns, one: str, other: str, finite: Flags) -> Flags:
    """Tokens that the weights behind the other column sampled, as far as that is known.

    A policy that was trained in between moves its log-probs to one side, as a temperature does: two
    columns of the trainer are compared only where it is known that one version computed both.
    """
    computed = given.version_of(other)
    if one != SAMPLED:
        before = given.version_of(one)
        if computed is None or before is None:
            return np.zeros_like(finite)
        return np.asarray(finite & (before == computed).repeat(given.lengths))
    sampled = given.sampled_by
    if sampled is None or computed is None:
        return finite
    return np.asarray(finite & (sampled == computed.repeat(given.lengths)))


def _told(one: str, other: str, first: Floats, second: Floats) -> tuple[str, str] | None:
    """The check that two columns of some tokens do not pass, and what it says."""
    if len(first) < ENOUGH or np.ptp(first) == 0 or np.mean(first == 0) >= NEARLY_ALL:
        return None  # a value that was filled in
    first, second = first.astype(np.float64), second.astype(np.float64)
    gap = first - second
    noise = max(APART, -float(np.quantile(gap, FEW)))
    above = gap > 2 * noise
    up, size = int(above.sum()), len(gap)
    lies_above = one == SAMPLED and noise < NOISE and up >= max(ENOUGH / 2, ABOVE * size)
    equal = np.abs(gap) <= noise
    if lies_above and _is_most_likely(first, second, above, equal):
        return "log-prob.most-likely", (
            f"{one} is above {other} at {up} of {size} trained tokens, below by no more than noise "
            f"({noise:.2g}), and equal at {int(equal.sum())}, as often as it says: the log-prob of "
            "the most likely token, not of the sampled one"
        )
    slope = steepness(second, first)
    if slope is not None:
        hot, cold = (other, one) if slope > 1 else (one, other)
        return "log-prob.temperature", (
            f"{one} moves by {slope:.3g} where {other} moves by 1, over {size} trained tokens: "
            f"{cold} is at a lower temperature than {hot}, of about {1 / slope:.2g} to 1"
        )
    if lies_above and up >= ENOUGH and np.mean(gap > APART) >= MIDDLE:
        return "log-prob.filtered", (
            f"{one} is above {other} at {up} of {size} trained tokens ({up / size:.0%}), by "
            f"{gap.mean():.3g} on average, and below by no more than noise ({noise:.2g}): "
            "log-probs over what a filter (top-p, top-k) kept"
        )
    return None


def _is_most_likely(first: Floats, second: Floats, above: Flags, equal: Flags) -> bool:
    """Whether a column may be of the most likely token, and the other one of the sampled token.

    The most likely token is sampled as often as its probability says, and where another one was,
    the probabilities of both are of one distribution, and the other one's varies more: what a
    filter or a temperature makes of a log-prob varies with it.
    """
    if float(first[above].std()) > float((first - second)[above].std()):
        return False
    same, said = float(equal.mean()), float(np.exp(first).mean())
    error = max(AS_SAID, ERRORS * (said * max(1.0 - said, 0.0) / len(first)) ** 0.5)
    both = np.exp(first[above]) + np.exp(second[above])
    shared = float(np.mean(both < 1.0 + MORE))
    return same >= CHOSEN and abs(same - said) < error and shared >= SHARED


def steepness(x: Floats, y: Floats) -> float | None:
    """The slope of the second over the first, where a temperature is behind it.

    At a lower temperature likely tokens become likelier and unlikely ones less likely: the line
    through both is steeper and lies above 0 where the log-prob is 0. A policy that was trained
    differs by what no line explains. A pure factor is one, too: log-probs that were multiplied.
    """
    x, y = x.astype(np.float64), y.astype(np.float64)
    spread = float(((x - x.mean()) ** 2).sum())
    gap = y - x
    before = float(((gap - gap.mean()) ** 2).sum())
    if not spread or not before:
        return None
    slope = float(((x - x.mean()) * (y - y.mean())).sum()) / spread
    level = float(y.mean() - slope * x.mean())
    after = float(((gap - (slope - 1.0) * x - level) ** 2).sum())
    error = (after / max(len(x) - 2, 1) / spread) ** 0.5
    certain = abs(slope - 1.0) > max(STEEP, CERTAIN * error)
    sided = (slope - 1.0) * level > -NEARLY * abs(slope - 1.0)
    moves = slope > FLAT
    return slope if moves and certain and sided and after < EXPLAINED * before else None
