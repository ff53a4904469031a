"""The loss of every sample of a block, what sums over samples divide by, and their errors."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor

from trajreplay.schema.errors import StageError
from trajreplay.stages.block import Block
from trajreplay.stages.compose import PolicyTerms, evaluation_slack
from trajreplay.stages.compose.aggregates import TERMS, Aggregates
from trajreplay.stages.compose.denominators import Denominators
from trajreplay.stages.compose.plain_sums import PlainLosses, plain_sums
from trajreplay.stages.kernels import (
    MaskedMean,
    MeanError,
    policy_loss,
    scatter_sum,
    scatter_sum_error,
    segment_sum,
    seq_mean_token_mean,
)
from trajreplay.stages.kernels.sets import number_of_sets
from trajreplay.stages.losses.coverage import POLICY
from trajreplay.stages.losses.likelihood import NLL, Likelihood
from trajreplay.stages.losses.ties import Ties
from trajreplay.stages.losses.token_losses import TokenLosses
from trajreplay.stages.outputs import Recorded

_PENALISED = ("pg_loss", "loss")  # scalars that a penalty is part of


class SampleLosses:
    """The exact loss terms of every sample of a block, and how far float32 may be off.

    Args:
        block: The cohorts.
        stage: `loss.policy` or `loss.value`.
        replaced: Columns to read instead of the recorded ones.

    Attributes:
        of_tokens: What the loss is made of.
        tokens: Its terms at each token.
        offsets: (S+1,) int64. Where the tokens of each sample begin.
    """

    def __init__(self, block: Block, stage: str, replaced: dict[str, Tensor]) -> None:
        self._stage, self._all, self._settings = stage, block.settings, block.settings.loss
        self.of_tokens = TokenLosses(block, stage, replaced)
        self.offsets, self._weights = block.packed.offsets, self.of_tokens.weights
        self._trajectories = self.of_tokens.trajectories
        self._micro_batches = self.of_tokens.micro_batches
        self.tokens = self.of_tokens.terms()
        self._likelihood: Likelihood | None = None
        if stage == POLICY and self._settings.nll_coef and "loss" not in self.tokens.terms:
            assert self._micro_batches is not None  # the capability matrix asks for them
            summed = self.of_tokens.weighted(self.tokens.summed)
            log_probs = self.of_tokens.columns["log_probs"]
            self._likelihood = Likelihood.of(block, log_probs, summed, self._micro_batches)
        self._summed: dict[bool, tuple[Tensor, dict[str, float]]] = {}

    def apart(self, one: Recorded) -> float:
        """What is added to a scalar that its divisor does not divide.

        Args:
            one: The scalar, and the samples that it covers.

        Raises:
            StageError: Its divisor is stated, and is not that of what is added.
        """
        value = self._added(one)[0]
        for term in self._apart_of(one):
            divisor, by_batch = self._divided_by(one, term)
            total = self.totals(one.samples, by_batch=by_batch)[term]
            value += self._coefs[term] * total / divisor
        return value

    def apart_error(self, one: Recorded) -> float:
        """How far float32 may be off in what is added to a scalar."""
        error = self._added(one)[1]
        same = torch.zeros(len(one.samples), dtype=torch.int64)
        for term in self._apart_of(one):
            divisor, by_batch = self._divided_by(one, term)
            off = scatter_sum_error(
                self.total_errors(term, one.samples, by_batch=by_batch), same, 1
            )
            error += abs(self._coefs[term]) * float(off.error) / divisor
        return error

    def _added(self, one: Recorded) -> tuple[float, float]:
        """What the likelihood adds to a scalar, and how far that may be off."""
        if self._likelihood is None:
            return 0.0, 0.0
        return self._likelihood.added(one.output.field, one.samples)

    def _apart_of(self, one: Recorded) -> tuple[str, ...]:
        return self._terms_apart if one.output.field == "loss" else ()

    def _divided_by(self, one: Recorded, term: str) -> tuple[float, bool]:
        """What a term of the loss divides by in a scalar, and whether over micro-batches."""
        stated, denominators = one.output.denominator, self.aggregates.of(term)
        known = self.denominators.known(one.output, one.samples, one.samples)
        if stated is not None and stated not in known:
            raise StageError(
                f"loss is stated over {stated:g}, and the {term} in it has a mean of its own, "
                "over what nothing says",
                hint="Record it without a denominator, over the samples of its scope.",
            )
        output = replace(one.output, field=term, denominator=None)
        return denominators.divisor(output, one.samples), denominators.by_batch(output)

    @property
    def _coefs(self) -> dict[str, float]:
        """What the terms of the loss are multiplied by in it."""
        return self.of_tokens.coefs

    @cached_property
    def _terms_apart(self) -> tuple[str, ...]:
        """The terms of the loss that have a mean of their own."""
        whole = self._stage != POLICY or "loss" in self.tokens.terms
        if whole:
            return ()
        apart = self.aggregates.apart
        return tuple(one for one in apart if one in self.means and self._coefs[one])

    @property
    def of_batches(self) -> tuple[str, ...]:
        """The scalars that samples have no part of by themselves."""
        found = () if self._likelihood is None else self._likelihood.scalars
        return (*found, "loss") if self._terms_apart else found

    @cached_property
    def means(self) -> dict[str, MaskedMean]:
        """Masked mean, numerator and denominator of each sample, by field."""
        return self._with_loss(self._means(self.tokens))

    def _means(self, tokens: PolicyTerms) -> dict[str, MaskedMean]:
        weights = self.of_tokens.weighted(tokens.summed)
        counts = self._divided(self._count_of(tokens))
        means = {
            name: seq_mean_token_mean(values.double(), weights, self.offsets, denominator=counts)
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
        loss = means["pg_loss"]
        joined = [one for one in TERMS if one in means and one not in self.aggregates.apart]
        for name in joined:
            term, bonus = means[name], -self._coefs[name]
            loss = MaskedMean(
                policy_loss(loss.mean, term.mean, entropy_coef=bonus),
                policy_loss(loss.numerator, term.numerator, entropy_coef=bonus),
                loss.denominator,
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
            stacked = self._stacked * self._shares if by_batch else self._stacked
            sums = stacked[:, samples].sum(1).tolist()
            self._summed[by_batch] = samples, dict(zip(self.means, sums, strict=True))
        return self._summed[by_batch][1]

    @cached_property
    def float32(self) -> PlainLosses:
        """The same in float32, summed in the order of tokens and samples."""
        return self.plain(torch.float32)

    def plain(self, dtype: torch.dtype, order: str = "as torch takes them") -> PlainLosses:
        """The same by the arithmetic of a dtype, sums in float32 where that is narrower.

        Args:
            dtype: The dtype.
            order: The order of the sums, one of `ORDERS`.
        """
        tokens = self.of_tokens.in_dtype(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        counts = self._divided(plain_sums(tokens.counted, self.offsets, wide))
        if self._shared is not None:
            counts = self._shared.to(wide)
        means: dict[str, MaskedMean] = {}
        for name, values in tokens.terms.items():
            kept = torch.where(tokens.summed, values, 0.0)
            numerator = plain_sums(kept, self.offsets, wide, order)
            means[name] = MaskedMean(numerator / counts, numerator, counts)
        means = self._with_loss(means)
        return PlainLosses(means, {name: self.aggregates.by_mean(name) for name in means}, order)

    def token_shares(self, name: str = "pg_loss") -> Tensor:
        """(N,) float64. What a term at a token adds to what its sample enters totals with."""
        summed = self.of_tokens.weighted(self.tokens.summed)
        if not self.aggregates.by_mean(name):
            return summed
        divisors = self.means[name].denominator if self._shared is None else self._shared
        return summed / divisors.repeat_interleave(self.offsets.diff())

    @cached_property
    def _stacked(self) -> Tensor:
        means, by_mean = self.means, self.aggregates.by_mean
        return torch.stack(
            [one.mean if by_mean(name) else one.numerator for name, one in means.items()]
        )

    @cached_property
    def _shares(self) -> Tensor:
        """(F, S) What each sample is multiplied by in each scalar over micro-batches."""
        return torch.stack([self.aggregates.shares(name) for name in self.means])

    @property
    def denominators(self) -> Denominators:
        """What means of the loss over the samples divide by."""
        return self.aggregates.of("loss")

    @cached_property
    def aggregates(self) -> Aggregates:
        """What samples enter each scalar with, and what it divides by."""
        return Aggregates(
            self._all,
            self._stage,
            self._trained,
            self._counted,
            self._trajectories,
            self._micro_batches,
        )

    @cached_property
    def _counted(self) -> Tensor:
        """(S,) The tokens of each sample that a mean divides by."""
        return self._count_of(self.tokens)

    @cached_property
    def _trained(self) -> Tensor:
        """(S,) The trained tokens of each sample."""
        return segment_sum(self._weights, self.offsets)

    def _count_of(self, tokens: PolicyTerms) -> Tensor:
        """(S,) The tokens of each sample that count; most losses count all trained ones."""
        counted = self.of_tokens.weighted(tokens.counted)
        return self._trained if counted is self._weights else segment_sum(counted, self.offsets)

    def total_errors(self, name: str, samples: Tensor, *, by_batch: bool = False) -> MeanError:
        """How far what samples add to a total may be off."""
        found = self.errors[name]
        by_mean = self.aggregates.by_mean(name)
        factors = torch.ones_like(found.error) if by_mean else self.means[name].denominator
        if by_batch:
            factors = factors * self.aggregates.shares(name)
        factors = factors[samples]
        error = found.error[samples] * factors
        if self._ties is not None and name in _PENALISED:
            alone = self._ties.alone[samples] * factors
            error = error - alone + self._ties.together(samples, factors)
        return MeanError(error, found.absolute[samples] * factors)

    @cached_property
    def errors(self) -> dict[str, MeanError]:
        """How far each sample's mean may be off, by field."""
        if (plain := self.of_tokens.plain_errors()) is not None:
            return plain
        tokens = self.of_tokens.in_dtype(torch.float32)
        if tokens.terms.keys() != self.tokens.terms.keys():
            found, expected = (", ".join(one.terms) for one in (tokens, self.tokens))
            raise StageError(f"{self._stage}: gives {found} in float32, expected {expected}")
        rounded = self._with_loss(self._means(tokens))
        sizes = self._means(
            self.tokens._replace(
                terms={name: values.abs() for name, values in self.tokens.terms.items()}
            )
        )
        absolute = {name: one.mean for name, one in sizes.items()}
        if NLL in self.means:
            absolute[NLL] = torch.zeros_like(absolute["pg_loss"])
        if self._stage == POLICY and "loss" not in absolute:
            coefs = {"pg_loss": 1.0, **self._coefs}
            joined = coefs.keys() - set(self.aggregates.apart)
            terms = [abs(coefs[name]) * one for name, one in absolute.items() if name in joined]
            absolute["loss"] = torch.stack(terms).sum(0)
        slack = {
            name: evaluation_slack(exact.mean, rounded[name].mean)
            for name, exact in self.means.items()
        }
        if not self.of_tokens.of_kernel:
            for bounds, times in self.of_tokens.moved_bounds():
                self._add_undecided(slack, bounds, times)
        if self._ties is not None:
            for name in _PENALISED:
                slack[name] += self._ties.alone
        return {name: MeanError(slack[name], absolute[name]) for name in slack}

    @cached_property
    def _ties(self) -> Ties | None:
        """What is off where rounding decides who is penalised; None where it decides nothing."""
        found = self.of_tokens.undecided()
        if found is None:
            return None
        divisors = self.means["pg_loss"].denominator
        return Ties.of(found, self.offsets, divisors, self._micro_batches)

    def _add_undecided(
        self, slack: dict[str, Tensor], bounds: tuple[float, float], times: int
    ) -> None:
        """Add what a mean differs by if bounds are moved by as much as rounding may."""
        share, against = bounds
        tokens = self.of_tokens.terms(share=share, against=against)
        moved = self._with_loss(self._means(tokens))
        changed = self._count_of(tokens) - self._counted
        for name, exact in self.means.items():
            numerator = (moved[name].numerator - exact.numerator).abs()
            # A token that is not counted any more changes what the others are divided by.
            others = changed.abs() * exact.mean.abs().max() if len(changed) else changed
            by_token = (numerator + others) / exact.denominator
            off = torch.maximum(by_token, (moved[name].mean - exact.mean).abs())
            slack[name] += times * off
