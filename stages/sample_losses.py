"""The loss terms of every sample of a block, what sums of them are divided by, and their errors."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from trajreplay.schema.errors import StageError
from trajreplay.schema.settings import LossSettings
from trajreplay.stages.block import Block
from trajreplay.stages.capability import is_plain
from trajreplay.stages.compose import (
    SHARE,
    LossInputs,
    PolicyTerms,
    evaluation_slack,
    moved_bounds,
    moved_value_bounds,
    plain_errors,
    plain_terms,
    policy_terms,
    value_terms,
    value_tokens,
)
from trajreplay.stages.coverage import POLICY
from trajreplay.stages.denominators import Denominators
from trajreplay.stages.kernels import (
    MaskedMean,
    MeanError,
    policy_loss,
    scatter_sum,
    segment_sum,
    seq_mean_token_mean,
)
from trajreplay.stages.kernels.sets import number_of_sets
from trajreplay.stages.likelihood import NLL, Likelihood
from trajreplay.stages.plain_sums import Float32Losses, plain_sums
from trajreplay.stages.proximal import Interpolation


def token_reads(block: Block, stage: str) -> tuple[str, ...]:
    """The token columns that a stage of a block reads."""
    return tuple(one for one in block.cohorts[0].abilities[stage].reads if block.per_token(one))


class SampleLosses:
    """The exact loss terms of every sample of a block, and how far float32 may be off.

    Args:
        block: The cohorts.
        stage: `loss.policy` or `loss.value`.
        replaced: Columns to read instead of the recorded ones.
    """

    def __init__(self, block: Block, stage: str, replaced: dict[str, Tensor]) -> None:
        self._stage = stage
        self._all, self._kernel = block.settings, block.kernel(stage)
        self._settings, self._value = block.settings.loss, block.settings.value
        plain = stage == POLICY and is_plain(stage, block.settings)
        self._plain = plain and self._kernel is None
        self._offsets = block.packed.offsets
        self._between: Interpolation | None = None
        self._mask = replaced.get("loss_mask", block.packed.mask)
        self._weights = self._mask.double() if "loss_mask" in replaced else block.packed.weights
        self._columns = {
            name: replaced[name] if name in replaced else block.packed.tokens(name)
            for name in token_reads(block, stage)
        }
        if "weight_versions" in block.cohorts[0].abilities[stage].reads:
            self._between = Interpolation.of(block)
            self._columns = self._between.with_old(self._columns)
        shared = "trajectory_id" in block.cohorts[0].abilities[stage].reads
        self._trajectories = block.packed.trajectories if shared else None
        by_batch = "micro_batch_id" in block.cohorts[0].abilities[stage].reads
        self._micro_batches = block.packed.micro_batches if by_batch else None
        self._cohorts = block.packed.cohorts
        self._tokens = self._terms(self._columns)
        self._likelihood: Likelihood | None = None
        if stage == POLICY and self._settings.nll_coef and "loss" not in self._tokens.terms:
            assert self._micro_batches is not None  # the capability matrix asks for them
            summed = self._weighted(self._tokens.summed)
            log_probs = self._columns["log_probs"]
            self._likelihood = Likelihood.of(block, log_probs, summed, self._micro_batches)
        self._summed: dict[bool, tuple[Tensor, dict[str, float]]] = {}

    def apart(self, name: str, samples: Tensor) -> tuple[float, float]:
        """What is added to a scalar over samples that nothing divides, and how far it may be off.

        Args:
            name: The scalar.
            samples: (K,) int64. Packed sample numbers.
        """
        return (0.0, 0.0) if self._likelihood is None else self._likelihood.added(name, samples)

    @property
    def of_batches(self) -> tuple[str, ...]:
        """The scalars that samples have no part of by themselves."""
        return () if self._likelihood is None else self._likelihood.scalars

    def _terms(
        self, columns: dict[str, Tensor], *, share: float = 0.0, against: float = 0.0
    ) -> PolicyTerms:
        """The terms at each token; of a loss that rejects none, over all trained ones.

        Args:
            columns: What they are made of.
            share: How far the bounds of the loss are moved.
            against: How far those of train against rollout are.
        """
        if self._stage == POLICY and not self._plain and self._kernel is None:
            given = LossInputs(
                columns, self._mask, self._offsets, self._micro_batches, self._cohorts
            )
            return policy_terms(self._moved(share, against), given)
        if self._plain:
            terms = plain_terms(self._settings, columns)
        elif self._kernel is not None:
            found = self._kernel.losses(self._all, columns, self._mask, self._offsets)
            if isinstance(found, PolicyTerms):
                return found
            terms = found
        else:
            return self._value_terms(columns, share, against)
        return PolicyTerms(terms, self._mask, self._mask)

    def _value_terms(self, columns: dict[str, Tensor], share: float, against: float) -> PolicyTerms:
        terms = value_terms(moved_value_bounds(self._value, share), columns)
        given = LossInputs(columns, self._mask, self._offsets, self._micro_batches, self._cohorts)
        loss = self._moved(0.0, against)
        tokens = value_tokens(replace(self._all, value=self._value, loss=loss), given)
        return PolicyTerms(terms, tokens, tokens)

    def _moved(self, share: float, against: float) -> LossSettings:
        if not share and not against:
            return self._settings
        longest = int(self._offsets.diff().max()) if len(self._offsets) > 1 else 1
        return moved_bounds(self._settings, share, against, longest=longest)

    def _weighted(self, mask: Tensor) -> Tensor:
        """(N,) float64. A mask as weights; that of all trained tokens is made once."""
        return self._weights if mask is self._mask else mask.double()

    @cached_property
    def means(self) -> dict[str, MaskedMean]:
        """Masked mean, numerator and denominator of each sample, by field."""
        return self._with_loss(self._means(self._tokens))

    def _means(self, tokens: PolicyTerms) -> dict[str, MaskedMean]:
        weights, counted = self._weighted(tokens.summed), self._weighted(tokens.counted)
        counts = self._divided(segment_sum(counted, self._offsets))
        means = {
            name: seq_mean_token_mean(values.double(), weights, self._offsets, denominator=counts)
            for name, values in tokens.terms.items()
        }
        if self._shared is None:
            return means
        return {
            name: MaskedMean(one.numerator / self._shared, one.numerator, one.denominator)
            for name, one in means.items()
        }

    def _divided(self, counts: Tensor) -> Tensor:
        """What means over so many tokens divide by."""
        epsilon = self._settings.count_epsilon
        return counts + epsilon if epsilon else counts.clamp(1.0)

    @cached_property
    def _shared(self) -> Tensor | None:
        """(S,) Trained tokens of each sample's trajectory; None where each divides by its own."""
        if self._trajectories is None:
            return None
        count = number_of_sets(self._trajectories)
        counts = scatter_sum(self._counted, self._trajectories, count)
        return self._divided(counts[self._trajectories])

    def _with_loss(self, means: dict[str, MaskedMean]) -> dict[str, MaskedMean]:
        """The means and that of the whole loss: its terms, each with its coefficient."""
        if self._stage != POLICY or "loss" in means:
            return means
        if self._likelihood is not None:
            zeros = torch.zeros_like(means["pg_loss"].mean)
            means |= {NLL: MaskedMean(zeros, zeros, means["pg_loss"].denominator)}
        settings, loss = self._settings, means["pg_loss"]
        if (entropy := means.get("entropy_loss")) is not None:
            coef = settings.entropy_coef
            loss = MaskedMean(
                policy_loss(loss.mean, entropy.mean, entropy_coef=coef),
                policy_loss(loss.numerator, entropy.numerator, entropy_coef=coef),
                loss.denominator,
            )
        if (kl := means.get("kl_loss")) is not None:
            coef = settings.kl_loss_coef
            loss = MaskedMean(
                loss.mean + coef * kl.mean, loss.numerator + coef * kl.numerator, loss.denominator
            )
        return means | {"loss": loss}

    def totals(self, samples: Tensor, *, by_batch: bool = False) -> dict[str, float]:
        """What recorded scalars are made of: sums over samples, by field.

        Args:
            samples: (K,) int64. Packed sample numbers; asked again with the same tensor, the
                answer is kept.
            by_batch: Whether each enters with its share of the mean of its micro-batch.
        """
        if by_batch not in self._summed or self._summed[by_batch][0] is not samples:
            stacked = self._stacked * self.denominators.shares if by_batch else self._stacked
            sums = stacked[:, samples].sum(1).tolist()
            self._summed[by_batch] = samples, dict(zip(self.means, sums, strict=True))
        return self._summed[by_batch][1]

    def _narrow_terms(self) -> PolicyTerms:
        """The terms at each token in float32."""
        narrow = {name: values.float() for name, values in self._columns.items()}
        return self._terms(self._between.with_old(narrow) if self._between else narrow)

    @cached_property
    def float32(self) -> Float32Losses:
        """The same in float32, summed in the order of tokens and samples."""
        tokens = self._narrow_terms()
        counts = self._divided(plain_sums(tokens.counted, self._offsets))
        if self._shared is not None:
            counts = self._shared.float()
        means: dict[str, MaskedMean] = {}
        for name, values in tokens.terms.items():
            kept = torch.where(tokens.summed, values, 0.0)
            numerator = plain_sums(kept, self._offsets)
            means[name] = MaskedMean(numerator / counts, numerator, counts)
        return Float32Losses(self._with_loss(means), by_mean=self._by_mean)

    @property
    def _by_mean(self) -> bool:
        """Whether a sample enters with its mean over tokens, not with its sum."""
        return self._settings.aggregation == "seq-mean-token-mean"

    @cached_property
    def token_shares(self) -> Tensor:
        """(N,) float64. What a term at a token adds to what its sample enters totals with."""
        summed = self._weighted(self._tokens.summed)
        if not self._by_mean:
            return summed
        divisors = self.means["pg_loss"].denominator if self._shared is None else self._shared
        return summed / divisors.repeat_interleave(self._offsets.diff())

    def gradients(self, moved: float = 0.0) -> dict[str, Tensor]:
        """(N,) float64 by term. Its derivative by the log-probability of its own token.

        Args:
            moved: How far the bounds of the loss are moved.
        """
        log_probs = self._columns["log_probs"].double().clone().requires_grad_()
        columns, settings = {**self._columns, "log_probs": log_probs}, self._moved(moved, 0.0)
        if settings.ratio == "one":  # the current ones themselves, without their gradient
            columns["old_log_probs"] = log_probs.detach()
            settings = replace(settings, ratio="token", old_source="old")
        given = LossInputs(columns, self._mask, self._offsets, self._micro_batches, self._cohorts)
        terms = policy_terms(settings, given).terms
        coefs = {"pg_loss": 1.0, "kl_loss": settings.kl_loss_coef}
        return {
            name: coef * torch.autograd.grad(terms[name].sum(), log_probs, retain_graph=True)[0]
            for name, coef in coefs.items()
            if name in terms
        }

    @cached_property
    def _stacked(self) -> Tensor:
        found = self.means.values()
        return torch.stack([one.mean if self._by_mean else one.numerator for one in found])

    @cached_property
    def denominators(self) -> Denominators:
        """What means over the samples divide by."""
        return Denominators(
            self._settings,
            segment_sum(self._weights, self._offsets),
            self._counted,
            self._trajectories,
            self._micro_batches,
        )

    @cached_property
    def _counted(self) -> Tensor:
        """(S,) The tokens of each sample that a mean divides by."""
        return segment_sum(self._weighted(self._tokens.counted), self._offsets)

    def total_errors(self, name: str, samples: Tensor, *, by_batch: bool = False) -> MeanError:
        """How far what samples add to a total may be off."""
        found = self.errors[name]
        factors = torch.ones_like(found.error) if self._by_mean else self.means[name].denominator
        if by_batch:
            factors = factors * self.denominators.shares
        factors = factors[samples]
        return MeanError(found.error[samples] * factors, found.absolute[samples] * factors)

    @cached_property
    def errors(self) -> dict[str, MeanError]:
        """How far each sample's mean may be off, by field."""
        if self._plain:
            return plain_errors(self._settings, self._columns, self._mask, self._offsets)
        tokens = self._narrow_terms()
        if tokens.terms.keys() != self._tokens.terms.keys():
            found, expected = (", ".join(one.terms) for one in (tokens, self._tokens))
            raise StageError(f"{self._stage}: gives {found} in float32, expected {expected}")
        rounded = self._with_loss(self._means(tokens))
        sizes = self._means(
            self._tokens._replace(
                terms={name: values.abs() for name, values in self._tokens.terms.items()}
            )
        )
        absolute = {name: one.mean for name, one in sizes.items()}
        if NLL in self.means:
            absolute[NLL] = torch.zeros_like(absolute["pg_loss"])
        if self._stage == POLICY and "loss" not in absolute:
            coefs = {"entropy_loss": self._settings.entropy_coef}
            coefs |= {"pg_loss": 1.0, "kl_loss": self._settings.kl_loss_coef}
            terms = [abs(coefs[name]) * one for name, one in absolute.items() if name in coefs]
            absolute["loss"] = torch.stack(terms).sum(0)
        slack = {
            name: evaluation_slack(exact.mean, rounded[name].mean)
            for name, exact in self.means.items()
        }
        if self._kernel is None:
            for share, against in product((SHARE, -SHARE), repeat=2):
                self._add_undecided(slack, share, against)
        return {name: MeanError(slack[name], absolute[name]) for name in slack}

    def _add_undecided(self, slack: dict[str, Tensor], share: float, against: float) -> None:
        """Add what a mean differs by if bounds are moved by as much as rounding may."""
        tokens = self._terms(self._columns, share=share, against=against)
        moved = self._with_loss(self._means(tokens))
        changed = segment_sum(self._weighted(tokens.counted), self._offsets) - self._counted
        for name, exact in self.means.items():
            numerator = (moved[name].numerator - exact.numerator).abs()
            # A token that is not counted any more changes what the others are divided by.
            others = changed.abs() * exact.mean.abs().max() if len(changed) else changed
            by_token = (numerator + others) / exact.denominator
            slack[name] += torch.maximum(by_token, (moved[name].mean - exact.mean).abs())
