"""Samples on ranks, what each weighs against the sampler, and what is rejected: plain loops."""

import math
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch

from tests.helpers import reference_means
from tests.helpers.cohorts import Shares
from tests.helpers.reference_losses import m2po_kept
from tests.helpers.trainer import Sample
from trajreplay import Settings

Rows = list[list[float]]
# The weights that the current log-probs of the training were made with.
CURRENT = 6
LEVELS = {
    "tis": ("token", "truncate"),
    "icepop": ("token", "zero"),
    "sequence-tis": ("sequence", "truncate"),
    "sequence-mask": ("sequence", "zero"),
    "geometric-tis": ("geometric", "truncate"),
    "geometric-icepop": ("geometric", "zero"),
    "geometric-mask": ("token", "zero"),
}


def clamped(value: float, bounds: tuple[float, float] | None) -> float:
    """A value within bounds, where there are some."""
    return value if bounds is None else min(max(value, bounds[0]), bounds[1])


def float32(values: Sequence[float]) -> torch.Tensor:
    """Values as a training in float32 records them."""
    return torch.from_numpy(np.array(values, np.float64).astype(np.float32))


class LossRows:
    """Samples on their ranks, and what a loss makes of train against rollout probabilities.

    Args:
        settings: The arithmetic.
        shares: The samples of each rank, in row order.
    """

    # What a trainer computes in.
    number: Callable[[float], float] = float

    def __init__(self, settings: Settings, shares: Shares) -> None:
        self.settings = settings
        self.shares = shares
        self.samples: list[Sample] = [one for own in shares.values() for one in own]
        self.ranks = [rank for rank, own in shares.items() for _ in own]
        self._columns: dict[str, Rows] = {}

    def column(self, name: str) -> Rows:
        """A token column of every sample."""
        if name not in self._columns:
            rows = [one.columns[name].double().tolist() for one in self.samples]
            self._columns[name] = [[self.number(one) for one in row] for row in rows]
        return self._columns[name]

    def record(self, name: str, rows: Rows) -> None:
        """Give every sample a token column, as float32 holds it."""
        self._columns.pop(name, None)
        for one, row in zip(self.samples, rows, strict=True):
            one.columns[name] = float32(row)

    @cached_property
    def proximal(self) -> Rows:
        """Log-probs of the policy before the update: as recorded, of now, or between these."""
        old = self.column("old_log_probs")
        if self.settings.loss.proximal == "recorded":
            return old
        if self.settings.loss.proximal == "current":
            return self.column("log_probs")
        found = []
        rows = zip(self.column("log_probs"), self.column("rollout_log_probs"), strict=True)
        for one, (now, then) in zip(self.samples, rows, strict=True):
            made = [-1] * one.length
            for start, stop, version in one.weight_versions or []:
                made[start:stop] = [version] * (stop - start)
            shares = [
                0.0 if v < 0 or v >= CURRENT else (CURRENT - 1 - v) / (CURRENT - v) for v in made
            ]
            found.append([r + a * (p - r) for p, r, a in zip(now, then, shares, strict=True)])
        return found

    def behind(self, source: str) -> Rows:
        """What a ratio divides by: the policy before the update, or that of the rollout."""
        return self.proximal if source == "old" else self.column("rollout_log_probs")

    def divided(self, count: float) -> float:
        """What a mean over so many divides by."""
        epsilon = self.settings.loss.count_epsilon
        return count + epsilon if epsilon else max(count, 1.0)

    @cached_property
    def masks(self) -> Rows:
        """The loss mask of every sample."""
        return [[float(m) for m in one.mask] for one in self.samples]

    @cached_property
    def batches(self) -> list[int]:
        """The micro-batch of every sample, numbered over all ranks."""
        keys = [
            (rank, str(one.micro_batch_id))
            for rank, one in zip(self.ranks, self.samples, strict=True)
        ]
        return [sorted(set(keys)).index(one) for one in keys]

    @cached_property
    def summed(self) -> Rows:
        """The mask of what enters sums: without what is rejected."""
        loss, flat = self.settings.loss, _flat(self.masks)
        gaps, lengths = _flat(self._gaps), [one.length for one in self.samples]
        keep = [m != 0 for m in flat]
        for name, (low, high) in loss.rejection.items():
            level, metric = name.split("-")
            judged = reference_means.criterion(
                gaps,
                flat,
                lengths,
                metric=metric,
                statistic=level,
                reverse=loss.rejection_reverse,
                clamp=loss.rejection_log_clamp or (-math.inf, math.inf),
                epsilon=loss.count_epsilon,
            )
            keep = [k and low <= one <= high for k, one in zip(keep, judged, strict=True)]
        if loss.veto is not None:
            kept = reference_means.vetoed(gaps, flat, lengths, threshold=loss.veto)
            keep = [a and b for a, b in zip(keep, kept, strict=True)]
        if loss.m2_threshold is not None:
            of_token = [b for b, n in zip(self.batches, lengths, strict=True) for _ in range(n)]
            small: set[int] = set()
            for batch in set(of_token):
                mine = [t for t, b in enumerate(of_token) if b == batch and flat[t]]
                small |= m2po_kept(gaps, mine, threshold=loss.m2_threshold)
            keep = [k and t in small for t, k in enumerate(keep)]
        return self._rows([float(one) for one in keep])

    @property
    def counted(self) -> Rows:
        """The mask of what means divide by."""
        kept = self.settings.loss.rejection_denominator == "kept"
        return self.summed if kept else self.masks

    @cached_property
    def _gaps(self) -> Rows:
        pairs = zip(self.proximal, self.column("rollout_log_probs"), strict=True)
        return [[o - r for o, r in zip(*pair, strict=True)] for pair in pairs]

    @cached_property
    def weights(self) -> Rows:
        """What every token is multiplied by for having been sampled by another engine."""
        loss = self.settings.loss
        assert loss.correction_bounds is not None
        low, high = loss.correction_bounds
        gaps, mask = _flat(self._gaps), _flat(self.masks)
        lengths = [one.length for one in self.samples]
        clamp = loss.correction_log_clamp or (-math.inf, math.inf)
        level, action = LEVELS[loss.correction]
        epsilon = loss.count_epsilon
        raw = reference_means.importance_weights(
            gaps,
            mask,
            lengths,
            level=level,
            clamp=clamp,
            epsilon=epsilon,
            undefined=loss.undefined_weight,
        )
        judged = raw
        if loss.correction == "geometric-mask":
            judged = reference_means.importance_weights(
                gaps,
                mask,
                lengths,
                level="geometric",
                clamp=clamp,
                epsilon=epsilon,
                undefined=loss.undefined_weight,
            )
        if loss.correction_criterion != "weight":
            statistic, metric = loss.correction_criterion.split("-")
            judged = reference_means.criterion(
                gaps,
                mask,
                lengths,
                metric=metric,
                statistic=statistic,
                reverse=False,
                epsilon=epsilon,
            )
        bounded = [
            reference_means.bound_weight(w, c, low=low, high=high, action=action)
            for w, c in zip(raw, judged, strict=True)
        ]
        if loss.correction_norm != "none":
            by_batch = loss.correction_norm_over == "micro-batch"
            index = self.batches if by_batch else [0] * len(lengths)
            bounded = reference_means.normalised(
                bounded, mask, lengths, index, level=loss.correction_norm
            )
        return self._rows(bounded)

    def _rows(self, flat: Sequence[float]) -> Rows:
        found, start = [], 0
        for one in self.samples:
            found.append(list(flat[start : start + one.length]))
            start += one.length
        return found


def _flat(rows: Rows) -> list[float]:
    return [one for row in rows for one in row]
