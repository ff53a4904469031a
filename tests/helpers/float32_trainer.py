"""A trainer for every setting that computes in float32: scalars of numpy, statistics of torch."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from tests.helpers import float32_statistics
from tests.helpers.composed import ComposedTrainer
from tests.helpers.composed_corrections import Rows


class Float32Trainer(ComposedTrainer):
    """Scores and estimates in float32, operation by operation; arguments as of its base.

    The loops of its base run over float32 scalars, which stay float32 beside constants. What these
    loops sum up in fractions or in float64 it has of its own.
    """

    number = np.float32  # type: ignore[assignment]
    normalise = staticmethod(float32_statistics.normalise_rewards)
    decouple = staticmethod(float32_statistics.decoupled_rewards)

    def gpg(self, raw: list[float], groups: list[int], batch: list[int]) -> list[float]:
        """Rewards by the rule gpg."""
        own = self.settings.reward
        return float32_statistics.gpg_rewards(raw, groups, own.gpg_norm, own.lone)

    def pass_at_k(self, raw: list[float], groups: list[int]) -> list[float]:
        """Rewards by the rule pass@k."""
        own = self.settings.reward
        return float32_statistics.pass_at_k_rewards(
            raw, groups, divide_by_std=own.divide_by_std, epsilon=own.epsilon
        )

    def _rescaled(self, raw: list[float], scored: list[float]) -> list[float]:
        own = self.settings.reward
        missing = torch.tensor([own.missing == "exclude"]) & torch.tensor(raw).isnan()
        found = float32_statistics.tensor(scored).masked_fill(missing, torch.nan)
        return self.normalise(
            found.tolist(),
            [0] * len(raw),
            divisor="std",
            ddof=own.ddof,
            epsilon=own.batch_epsilon or 0.0,
            missing=own.missing,
        )

    def _whitened(self, advantages: Rows) -> Rows:
        own = self.settings.advantage
        self.whiten = partial(float32_statistics.whiten, one_pass=own.whiten_one_pass)
        return super()._whitened(advantages)
