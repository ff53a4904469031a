"""How each scalar of a loss becomes one number: as the surrogate does, or in a way of its own."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from trajreplay.schema.settings import LossSettings, Settings
from trajreplay.stages.compose.denominators import Denominators

# Scalars that are added to the surrogate, and those by which a loss is scored; the others tell
# what became of its tokens.
TERMS = ("entropy_loss", "kl_loss")
SCORED = ("loss", "pg_loss", "value_loss", "nll_loss")


def aggregation_of(settings: Settings, stage: str, name: str) -> LossSettings:
    """The loss settings by which a scalar of a stage becomes one number.

    Args:
        settings: The arithmetic in force.
        stage: `loss.policy` or `loss.value`.
        name: The scalar.

    Returns:
        Those of the loss themselves where the scalar goes by nothing of its own.

    >>> from trajreplay.schema.settings import with_changes
    >>> gspo = with_changes(Settings(), {"loss.kl_loss_aggregation": "token-mean"})
    >>> [aggregation_of(gspo, "loss.policy", one).aggregation for one in ("pg_loss", "kl_loss")]
    ['seq-mean-token-mean', 'token-mean']
    """
    loss = settings.loss
    if stage == "loss.value":
        loss = _changed(loss, settings.value.aggregation, settings.value.mean_over)
    if name == "entropy_loss":
        return _changed(loss, loss.entropy_aggregation, loss.entropy_mean_over)
    if name == "kl_loss":
        return _changed(loss, loss.kl_loss_aggregation, loss.kl_loss_mean_over)
    if name in SCORED:
        return loss
    return _changed(loss, loss.metrics_aggregation, "same")


def _changed(loss: LossSettings, aggregation: str, mean_over: str) -> LossSettings:
    if aggregation in ("same", loss.aggregation) and mean_over in ("same", loss.mean_over):
        return loss
    return replace(
        loss,
        aggregation=loss.aggregation if aggregation == "same" else aggregation,
        mean_over=loss.mean_over if mean_over == "same" else mean_over,
    )


class Aggregates:
    """What samples enter each scalar with, and what it divides by.

    Args:
        settings: The arithmetic in force.
        stage: `loss.policy` or `loss.value`.
        trained: (S,) float64. Trained tokens of each sample.
        counted: (S,) float64. Those of them that a mean divides by.
        trajectories: (S,) int64. The trajectory of each; None where a mean divides by samples.
        micro_batches: (S,) int64. The micro-batch of each; None where none was read.
    """

    def __init__(
        self,
        settings: Settings,
        stage: str,
        trained: Tensor,
        counted: Tensor,
        trajectories: Tensor | None,
        micro_batches: Tensor | None,
    ) -> None:
        self._settings, self._stage = settings, stage
        self._given = (trained, counted, trajectories, micro_batches)
        self._made: dict[tuple[str, str], Denominators] = {}

    def _loss(self, name: str) -> LossSettings:
        return aggregation_of(self._settings, self._stage, name)

    def of(self, name: str) -> Denominators:
        """What means of a scalar over samples divide by."""
        loss = self._loss(name)
        key = loss.aggregation, loss.mean_over
        if key not in self._made:
            self._made[key] = Denominators(loss, *self._given)
        return self._made[key]

    def by_mean(self, name: str) -> bool:
        """Whether a sample enters a scalar with its mean over tokens, not with its sum."""
        return self._loss(name).aggregation == "seq-mean-token-mean"

    def shares(self, name: str) -> Tensor:
        """(S,) What each sample is multiplied by in a sum over the means of micro-batches."""
        micro_batches = self._given[3]  # None where no mean over them is asked for
        if self._loss(name).mean_over == "micro-batch" and micro_batches is not None:
            return self.of(name).shares
        return torch.ones_like(self._given[0])

    @cached_property
    def apart(self) -> tuple[str, ...]:
        """The terms of the loss that become one number otherwise than its surrogate."""
        loss = self._loss("loss")
        mine = loss.aggregation, loss.mean_over
        others = ((one, self._loss(one)) for one in TERMS)
        return tuple(one for one, its in others if (its.aggregation, its.mean_over) != mine)
