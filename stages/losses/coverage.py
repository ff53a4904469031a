"""Whether the recorded scalars of a loss verify it: all of them, for every sample, as they say."""

from __future__ import annotations

from torch import Tensor

from trajreplay.schema.contracts import stage_named
from trajreplay.schema.settings import LOSS_TERMS
from trajreplay.stages.cohorts.cohort import LoadedCohort
from trajreplay.stages.compose.aggregates import Aggregates, aggregation_of
from trajreplay.stages.outputs import Recorded, is_stated
from trajreplay.stages.report import Finding

POLICY = "loss.policy"
# Scopes over several samples, in words.
_OVER = {"global": "the cohort", "rank": "a rank", "micro_batch": "a micro-batch"}
# What the terms are that a producer may say nothing of.
_TERMS = {
    "use_kl_loss": "a KL to the reference in the loss",
    "tis": "weights for the sampler's other probabilities",
    "opsm": "a mask of off-policy samples",
    "opd": "a KL to a teacher",
    "per_token": "one mean over all tokens instead of one a response",
}


def name_unstated_terms(cohort: LoadedCohort) -> None:
    """Put first, beside a divergence, which terms of the loss the producer says nothing of."""
    unstated = [name for name in LOSS_TERMS if getattr(cohort.settings.loss, name) is None]
    if unstated:
        cohort.report.findings.insert(
            0,
            Finding(
                "settings.unstated",
                "warning",
                "the producer does not say whether these parts of the loss were in force: "
                f"{', '.join(f'{name} ({_TERMS[name]})' for name in unstated)}. The loss is "
                "recomputed without them, and one that was in force explains a difference; "
                f"settings say it, as loss.{unstated[0]}=false does",
                stage=POLICY,
            ),
        )


def judge_coverage(
    cohort: LoadedCohort,
    stage: str,
    found: list[Recorded],
    aggregates: Aggregates,
    every: Tensor,
) -> None:
    """A loss of which a scalar is missing, unstated or not comparable is not verified.

    Args:
        cohort: The cohort, whose last result is that of the stage.
        stage: The stage.
        found: Its recorded outputs of the stage.
        aggregates: What means over packed samples divide by.
        every: (K,) int64. The packed samples of the cohort.
    """
    needed = cohort.abilities[stage].writes
    result = cohort.report.stages[-1]
    stated = [one for one in found if is_stated(one.output)]
    comparable = [one for one in stated if one.complete and one.output.field in needed]
    if not cohort.whole:
        if not result.compared and result.verdict != "diverged":
            result.verdict, result.isolated, result.chained = "skipped", None, None
            result.message = "needs the whole cohort; --closure cohort asks for it"
        elif left := len(stated) - len(comparable):
            note = f"{left} scalars were not compared: they need the whole cohort"
            result.message = f"{result.message}; {note}" if result.message else note
        return
    odd = _odd_denominators(cohort, stated, aggregates, every)
    if odd and result.verdict != "diverged":
        result.verdict, result.message = "unverified", odd[0]
        return
    places = _places(comparable)
    missing = [name for name in needed if not _covers(places.get(name, set()), cohort)]
    if not missing or result.verdict == "diverged":
        return
    result.verdict = "unverified"
    known = stage_named(stage).scalars
    unknown = sorted({one.output.field for one in found} - set(known))
    unclear = {one.output.field for one in found} - {one.output.field for one in stated}
    unstated = sorted(unclear & set(missing))
    absent = ", ".join(name for name in missing if name not in unstated)
    result.message = "; ".join(
        text
        for text in (
            f"not recorded over the whole cohort: {absent}; give them with capture.expected"
            if absent
            else "",
            f"recorded and not known: {', '.join(unknown)}" if unknown else "",
            f"recorded without scope and reduction: {', '.join(unstated)}" if unstated else "",
        )
        if text
    )


def _odd_denominators(
    cohort: LoadedCohort, stated: list[Recorded], aggregates: Aggregates, every: Tensor
) -> list[str]:
    """Scalars divided by a number that counts nothing of theirs: nothing says that it is right."""
    odd: list[str] = []
    for one in stated:
        output = one.output
        loss = aggregation_of(cohort.settings, output.stage, output.field)
        denominators = aggregates.of(output.field)
        noun = "trained tokens" if loss.aggregation == "token-mean" else "samples"
        by_rows = (loss.denominator_rows, loss.fragments) == ("all", "own")
        by_rows = by_rows and loss.aggregation.startswith("seq-mean")
        divided = output.denominator if output.values is None else None
        if divided is not None:
            counts: set[float | None] = {*denominators.known(output, one.samples, every)}
            if by_rows and not denominators.by_batch(output):
                rows = sum(cohort.rows.values())
                counts |= {cohort.owners[0].cohort_size, rows, len(one.samples)}
            if divided not in counts:
                odd.append(
                    f"{output.field} was divided by {divided:g}, which is no count of its {noun}: "
                    f"its scope holds {denominators.count(one.samples):g}, the cohort "
                    f"{denominators.count(every):g}"
                )
    _note_reductions(cohort, stated)
    return odd


def _note_reductions(cohort: LoadedCohort, stated: list[Recorded]) -> None:
    """Say which scalars become one number otherwise than the settings have it."""
    settled = cohort.settings.loss.batch_reduction
    found: dict[str, str] = {}
    for output in (one.output for one in stated):
        over = _OVER.get(output.scope or "")
        # A sum times a factor below 1 may be a part of a mean, or of an accumulated sum.
        if output.scope != "global" and output.reduction == "sum" and output.scale < 1.0:
            continue
        if over is not None and (output.reduction == "sum") != (settled == "sum"):
            message = (
                f"{output.field} is stated a {output.reduction} over {over}, where "
                f"loss.batch_reduction is {settled!r}"
            )
            found.setdefault(message, output.stage)
    cohort.report.findings += [
        Finding("loss.reduction", "warning", message, stage=stage)
        for message, stage in found.items()
    ]


_Place = tuple[int, str | None, str | None]  # the rank, scope and micro-batch of a scalar


def _places(stated: list[Recorded]) -> dict[str, set[_Place]]:
    """By scalar, over which parts of a cohort it is recorded."""
    found: dict[str, set[_Place]] = {}
    for one in stated:
        output = one.output
        place = one.entry.key.rank, output.scope, output.micro_batch_id
        found.setdefault(output.field, set()).add(place)
    return found


def _covers(places: set[_Place], cohort: LoadedCohort) -> bool:
    """Whether the scopes of a scalar hold every sample of the cohort."""
    if any(scope == "global" for _, scope, _ in places):
        return True
    return all(
        {(rank, "rank", None), (rank, "sample", None), (rank, "micro_batch", batch)} & places
        for (rank, batch), rows in cohort.micro_batches.items()
        if rows
    )
