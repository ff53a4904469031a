"""The stage loss.policy of a block: per-token losses, masked means, and the recorded scalars."""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from trajreplay.schema.policy import Tolerance
from trajreplay.schema.settings import LossSettings
from trajreplay.stages.block import Block
from trajreplay.stages.capability import LOG_PROB_SOURCES, ability
from trajreplay.stages.compare import Look, compare_elements, compare_scalar
from trajreplay.stages.coverage import STAGE, judge_coverage, name_unstated_terms
from trajreplay.stages.kernels import (
    MaskedMean,
    MeanError,
    policy_loss,
    policy_loss_error,
    ppo_clip,
    ppo_clip_error,
    scatter_sum_error,
    seq_mean_token_mean,
    seq_mean_token_mean_error,
)
from trajreplay.stages.outputs import (
    Recorded,
    divisor,
    expected_value,
    is_stated,
    recorded_outputs,
    sample_values,
)
from trajreplay.stages.report import Divergence


class SampleLosses:
    """The exact loss terms of every sample of a block, and bounds of their float32 evaluation.

    Args:
        block: The cohorts.
        settings: Loss settings in force.
        replaced: Columns to read instead of the recorded ones.
    """

    def __init__(self, block: Block, settings: LossSettings, replaced: dict[str, Tensor]) -> None:
        self._settings = settings
        self._offsets = block.packed.offsets
        self._mask = replaced.get("loss_mask", block.packed.mask)
        self._weights = self._mask.double() if "loss_mask" in replaced else block.packed.weights

        def column(name: str) -> Tensor:
            return replaced[name] if name in replaced else block.packed.tokens(name)

        old = LOG_PROB_SOURCES[settings.old_source]
        self._inputs = column("log_probs"), column(old), column("advantages")
        self._summed: tuple[Tensor, dict[str, float]] | None = None
        has_entropy = "entropy" in block.packed.table.column_names
        self._entropy = column("entropy") if has_entropy else None
        clip = ppo_clip(
            *self._inputs, eps_clip=settings.eps_clip, eps_clip_high=settings.eps_clip_high
        )
        self._tokens = {
            "pg_loss": clip.pg_loss,
            "pg_clipfrac": clip.clipped,
            "ppo_kl": clip.log_ratio,
        }
        if self._entropy is not None:
            self._tokens["entropy_loss"] = self._entropy

    @cached_property
    def means(self) -> dict[str, MaskedMean]:
        """Masked mean, numerator and denominator of each sample, by field."""
        counts = None
        means: dict[str, MaskedMean] = {}
        for name, values in self._tokens.items():
            means[name] = seq_mean_token_mean(
                values, self._weights, self._offsets, denominator=counts
            )
            counts = means[name].denominator
        # ppo_kl is old - new, the negative of the log ratio.
        kl = means["ppo_kl"]
        means["ppo_kl"] = MaskedMean(-kl.mean, -kl.numerator, kl.denominator)
        pg, entropy, coef = means["pg_loss"], means.get("entropy_loss"), self._settings.entropy_coef
        if entropy is None:
            means["loss"] = pg
        else:
            means["loss"] = MaskedMean(
                policy_loss(pg.mean, entropy.mean, entropy_coef=coef),
                policy_loss(pg.numerator, entropy.numerator, entropy_coef=coef),
                pg.denominator,
            )
        return means

    def totals(self, samples: Tensor) -> dict[str, float]:
        """The sum of the means of some samples, by field.

        Args:
            samples: (K,) int64. Packed sample numbers; asked again with the same tensor, the
                answer is kept.
        """
        if self._summed is None or self._summed[0] is not samples:
            sums = self._stacked[:, samples].sum(1).tolist()
            self._summed = samples, dict(zip(self.means, sums, strict=True))
        return self._summed[1]

    @cached_property
    def _stacked(self) -> Tensor:
        return torch.stack([one.mean for one in self.means.values()])

    @cached_property
    def errors(self) -> dict[str, MeanError]:
        """Bounds of each sample's mean, by field."""
        clip = ppo_clip_error(
            *self._inputs,
            eps_clip=self._settings.eps_clip,
            eps_clip_high=self._settings.eps_clip_high,
        )
        token_errors = {
            "pg_loss": clip.pg_loss,
            "pg_clipfrac": clip.undecided,
            "ppo_kl": clip.ppo_kl,
            "entropy_loss": None,
        }
        errors = {
            name: seq_mean_token_mean_error(values, token_errors[name], self._mask, self._offsets)
            for name, values in self._tokens.items()
        }
        pg, coef = errors["pg_loss"], self._settings.entropy_coef
        entropy = errors.get("entropy_loss")
        errors["loss"] = (
            pg if entropy is None else policy_loss_error(pg, entropy, entropy_coef=coef)
        )
        return errors


def replay_loss_policy(block: Block) -> None:
    """Recompute the policy loss and its metrics, and compare every recorded scalar."""
    settings = block.settings.loss
    isolated = SampleLosses(block, settings, {})
    consumed = {"advantages", "loss_mask", LOG_PROB_SOURCES[settings.old_source], "entropy"}
    replaced = {name: block.chained[name] for name in sorted(consumed & set(block.chained))}
    chained = SampleLosses(block, settings, replaced) if replaced else None
    looks: list[Look] = []
    chained_looks: list[Look] = []
    outputs = [recorded_outputs(block, index, STAGE) for index in range(len(block.cohorts))]
    for cohort, found in zip(block.cohorts, outputs, strict=True):
        looks.append(_compare(block, found, isolated))
        if chained is not None:
            chained_looks.append(_compare(block, found, chained))
        if looks[-1].mismatches:
            name_unstated_terms(cohort)
    old = LOG_PROB_SOURCES[settings.old_source]
    block.record(
        STAGE,
        looks,
        chained_looks if chained is not None else None,
        inputs=("log_probs", old, "advantages", "entropy"),
        after="advantage.estimate",
        replaced=tuple(replaced),
        noun="scalars",
    )
    columns = block.packed.table.column_names
    for cohort, found in zip(block.cohorts, outputs, strict=True):
        needed = ability(STAGE, cohort.settings, cohort.owners[0].parallel, columns).writes
        judge_coverage(cohort, found, needed)


def _compare(block: Block, outputs: list[Recorded], losses: SampleLosses) -> Look:
    look = Look()
    for one in outputs:
        if one.output.field not in losses.means or not one.complete or not is_stated(one.output):
            continue
        scope = _compare_samples if one.output.scope == "sample" else _compare_sum
        look = look.merged(scope(block, one, losses))
    return look


def _compare_sum(block: Block, one: Recorded, losses: SampleLosses) -> Look:
    """A scalar over the samples of a micro-batch, a rank, or the cohort."""
    output, name = one.output, one.output.field
    tolerance = block.tolerance(STAGE, name)
    count = len(one.samples)
    total = losses.totals(one.samples)[name]
    weight = abs(output.scale / divisor(output, count))

    def slack() -> float:
        errors = losses.errors[name]
        picked = MeanError(errors.error[one.samples], errors.absolute[one.samples])
        same = torch.zeros(count, dtype=torch.int64)
        return float(scatter_sum_error(picked, same, 1).error)

    look = Look()
    pairs = [(name, output.value, expected_value(output, total, count), weight)]
    if output.numerator is not None:
        pairs.append((f"{name}.numerator", output.numerator, total, 1.0))
    for field, recorded, recomputed, factor in pairs:
        if recorded is None or (count == 0 and recorded == 0.0):
            continue
        divergence = Divergence(
            field,
            recorded,
            recomputed,
            rank=None if output.scope == "global" else one.entry.key.rank,
            sample_id=None,
            group_id=None,
        )
        if output.micro_batch_id is not None:
            divergence = Divergence(
                f"{field}[{output.micro_batch_id}]", recorded, recomputed, rank=one.entry.key.rank
            )
        scaled = Tolerance(tolerance.atol * min(1.0, factor), tolerance.rtol)
        look = look.merged(compare_scalar(divergence, scaled, lambda f=factor: f * slack()))  # type: ignore[misc]
    return look


def _compare_samples(block: Block, one: Recorded, losses: SampleLosses) -> Look:
    """One value a sample: its masked mean, or with reduction sum its numerator."""
    output, name = one.output, one.output.field
    terms = losses.means[name]
    summed = output.reduction == "sum"
    exact = terms.numerator if summed else terms.mean
    scale = output.scale

    def slack(outside: Tensor) -> Tensor:
        samples = one.samples[outside]
        error = losses.errors[name].error[samples]
        return abs(scale) * (error * terms.denominator[samples] if summed else error)

    recorded = sample_values(block, one)
    compared = compare_elements(
        recorded,
        scale * exact[one.samples],
        [0, len(recorded)],
        block.tolerance(STAGE, name),
        slack=slack,
        describe=lambda at, old, new: block.sample_divergence(name, int(one.samples[at]), old, new),
    )
    return compared.looks[0]
