"""The stages loss.policy and loss.value: recorded scalars against those of the token losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trajreplay.schema.errors import StageError
from trajreplay.schema.policy import Tolerance
from trajreplay.stages.block import Block
from trajreplay.stages.cohorts.cohort import LoadedCohort
from trajreplay.stages.compare import Compared, Look, compare_elements, compare_scalar
from trajreplay.stages.compose.plain_sums import PlainLosses
from trajreplay.stages.contract_checks.definitions import METRICS
from trajreplay.stages.contract_checks.metrics import audited
from trajreplay.stages.kernels import scatter_sum_error
from trajreplay.stages.losses.coverage import POLICY, judge_coverage, name_unstated_terms
from trajreplay.stages.losses.gradients import judge_gradients
from trajreplay.stages.losses.least_wrong import least_wrong
from trajreplay.stages.losses.sample_losses import SampleLosses
from trajreplay.stages.losses.token_losses import token_reads
from trajreplay.stages.outputs import (
    Recorded,
    is_stated,
    recorded_outputs,
    sample_values,
)
from trajreplay.stages.report import Divergence, Finding


def replay_loss_policy(block: Block) -> None:
    """Recompute the policy loss and its metrics, and compare every recorded scalar."""
    _replay(block, POLICY)


def replay_loss_value(block: Block) -> None:
    """Recompute the value loss, and compare every recorded scalar."""
    _replay(block, "loss.value")


def _replay(block: Block, stage: str) -> None:
    reads = token_reads(block, stage)
    isolated = SampleLosses(block, stage, {})
    consumed = {*reads, "loss_mask"} - {"log_probs", "values"}
    replaced = {name: block.chained[name] for name in sorted(consumed & set(block.chained))}
    chained = SampleLosses(block, stage, replaced) if replaced else None
    looks: list[Look] = []
    chained_looks: list[Look] = []
    outputs = [recorded_outputs(block, index, stage) for index in range(len(block.cohorts))]
    for cohort, found in zip(block.cohorts, outputs, strict=True):
        looks.append(_compare(block, found, isolated))
        if chained is not None:
            chained_looks.append(_compare(block, found, chained))
        if looks[-1].mismatches and stage == POLICY:
            name_unstated_terms(cohort)
    block.record(
        stage,
        looks,
        chained_looks if chained is not None else None,
        inputs=reads,
        after="advantage.estimate",
        replaced=tuple(replaced),
        noun="scalars",
    )
    for index, (cohort, found) in enumerate(zip(block.cohorts, outputs, strict=True)):
        _name_uncompared(block, cohort, stage, found, isolated)
        start, stop = block.packed.sample_bounds[index : index + 2]
        judge_coverage(cohort, stage, found, isolated.aggregates, torch.arange(start, stop))
    if stage == POLICY:
        judge_gradients(block, outputs, isolated)


def _name_uncompared(
    block: Block, cohort: LoadedCohort, stage: str, outputs: list[Recorded], losses: SampleLosses
) -> None:
    """Say which recorded scalars the settings, a kernel of the user, or a check do not give."""
    checked = "sample" in block.stages
    unknown = [one for one in outputs if one.output.field not in losses.means]
    left = sorted(
        {one.output.field for one in unknown if not checked or audited(block, one) is None}
    )
    known = [one for one in left if one in METRICS]
    for names, why in (
        ([one for one in left if one not in known], "under the settings there is no such term"),
        (known, "scope, reduction or settings leave open what it is"),
    ):
        if not names:
            continue
        message = f"recorded and compared with nothing: {', '.join(names)}; {why}"
        cohort.report.findings.append(
            Finding("outputs.not-compared", "warning", message, stage=stage)
        )


def _compare(block: Block, outputs: list[Recorded], losses: SampleLosses) -> Look:
    look = Look()
    for one in outputs:
        if one.output.field not in losses.means or not one.complete or not is_stated(one.output):
            continue
        by_sample = one.output.scope == "sample"
        if by_sample and one.output.field in losses.of_batches:
            raise StageError(
                f"{one.output.field} is recorded of each sample, and loss.nll_coef or "
                "a mean of entropy or KL of its own adds what no sample has a part of",
                hint="Record it of the micro-batch, the rank or all ranks.",
            )
        scope = _compare_samples if by_sample else _compare_sum
        look = look.merged(scope(block, one, losses))
    return look


@dataclass(frozen=True)
class Scalar:
    """A recorded scalar over several samples, and how far it may be off.

    Args:
        divergence: The recorded and the recomputed value.
        tolerance: What is a pass.
        slack: Gives the bound inside which a difference is precision.
        least_wrong: Gives, for less work, a larger difference than any that is precision.
        exact: The very value that a pass must have; None where any will do.
    """

    divergence: Divergence
    tolerance: Tolerance
    slack: Callable[[], float]
    least_wrong: Callable[[], float]
    exact: float | None = None


def summed_scalars(block: Block, one: Recorded, losses: SampleLosses) -> Iterator[Scalar]:
    """A scalar over the samples of a micro-batch, a rank, or the cohort, and its numerator."""
    output, name = one.output, one.output.field
    tolerance = block.tolerance(one.output.stage, name)
    samples = len(one.samples)
    denominators = losses.aggregates.of(name)
    by_batch = denominators.by_batch(output)
    total = losses.totals(one.samples, by_batch=by_batch)[name]
    divisor = denominators.divisor(output, one.samples)
    weight = abs(output.scale / divisor) or torch.finfo(torch.float64).tiny
    apart = losses.apart(one)

    def slack() -> float:
        same = torch.zeros(samples, dtype=torch.int64)
        errors = losses.total_errors(name, one.samples, by_batch=by_batch)
        own = float(scatter_sum_error(errors, same, 1).error)
        apart_error = losses.apart_error(one)
        return own + (apart_error / weight if apart_error else 0.0)

    def least() -> float:
        return least_wrong(block.settings.loss, losses, name, one.samples, by_batch=by_batch)

    narrow = plain_scalar(losses, one, losses.float32) if block.exact else (None, None)
    value = output.scale * (total / divisor + apart)
    pairs = [(name, output.value, value, weight, narrow[0])]
    if output.numerator is not None and name not in losses.of_batches:
        pairs.append((f"{name}.numerator", output.numerator, total, 1.0, narrow[1]))
    for field, recorded, recomputed, factor, exact in pairs:
        if recorded is None or (samples == 0 and recorded == 0.0):
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
        scaled = replace(tolerance, atol=tolerance.atol * min(1.0, factor))
        yield Scalar(
            divergence,
            scaled,
            lambda f=factor: f * slack(),  # type: ignore[misc]
            lambda f=factor: f * least(),  # type: ignore[misc]
            exact,
        )


def plain_scalar(losses: SampleLosses, one: Recorded, plain: PlainLosses) -> tuple[float, float]:
    """The bits of a scalar over several samples and of its numerator in one dtype and order.

    NaN where samples have no part of it.
    """
    output, name = one.output, one.output.field
    if name in losses.of_batches or losses.apart(one):
        return torch.nan, torch.nan
    denominators = losses.aggregates.of(name)
    by_batch = denominators.by_batch(output)
    shares = losses.aggregates.shares(name) if by_batch else None
    total = plain.total(name, one.samples, shares)
    divisor = denominators.divisor(output, one.samples)
    return plain.scaled(total, output.scale, divisor), float(total)


def _compare_sum(block: Block, one: Recorded, losses: SampleLosses) -> Look:
    look = Look()
    for scalar in summed_scalars(block, one, losses):
        found = compare_scalar(scalar.divergence, scalar.tolerance, scalar.slack, scalar.exact)
        look = look.merged(found)
    return look


def sample_scalars(
    block: Block, one: Recorded, losses: SampleLosses
) -> tuple[Tensor, Tensor, Callable[[], Compared]]:
    """One value a sample, recorded and recomputed: its masked mean, or with reduction sum the sum.

    Returns:
        (K,) float64 each, for the samples that the output covers, and what compares them.
    """
    output, name = one.output, one.output.field
    terms = losses.means[name]
    summed = output.reduction == "sum"
    exact = terms.numerator if summed else terms.mean
    scale = output.scale

    def slack(outside: Tensor) -> Tensor:
        samples = one.samples[outside]
        error = losses.errors[name].error[samples]
        return abs(scale) * (error * terms.denominator[samples] if summed else error)

    recorded, recomputed = sample_values(block, one), scale * exact[one.samples]

    def describe(at: int, old: float, new: float) -> Divergence:
        return block.sample_divergence(name, int(one.samples[at]), old, new)

    def compare() -> Compared:
        return compare_elements(
            recorded,
            recomputed,
            [0, len(recorded)],
            block.tolerance(one.output.stage, name),
            slack=slack,
            describe=describe,
            ranks=lambda at: block.ranks_of_samples(one.samples[at]),
            exact=losses.float32.samples(name, one.samples, output) if block.exact else None,
        )

    return recorded, recomputed, compare


def _compare_samples(block: Block, one: Recorded, losses: SampleLosses) -> Look:
    return sample_scalars(block, one, losses)[2]().looks[0]
