"""Whether sampler and trainer chose the same experts, by layer, and how far apart log-probs are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Unpack

import pyarrow as pa

from trajreplay.query.experts.agreement_report import AGREEMENT, AgreementReport
from trajreplay.query.experts.kept_tokens import KeptTokens
from trajreplay.query.experts.pairs import PairedReading
from trajreplay.query.manifest.catalog import Catalog
from trajreplay.query.mismatch.pair import Pair
from trajreplay.query.mismatch.pairing import Pairing, usable
from trajreplay.query.mismatch.report import MismatchFinding
from trajreplay.query.selecting.conditions import Paired
from trajreplay.query.selecting.selection import Selection
from trajreplay.query.tables.connection import connect_empty, interruptible
from trajreplay.schema.errors import QueryError

DEFAULT_THRESHOLD = 0.5


def route_agreement(
    catalog: Catalog,
    selection: Selection | None = None,
    *,
    threshold: float = DEFAULT_THRESHOLD,
    **paired: Unpack[Paired],
) -> AgreementReport:
    """Hold the experts that the sampler chose against those that the trainer chose.

    A token counts where its loss mask is 1 and, as in `mismatch`, no other weights are known to
    have sampled it; in a layer where one side has no route (-1) it does not. The choices are
    those at the position that predicts it. The capture of a step is read where one holds the
    trainer's choices, with what it lacks of the sampler's taken from the rollout; else rollouts.

    Args:
        catalog: The lake.
        selection: Which samples; all if omitted.
        threshold: |d| beyond which tokens are counted, in nats.
        paired: As of `trajreplay.query.mismatch.Pairing`; with the pair of log-probs go the
            choices of the same forward pass: old_experts with old_log_probs, experts with
            log_probs.

    Returns:
        One row a layer of each run, and findings.

    Raises:
        QueryError: The selection is wrong, or holds nothing to compare.
        DatasetError: A file is not what its entry says, or a column is a copy of the other.
    """
    if not 0 <= threshold < float("inf"):
        raise QueryError(f"the threshold is {threshold}, expected a number of nats from 0 on")
    pairing = Pairing(**paired)
    columns = Pair.parse(pairing.pair)
    chosen = pairing.chosen(catalog, selection)
    total, done = sum(map(len, chosen.runs.values())), 0
    rows: list[dict[str, Any]] = []
    findings: list[MismatchFinding] = []
    levels: dict[str, str] = {}
    for run_id, selected in chosen.runs.items():
        reading = PairedReading(catalog, columns, pairing.any_version)
        levels[run_id] = reading.level([selected.sets[one] for one in selected.cohorts])
        left_out: list[str] = []
        with (
            connect_empty(
                catalog.store.folder, pairing.memory_bytes, pairing.threads
            ) as connection,
            interruptible(connection) as run,
        ):
            kept = KeptTokens(connection, run)
            count = pairing.counting(done, total)
            for one in usable(selected, levels[run_id], left_out, count):
                for tokens in reading.tokens(one):
                    kept.add(tokens)
            if not kept.tokens:
                raise _nothing(run_id, levels[run_id], reading, left_out)
            mine = [{"run_id": run_id, **row} for row in kept.rows(threshold)]
        rows += mine
        if not mine[0]["tokens"]:
            message = (
                f"nothing is compared: of none of its {kept.tokens} tokens do both sides have a "
                "route, each is -1 on one of them at least"
            )
            findings.append(MismatchFinding("error", run_id, message))
        findings += _findings(run_id, reading, kept, left_out)
        done += len(selected)
    pairing.counting(total, total)(0)
    trainer, sampler = PairedReading(catalog, columns).names
    return AgreementReport(
        (trainer, sampler),
        pairing.pair,
        levels,
        pa.Table.from_pylist(rows, schema=AGREEMENT),
        threshold,
        (*findings, *chosen.findings()),
    )


def _nothing(
    run_id: str, level: str, reading: PairedReading, left_out: Sequence[str]
) -> QueryError:
    why = [f"no {level} that is selected holds a token of both"]
    if reading.samples_without:
        why.append(f"{reading.samples_without} samples lack choices or log-probs of a side")
    if reading.of_other_version:
        why.append(f"{reading.of_other_version} tokens were sampled by other weights")
    if left_out:
        why.append(f"{len(left_out)} incomplete {level}s were left out")
    trainer, sampler = reading.names
    return QueryError(
        f"run {run_id!r}: no routes to compare: {'; '.join(why)}",
        hint=f"Both sides are captured with capture.routes: {trainer!r} and {sampler!r}.",
        compared=0,
    )


def _findings(
    run_id: str, reading: PairedReading, kept: KeptTokens, left_out: Sequence[str]
) -> Iterator[MismatchFinding]:
    for severity, text in reading.origins.remarks():
        yield MismatchFinding(severity, run_id, text)
    if kept.odd:
        message = f"the difference of {kept.odd} valid tokens is not finite: left out"
        yield MismatchFinding("error", run_id, message)
    if reading.samples_without:
        message = f"{reading.samples_without} samples lack choices or log-probs of a side"
        yield MismatchFinding("warning", run_id, message)
    if reading.of_unknown_version:
        message = (
            f"which weights recomputed the log-probs is stated and which sampled "
            f"{reading.of_unknown_version} of the valid tokens is not: whether they are the same "
            "is not known"
        )
        yield MismatchFinding("warning", run_id, message)
    if reading.of_other_version:
        message = (
            f"{reading.of_other_version} valid tokens are left out: other weights sampled them "
            "than recomputed them"
        )
        yield MismatchFinding("info", run_id, message)
    if left_out:
        message = f"{len(left_out)} left out as incomplete, the first: {left_out[0]}"
        yield MismatchFinding("warning", run_id, message)
