"""Metrics that trainings log beside their loss: each recomputed from the tokens of its samples."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

import numpy as np

from trajreplay.stages.block import Block
from trajreplay.stages.contract_checks.columns import Found, Ints, Together
from trajreplay.stages.contract_checks.definitions import INSPECTED, METRICS, THEN, Metric
from trajreplay.stages.outputs import Recorded, is_stated, recorded_outputs

# Metrics are logged in float32, and some from log-probs of half precision.
NEAR = 1e-3
_SCOPES = ("micro_batch", "rank", "global")


def columns_of_metrics(logged: Collection[str], stages: Collection[str]) -> tuple[str, ...]:
    """Columns that an audit reads beside those that other checks do.

    Args:
        logged: Names of the scalars that were recorded.
        stages: Stages that are recomputed.
    """
    audits = not {*_known(stages)}.isdisjoint(logged)
    clipped = "value_clipfrac" in logged and "loss.value" not in stages
    return (
        *(("entropy", "micro_batch_id") if audits else ()),
        *(("values", "old_values") if clipped else ()),
    )


def _known(stages: Collection[str]) -> Mapping[str, Metric]:
    return METRICS if "loss.policy" in stages else {**METRICS, **INSPECTED}


def audited(block: Block, one: Recorded) -> Metric | None:
    """The definition by which a recorded scalar is judged.

    Args:
        block: The cohorts.
        one: The scalar.

    Returns:
        None where nothing is known of such a scalar, the settings leave open what it is, or a
        column or a sample is not there.
    """
    output, metric = one.output, _known(block.stages).get(one.output.field)
    stated = output.value is not None and output.reduction == "mean" and is_stated(output)
    if metric is None or not stated or output.scope not in _SCOPES or not one.complete:
        return None
    there = block.packed.table.column_names
    if not metric.defined(block.settings) or not {*metric.reads(block.settings)} <= {*there}:
        return None
    return metric


def check_metrics(given: Together) -> Iterator[Found]:
    """Logged metrics that their definition does not give."""
    known = _known(given.stages)
    for index, cohort in enumerate(given.block.cohorts):
        logged = (one for entry in cohort.owners for one in entry.outputs if one.field in known)
        for stage in sorted({one.stage for one in logged}):
            for one in recorded_outputs(given.block, index, stage):
                metric = audited(given.block, one)
                if metric is not None:
                    yield from _judged(given, index, one, metric)


def _judged(given: Together, index: int, one: Recorded, metric: Metric) -> Iterator[Found]:
    settings, output = given.settings, one.output
    assert output.value is not None
    samples: Ints = one.samples.numpy()
    lengths = given.lengths[samples]
    owner = np.arange(len(samples)).repeat(lengths)
    first = given.offsets[:-1][samples] - np.concatenate([[0], np.cumsum(lengths)])[:-1]
    tokens = np.arange(len(owner)) + first[owner]
    trained = given.mask[tokens]
    if not trained.any():
        return  # what is taken over nothing is a matter of taste
    held = {
        name: given.tokens(column)[tokens].astype(np.float64)
        for name, column in zip(metric.needs, metric.reads(settings), strict=True)
    }
    counted = {name: values[trained] for name, values in held.items()}
    recorded = output.value / output.scale
    right = metric.of(settings, counted, owner[trained], _parts(given, index, one, samples))
    if _near(recorded, right):
        return
    bounded = METRICS["sampler_ratio_bounded"]
    others = {f"over masked tokens too ({metric.doc})": metric.of(settings, held, owner)}
    if metric.needs == THEN and bounded.defined(settings):
        truncated = bounded.of(settings, counted, owner[trained])
        others["of ratios after they were truncated"] = truncated
    known = next((what for what, values in others.items() if _near(recorded, values)), "")
    place = f"rank {one.entry.key.rank}"
    if output.micro_batch_id is not None:
        place += f" micro-batch {output.micro_batch_id}"
    message = (
        f"{output.field} of {place} is {recorded:.6g}, and the {metric.doc} is {right[0]:.6g}"
        f"{f': it was taken {known}' if known else ''}"
    )
    check = "metric.disagrees"
    yield index, given.of(index).finding(check, "warning", message, stage=output.stage)


def _parts(given: Together, index: int, one: Recorded, samples: Ints) -> list[Ints]:
    """What a scalar over a rank, or over all, may be a mean over: micro-batches, ranks."""
    if one.output.scope == "micro_batch":
        return []
    cohort, first = given.block.cohorts[index], given.packed.sample_bounds[index]
    ranks = given.packed.ranks[samples].astype(np.int64)
    found = []
    if given.has("micro_batch_id"):
        names = cohort.micro_batch_names[samples - first].tolist()
        pairs = list(zip(ranks.tolist(), names, strict=True))
        numbers = {pair: number for number, pair in enumerate(dict.fromkeys(pairs))}
        found.append(np.array([numbers[pair] for pair in pairs], np.int64))
    return [*found, ranks] if one.output.scope == "global" else found


def _near(recorded: float, values: tuple[float, ...]) -> bool:
    """Whether a recorded number is one of some; a NaN is a NaN."""
    if np.isnan(recorded):
        return bool(np.isnan(values).any())
    return any(
        recorded == value or abs(recorded - value) <= NEAR * max(abs(value), NEAR)
        for value in values
    )
