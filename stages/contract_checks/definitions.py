"""What metrics are that trainings log beside their loss: of each token, and of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from trajreplay.schema.settings import Settings
from trajreplay.stages.contract_checks.columns import Floats, Ints

_FAR = 60.0  # beyond it an exponential is no ratio any more
Held = Mapping[str, Floats]  # the columns at some tokens


def _always(settings: Settings) -> bool:
    return True


@dataclass(frozen=True)
class Metric:
    """A logged number by one definition.

    Args:
        doc: What it is over the trained tokens.
        needs: Columns.
        tokens: The value of each token.
        total: mean, largest or smallest.
        defined: Whether settings say everything that it depends on.
    """

    doc: str
    needs: tuple[str, ...]
    tokens: Callable[[Settings, Held], Floats]
    total: str = "mean"
    defined: Callable[[Settings], bool] = _always

    def reads(self, settings: Settings) -> tuple[str, ...]:
        """The columns that it is made of; the denominator of the ratio is a setting."""
        if self.needs[:2] == _NOW and settings.loss.old_source == "rollout":
            return ("log_probs", "rollout_log_probs", *self.needs[2:])
        return self.needs

    def of(
        self, settings: Settings, held: Held, owner: Ints, parts: Sequence[Ints] = ()
    ) -> tuple[float, ...]:
        """What it may be over some tokens.

        Args:
            settings: The arithmetic in force.
            held: (N,) The columns that it needs, at these tokens, by the names it has for them.
            owner: (N,) The sample of each.
            parts: (S,) each. The part of each sample, of micro-batches and then of ranks.

        Returns:
            A mean may be of the tokens, or of the means of the samples, over all of them or over
            the micro-batches, the ranks, or both in turn: trainings reduce what they log as they
            reduce their loss, or plainly. Parts without tokens have no mean.
        """
        with np.errstate(over="ignore", invalid="ignore"):
            values = self.tokens(settings, held)
            if self.total != "mean":
                return (float(values.max() if self.total == "largest" else values.min()),)
            samples, by_sample = _means(owner, values)
            found = []
            for sample, one in ((owner, values), (samples, by_sample)):
                found.append(one.mean())
                inner = [_means(part[sample], one) for part in parts]
                found += [means.mean() for _, means in inner]
                if len(parts) == 2:  # of the micro-batches of each rank, and then of the ranks
                    batches, means = inner[0]
                    rank_of = np.zeros(int(parts[0].max()) + 1, np.int64)
                    rank_of[parts[0]] = parts[1]
                    found.append(_means(rank_of[batches], means)[1].mean())
            return tuple(map(float, found))


def _means(part: Ints, values: Floats) -> tuple[Ints, Floats]:
    """The parts that some values are of, and the mean of each."""
    counts, sums = np.bincount(part), np.bincount(part, values)
    there = counts.nonzero()[0]
    return there, sums[there] / counts[there]


def _ratio(settings: Settings, held: Held) -> Floats:
    low, high = settings.loss.log_ratio_clamp or (-_FAR, _FAR)
    return np.exp(np.clip(held["log_probs"] - held["old_log_probs"], low, high))


def _weight(settings: Settings, held: Held) -> Floats:
    return np.exp(np.clip(held["old_log_probs"] - held["rollout_log_probs"], -_FAR, _FAR))


def _bounded(settings: Settings, held: Held) -> Floats:
    assert settings.loss.correction_bounds is not None
    return np.clip(_weight(settings, held), *settings.loss.correction_bounds)


def _truncated(settings: Settings, held: Held) -> Floats:
    assert settings.loss.correction_bounds is not None
    low, high = settings.loss.correction_bounds
    weight = _weight(settings, held)
    return ((weight < low) | (weight > high)).astype(np.float64)


def _held_by_dual_clip(settings: Settings, held: Held) -> Floats:
    """The plain loss exceeds the dual clip, which acts where the advantage is negative."""
    assert settings.loss.dual_clip is not None
    binds = (held["advantages"] < 0) & (_ratio(settings, held) > settings.loss.dual_clip)
    return binds.astype(np.float64)


def _k3(settings: Settings, held: Held) -> Floats:
    gap = held["old_log_probs"] - held["log_probs"]
    return np.expm1(np.clip(gap, -_FAR, _FAR)) - gap


def _sampler_k3(settings: Settings, held: Held) -> Floats:
    gap = held["old_log_probs"] - held["rollout_log_probs"]
    return np.expm1(np.clip(gap, -_FAR, _FAR)) - gap


def _by_token(settings: Settings) -> bool:
    """Whether the ratio of the loss is that of a token, against a column that is recorded."""
    return settings.loss.ratio == "token" and settings.loss.proximal == "recorded"


def _dual_clipped(settings: Settings) -> bool:
    loss = settings.loss
    return _by_token(settings) and loss.dual_clip is not None and loss.dual_side == "negative"


def _has_bounds(settings: Settings) -> bool:
    """Whether weights of tokens have bounds; those of samples, or of a criterion, are others."""
    loss = settings.loss
    by_token = (
        loss.correction in ("none", "tis", "icepop") and loss.correction_criterion == "weight"
    )
    return loss.correction_bounds is not None and by_token


_NOW, THEN = ("log_probs", "old_log_probs"), ("old_log_probs", "rollout_log_probs")
METRICS: Mapping[str, Metric] = {
    "ratio_mean": Metric("mean ratio of current to old", _NOW, _ratio, defined=_by_token),
    "ratio_max": Metric("largest ratio of current to old", _NOW, _ratio, "largest", _by_token),
    "ratio_min": Metric("smallest ratio of current to old", _NOW, _ratio, "smallest", _by_token),
    "approx_kl": Metric("mean k3 of current against old", _NOW, _k3, defined=_by_token),
    "pg_clipfrac_lower": Metric(
        "share of tokens that the dual clip holds",
        (*_NOW, "advantages"),
        _held_by_dual_clip,
        defined=_dual_clipped,
    ),
    "sampler_ratio_mean": Metric("mean ratio of old to rollout, not truncated", THEN, _weight),
    "sampler_ratio_max": Metric("largest ratio of old to rollout", THEN, _weight, "largest"),
    "sampler_ratio_min": Metric("smallest ratio of old to rollout", THEN, _weight, "smallest"),
    "sampler_ratio_bounded": Metric(
        "mean of that ratio within its bounds", THEN, _bounded, defined=_has_bounds
    ),
    "sampler_ratio_truncated": Metric(
        "share of tokens beyond these bounds", THEN, _truncated, defined=_has_bounds
    ),
    "sampler_kl": Metric("mean k3 of old against rollout", THEN, _sampler_k3),
}


def _plain(settings: Settings) -> bool:
    """Whether the loss is clipped plainly, so that a token is clipped or not by ratio and sign."""
    loss = settings.loss
    weighted = loss.correction != "none" or bool(loss.rejection) or loss.veto is not None
    bare = loss.dual_clip is None and loss.log_ratio_clamp is None and not weighted
    return _by_token(settings) and loss.surrogate == "ppo-clip" and bare


def _clipped(settings: Settings, held: Held) -> Floats:
    loss, ratio = settings.loss, _ratio(settings, held)
    high = loss.eps_clip if loss.eps_clip_high is None else loss.eps_clip_high
    above = (held["advantages"] > 0) & (ratio > 1.0 + high)
    return (above | ((held["advantages"] < 0) & (ratio < 1.0 - loss.eps_clip))).astype(np.float64)


# Scalars of the policy loss, by their plain definitions: of cohorts whose loss nothing recomputes.
INSPECTED: Mapping[str, Metric] = {
    "entropy_loss": Metric("mean entropy", ("entropy",), lambda _, held: held["entropy"]),
    "ppo_kl": Metric(
        "mean log-ratio of old to current",
        _NOW,
        lambda _, held: held["old_log_probs"] - held["log_probs"],
        defined=_plain,
    ),
    "pg_clipfrac": Metric(
        "share of tokens that the clip holds", (*_NOW, "advantages"), _clipped, defined=_plain
    ),
}
