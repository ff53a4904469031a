"""The terms of a loss at every token of a block: exact, in float32, and under moved bounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from trajreplay.schema.settings import LossSettings
from trajreplay.stages.block import Block
from trajreplay.stages.capability import is_plain
from trajreplay.stages.compose import (
    SHARE,
    LossInputs,
    PolicyTerms,
    moved_bounds,
    moved_value_bounds,
    plain_errors,
    plain_terms,
    policy_terms,
    undecided_terms,
    value_terms,
    value_tokens,
)
from trajreplay.stages.kernels import MeanError
from trajreplay.stages.kernels.gates import Undecided
from trajreplay.stages.losses.coverage import POLICY
from trajreplay.stages.losses.proximal import OLD, Interpolation
from trajreplay.stages.wide import whole_batches


def token_reads(block: Block, stage: str) -> tuple[str, ...]:
    """The token columns that a stage of a block reads."""
    return tuple(one for one in block.cohorts[0].abilities[stage].reads if block.per_token(one))


class TokenLosses:
    """What a loss is made of, and its terms.

    Args:
        block: The cohorts.
        stage: `loss.policy` or `loss.value`.
        replaced: Columns to read instead of the recorded ones.

    Attributes:
        columns: (N,) float64 by name. What it reads of each token.
        weights: (N,) float64. 1 for trained tokens.
        trajectories: (S,) int64. The trajectory of each sample; None where none is asked.
        micro_batches: (S,) int64. The micro-batch of each; None where none is asked.
    """

    def __init__(self, block: Block, stage: str, replaced: dict[str, Tensor]) -> None:
        packed, reads = block.packed, block.cohorts[0].abilities[stage].reads
        self._stage, self._all = stage, block.settings
        self._kernel = block.kernel(stage)
        plain = stage == POLICY and is_plain(stage, block.settings)
        self._plain = plain and self._kernel is None
        self._offsets = packed.offsets
        self._cohorts = packed.batches(block.settings.layout)
        wide = whole_batches(block, stage) if stage == POLICY else None
        self._widened = None if wide is None else wide.of_losses
        self._mask = replaced.get("loss_mask", packed.mask)
        self.weights = self._mask.double() if "loss_mask" in replaced else packed.weights
        self.columns = {
            name: replaced[name] if name in replaced else packed.tokens(name)
            for name in token_reads(block, stage)
        }
        self._between: Interpolation | None = None
        self._on_policy = stage == POLICY and block.settings.loss.proximal == "current"
        if "weight_versions" in reads:
            self._between = Interpolation.of(block)
            self.columns = self._between.with_old(self.columns)
        self.trajectories = packed.trajectories if "trajectory_id" in reads else None
        self.micro_batches = packed.micro_batches if "micro_batch_id" in reads else None

    @property
    def of_kernel(self) -> bool:
        """Whether a kernel of the user computes them."""
        return self._kernel is not None

    @property
    def coefs(self) -> dict[str, float]:
        """What the terms of the policy loss beside its surrogate are multiplied by in it."""
        loss = self._all.loss
        return {"entropy_loss": -loss.entropy_coef, "kl_loss": loss.kl_loss_coef}

    def weighted(self, mask: Tensor) -> Tensor:
        """(N,) float64. A mask as weights; that of all trained tokens is made once."""
        return self.weights if mask is self._mask else mask.double()

    def terms(self, *, share: float = 0.0, against: float = 0.0) -> PolicyTerms:
        """The terms at each token; of a loss that rejects none, over all trained ones.

        Args:
            share: How far the bounds of the loss are moved.
            against: How far those of train against rollout are.
        """
        return self._terms(self.columns, share, against)

    def moved_bounds(self) -> Iterator[tuple[tuple[float, float], int]]:
        """The ways in which rounding moves the bounds: `share` and `against` of `terms`.

        Yields:
            Each way that gives another loss, and how many of the four give that one.
        """
        found: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for share, against in product((SHARE, -SHARE), repeat=2):
            value = moved_value_bounds(self._all.value, share)
            alike = repr(self._moved(share, against)), repr(value)
            found.setdefault(alike, []).append((share, against))
        own = repr(self._all.loss), repr(self._all.value)
        for alike, ways in found.items():
            if alike != own:
                yield ways[0], len(ways)

    def undecided(self) -> Undecided | None:
        """What rounding alone decides of pg_loss; None where it decides nothing."""
        if self._stage != POLICY or self._kernel is not None:
            return None
        return undecided_terms(self._all.loss, self._given(self.columns))

    def in_dtype(self, dtype: torch.dtype) -> PolicyTerms:
        """The terms at each token by the arithmetic of a dtype."""
        narrow = {name: values.to(dtype) for name, values in self.columns.items()}
        return self._terms(self._between.with_old(narrow) if self._between else narrow, 0.0, 0.0)

    def plain_errors(self) -> dict[str, MeanError] | None:
        """How far each sample's mean may be off, of a loss for which that is known."""
        if not self._plain:
            return None
        return plain_errors(self._all.loss, self.columns, self._mask, self._offsets)

    def _terms(self, columns: dict[str, Tensor], share: float, against: float) -> PolicyTerms:
        if self._kernel is not None:
            terms = self._kernel.losses(self._all, columns, self._mask, self._offsets)
            if isinstance(terms, PolicyTerms):
                return terms
        elif self._plain:
            terms = plain_terms(self._all.loss, columns)
        elif self._stage == POLICY:
            return policy_terms(self._moved(share, against), self._given(columns))
        else:
            return self._value_terms(columns, share, against)
        return PolicyTerms(terms, self._mask, self._mask)

    def _value_terms(self, columns: dict[str, Tensor], share: float, against: float) -> PolicyTerms:
        value, loss = moved_value_bounds(self._all.value, share), self._moved(0.0, against)
        tokens = value_tokens(replace(self._all, loss=loss), self._given(columns))
        return PolicyTerms(value_terms(value, columns), tokens, tokens)

    def _given(self, columns: dict[str, Tensor]) -> LossInputs:
        if self._on_policy:  # the current ones themselves, without their gradient
            columns = {**columns, OLD: columns["log_probs"].detach()}
        sets = self.micro_batches, self._cohorts
        return LossInputs(columns, self._mask, self._offsets, *sets, self._widened)

    def _moved(self, share: float, against: float) -> LossSettings:
        if not share and not against:
            return self._all.loss
        longest = int(self._offsets.diff().max()) if len(self._offsets) > 1 else 1
        return moved_bounds(self._all.loss, share, against, longest=longest)

    def gradients(self, moved: float = 0.0) -> dict[str, Tensor]:
        """(N,) float64 by term. Its derivative by the log-probability of its own token.

        Args:
            moved: How far the bounds of the loss are moved.
        """
        log_probs = self.columns["log_probs"].double().clone().requires_grad_()
        columns, settings = {**self.columns, "log_probs": log_probs}, self._moved(moved, 0.0)
        terms = policy_terms(settings, self._given(columns)).terms
        coefs = {"pg_loss": 1.0, "kl_loss": settings.kl_loss_coef}
        return {
            name: coef * torch.autograd.grad(terms[name].sum(), log_probs, retain_graph=True)[0]
            for name, coef in coefs.items()
            if name in terms
        }
