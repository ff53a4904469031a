"""Checks of what scores become: sizes that only a division by epsilon gives, masked tokens."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from trajreplay.schema.settings import Settings
from trajreplay.stages.contract_checks.columns import Floats, Found, Ints, Together, largest

# A value is near what a division by epsilon alone gives from this part of it on, and by so much
# more than what was divided.
NEAR, MORE = 0.01, 100.0
# Larger epsilons are no guard against a deviation of 0, but part of the divisor.
GUARD = 1e-3


def check_advantages(given: Together) -> Iterator[Found]:
    """Everything about scores and advantages."""
    told = set[int]()
    for index, found in _near_epsilon(given):
        told.add(index)
        yield index, found
    yield from (one for one in _advantages_near_epsilon(given) if one[0] not in told)
    yield from _masked(given)


def _of_rewards(settings: Settings) -> float | None:
    """What the normaliser of rewards multiplies by where its deviation is 0."""
    reward = settings.reward
    divided = reward.divide_by_std and reward.grouping != "none" and 0 < reward.epsilon <= GUARD
    if not divided:
        return None
    return 1 / reward.epsilon if reward.epsilon_place == "added" else float(reward.epsilon**-0.5)


def _of_whitening(settings: Settings) -> float | None:
    """The same of whitened advantages."""
    own = settings.advantage
    centred = own.whiten != "none" and own.whiten_centre == "same"
    if not centred or not own.whiten_scale or not 0 < own.whiten_epsilon <= GUARD:
        return None  # what is not centred may be any number of deviations from 0
    return 1 / own.whiten_epsilon if own.whiten_form == "std" else float(own.whiten_epsilon**-0.5)


def _by_cohort(
    given: Together, used: Floats, before: Floats, factor: float, *, samples: bool
) -> Iterator[tuple[int, Ints]]:
    """Values too large for anything but a division by epsilon, by cohort.

    No value is further from the mean of n than the root of n times their deviation.
    """
    odd = (used >= NEAR * factor) & (used > MORE * before) & np.isfinite(used)
    places = odd.nonzero()[0]
    bounds = given.packed.sample_bounds if samples else given.packed.token_bounds
    mine = places if samples else given.trained(places)
    for index, found in given.by_cohort(mine, samples=samples):
        large = found[used[found] >= 2.0 * (bounds[index + 1] - bounds[index]) ** 0.5]
        if len(large):
            yield index, large


def _near_epsilon(given: Together) -> Iterator[Found]:
    """Rewards of the size of 1 / epsilon: a deviation that was never filled."""
    factor = _of_rewards(given.settings)
    if factor is None or not given.has("raw_reward", "reward"):
        return
    used, raw = np.abs(given.scalars("reward")), np.abs(given.scalars("raw_reward"))
    for index, rows in _by_cohort(given, used, raw, factor, samples=True):
        row = int(rows[0])
        message = (
            f"{len(rows)} rewards are of the size of 1 / epsilon, here {used[row]:.4g} from "
            f"{raw[row]:.4g}: they were divided by epsilon alone"
        )
        stage = "reward.post_process"
        yield given.about(index, "reward.near-epsilon", "warning", message, row, stage)


def _advantages_near_epsilon(given: Together) -> Iterator[Found]:
    """The same of advantages at trained tokens, against the rewards that were used."""
    factors = [one(given.settings) for one in (_of_rewards, _of_whitening)]
    known = [one for one in factors if one is not None]
    if not known or not given.has("advantages"):
        return
    used = np.abs(given.tokens("advantages"))
    if not largest(used) >= NEAR * min(known):
        return
    used = used.astype(np.float64)
    name = next((one for one in ("reward", "raw_reward") if given.has(one)), None)
    rewards = np.zeros(len(given.lengths)) if name is None else np.abs(given.scalars(name))
    before = rewards.repeat(given.lengths)
    for index, places in _by_cohort(given, used, before, min(known), samples=False):
        place = int(places[0])
        message = (
            f"advantages are of the size of 1 / epsilon at {len(places)} trained tokens, here "
            f"{used[place]:.4g}: they were divided by epsilon alone"
        )
        stage, sample = "advantage.estimate", int(given.owners(np.asarray(place)))
        token = place - int(given.offsets[sample])
        check = "advantage.near-epsilon"
        yield given.about(index, check, "warning", message, sample, stage, token=token)


def _masked(given: Together) -> Iterator[Found]:
    """Masked tokens with an advantage in some samples, and without one in all others."""
    if not given.has("advantages") or not len(given.masked):
        return
    values, size = given.tokens("advantages"), len(given.lengths)
    owner, filled = given.owners(given.masked), values[given.masked] != 0
    masked = np.bincount(owner, minlength=size) > 0
    some = np.bincount(owner[filled], minlength=size) > 0
    none = masked & ~some
    if not some.any() or not none.any():
        return
    for index, (start, stop) in enumerate(pairwise(given.packed.sample_bounds)):
        with_some = some[start:stop].nonzero()[0] + start
        # Samples without an advantage at any token say nothing.
        without = [
            row
            for row in (none[start:stop].nonzero()[0] + start if len(with_some) else [])
            if values[given.offsets[row] : given.offsets[row + 1]].any()
        ]
        if without:
            message = (
                f"{len(with_some)} samples have advantages at masked tokens, and {len(without)} "
                "others have 0 at all of theirs: they were not made in one way"
            )
            stage = "advantage.estimate"
            yield given.about(index, "advantage.masked", "info", message, int(with_some[0]), stage)
