"""Checks of what stages recorded that is not recomputed here: KL, metrics, scalars of ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from trajreplay.schema.entry import Entry, Output
from trajreplay.stages.contract_checks.columns import Columns, Found, Together
from trajreplay.stages.report import Finding

_NEVER_NEGATIVE = ("k2", "k3", "low_var_kl", "abs")
# A KL below this is no rounding of 0.
BELOW = -1e-4
# Samples whose last KL has to be their reward, and how near.
REWARDED = 3
NEAR = 0.2
# Trained tokens beyond a clip bound that a clip fraction of 0 cannot leave out.
MOVED = 8
BEYOND = 0.01


def check_recorded(given: Together) -> Iterator[Found]:
    """Everything about recorded values of stages, of those alone that nothing recomputes."""
    names = given.packed.table.column_names
    if "advantage.kl" not in given.stages and "kl" in names:
        yield from given.each(_kl)
    if "loss.policy" not in given.stages and "log_probs" in names:
        yield from given.each(_stuck)
    if "loss.value" not in given.stages and "old_values" in names:
        yield from given.each(_stuck_value)
    for index, cohort in enumerate(given.block.cohorts):
        if len(cohort.owners) > 1:
            yield from ((index, one) for one in _between_ranks(given.of(index)))


def _kl(given: Columns) -> Iterator[Finding]:
    """A KL that was written over after it was computed."""
    if not given.has("kl"):
        return
    kl, mask, stage = given.tokens("kl"), given.mask, "advantage.kl"
    odd = ((kl < BELOW) & mask).nonzero()[0]
    settings = given.settings.kl
    if len(odd) and settings.estimator in _NEVER_NEGATIVE and settings.bounds[1] is None:
        message = (
            f"kl is below 0 at {len(odd)} trained tokens, down to {kl[odd].min():.4g}, and "
            f"{settings.estimator} never is: it was edited in place after it was computed"
        )
        yield given.at("kl.negative", "warning", message, int(odd[0]), stage)
    lengths = given.lengths
    rows = (lengths > 1).nonzero()[0]
    name = next((one for one in ("reward", "raw_reward") if given.has(one)), None)
    if len(rows) < REWARDED or name is None:
        return
    reward = given.scalars(name)[rows]
    last = given.offsets[1:][rows] - 1
    at_end = np.abs(kl[last] - reward)
    sums = np.concatenate([[0.0], np.cumsum(np.abs(np.nan_to_num(kl, posinf=0.0)))])
    inner = sums[given.offsets[1:][rows]] - sums[given.offsets[:-1][rows]]
    rest = (inner - np.abs(kl[last])) / np.maximum(lengths[rows] - 1, 1)
    big = (np.abs(reward) > 0.1) & (np.abs(reward) > 5 * rest)
    if int(big.sum()) >= REWARDED and bool((at_end[big] < NEAR * np.abs(reward[big])).all()):
        message = (
            f"the last kl of {int(big.sum())} samples is their {name}, here {kl[last[big]][0]:.4g} "
            f"and {reward[big][0]:.4g}: token rewards were built in the tensor of the KL"
        )
        yield given.at("kl.edited", "warning", message, int(last[big][0]), stage)


def _stuck(given: Columns) -> Iterator[Finding]:
    """A clip fraction of exactly 0, where ratios lie outside the bounds."""
    loss = given.settings.loss
    old = "old_log_probs" if loss.old_source == "old" else "rollout_log_probs"
    plain = (loss.surrogate, loss.ratio) == ("ppo-clip", "token") and loss.correction == "none"
    if not plain or loss.proximal != "recorded" or loss.log_ratio_clamp is not None:
        return
    values = [one.value for one in _scalars(given) if one.field == "pg_clipfrac"]
    if not values or any(values) or not given.has("log_probs", old, "advantages"):
        return
    gap = given.tokens("log_probs").astype(np.float64) - given.tokens(old)
    high = loss.eps_clip if loss.eps_clip_high is None else loss.eps_clip_high
    advantages = given.tokens("advantages")
    above = (gap > np.log1p(high) + BEYOND) & (advantages > 0)
    below = (gap < np.log(max(1.0 - loss.eps_clip, 1e-30)) - BEYOND) & (advantages < 0)
    out = ((above | below) & given.mask).nonzero()[0]
    if len(out) >= MOVED:
        message = (
            f"pg_clipfrac is exactly 0, and {len(out)} trained tokens lie beyond the clip bounds "
            f"where these bind, here a ratio of {np.exp(gap[out[0]]):.4g}: a metric that cannot "
            "move"
        )
        yield given.at("metric.stuck", "warning", message, int(out[0]), "loss.policy")


def _stuck_value(given: Columns) -> Iterator[Finding]:
    """A clip fraction of values of exactly 0, where values moved beyond the clip."""
    value = given.settings.value
    found = [one.value for one in _scalars(given) if one.field == "value_clipfrac"]
    there = given.has("values", "old_values")
    if value.clip is None or value.counted != "value" or not found or any(found) or not there:
        return
    moved = np.abs(given.tokens("values").astype(np.float64) - given.tokens("old_values"))
    out = ((moved > value.clip * (1.0 + BEYOND)) & given.mask).nonzero()[0]
    if len(out) >= MOVED:
        message = (
            f"value_clipfrac is exactly 0, and {len(out)} trained tokens have values that moved by "
            f"more than the clip of {value.clip:g}, here by {moved[out[0]]:.4g}: a metric that "
            "cannot move"
        )
        yield given.at("metric.stuck", "warning", message, int(out[0]), "loss.value")


def _scalars(given: Columns) -> list[Output]:
    return [one for entry in given.entries for one in entry.outputs if one.value is not None]


def _ranks_of(entry: Entry) -> int:
    """How often a number of all ranks can be counted at most."""
    sizes = entry.parallel
    world = sizes.data_size * sizes.tensor_size * sizes.pipeline_size * sizes.context_size
    return max(world, len(entry.expected_ranks))


def _between_ranks(given: Columns) -> Iterator[Finding]:
    """One number of all ranks, of which one rank recorded a multiple."""
    found: dict[tuple[str, str], dict[int, float]] = {}
    most_ranks = max((_ranks_of(entry) for entry in given.entries), default=1)
    for entry in given.entries:
        for one in entry.outputs:
            if one.scope == "global" and one.value and math.isfinite(one.value):
                value = one.value / one.scale
                found.setdefault((one.stage, one.field), {})[entry.key.rank] = value
    for (stage, name), values in found.items():
        least, most = (
            min(values, key=lambda rank: abs(values[rank])),
            max(values, key=lambda rank: abs(values[rank])),
        )
        factor = values[most] / values[least]
        if not 1.5 < factor < most_ranks + 0.5:
            continue
        if abs(factor - round(factor)) < 1e-4 * factor:
            message = (
                f"{name} of all ranks is {values[least]:.6g} on rank {least} and {round(factor)} "
                f"times that, {values[most]:.6g}, on rank {most}: one of them is counted once for "
                "each of several ranks"
            )
            yield given.finding("rank.factor", "error", message, stage=stage)
            return
