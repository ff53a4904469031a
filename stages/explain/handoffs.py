"""Explaining a handoff: what became of a column between its rollout and the step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from trajreplay.query import Cohort
from trajreplay.stages.cohorts.checks import source_pairs
from trajreplay.stages.cohorts.cohort import LoadedCohort
from trajreplay.stages.cohorts.packed import list_lengths, packed_values
from trajreplay.stages.cohorts.sources import TWINS, Source, Sources
from trajreplay.stages.explain.explanation import Explanation
from trajreplay.stages.explain.findings import named
from trajreplay.stages.explain.residual import without_own
from trajreplay.stages.explain.target import proves
from trajreplay.stages.explain.trying import handed_by
from trajreplay.stages.faults import Fault
from trajreplay.stages.faults.fault import Handed
from trajreplay.stages.report import CohortReport

_FACTS = (
    *("group_id", "trajectory_id", "fragment_index", "agent_id", "episode_id", "turns"),
    *("truncated", "tokens", "response_length", "total_length"),
)
_NUMBERS = tuple(name for name in TWINS if name not in _FACTS)


def explain_handoffs(
    cohort: LoadedCohort,
    report: CohortReport,
    sources: Sources,
    place: Cohort,
    faults: Sequence[Fault],
) -> Iterator[tuple[str, Explanation]]:
    """Search what reproduces each column that a step consumed otherwise than it was recorded.

    Args:
        cohort: The step, whole.
        report: What a replay found of it.
        sources: Its rollouts.
        place: Its coordinates.
        faults: The catalogue.

    Yields:
        Each column that both sides hold, and what is known of it.
    """
    broken = {
        one.check.removeprefix("handoff.") for one in report.findings if one.stage == "sample"
    }
    names = [name for name in _NUMBERS if name in broken & {*cohort.table.column_names}]
    for given in _handed(cohort, sources, names):
        found = explain_column(given, "sample", place, faults)
        if found.differ:
            yield given.column, found


def explain_column(
    given: Handed, stage: str, place: Cohort, faults: Sequence[Fault]
) -> Explanation:
    """Search what made a column of what it should be.

    Args:
        given: Both sides of it.
        stage: The stage at which it shows.
        place: The cohort.
        faults: The catalogue.
    """
    per_token = len(given.offsets) - 1 != len(given.origin)
    found = Explanation(place, stage, "tokens" if per_token else "samples")
    differs = ~_equal(given.recorded, given.origin)
    found.differ, found.of = int(differs.sum()), len(differs)
    gaps = (given.recorded - given.origin).abs()[differs]
    found.misses_by = float(gaps.max()) if len(gaps) else 0.0
    for fault in faults:
        if fault.hands is None or fault.stage != stage:
            continue
        for values, detail, taken in handed_by(fault, given, found.failed):
            if not proves(taken, found.differ):
                continue
            if len(values) == len(given.recorded) and bool(_equal(given.recorded, values).all()):
                said = f"{given.column}: {detail}"
                if stage == "sample" and not detail.startswith("the "):
                    said = f"{given.column} of the rollout {detail}"
                found.hypotheses.append(named(fault, fault.says(said), found.of))
                break
    if not found.hypotheses:
        found.residual = _shape(given, differs)
        found.kind = frozenset(map(without_own, found.residual))
        found.note = ""
    return found


def _shape(given: Handed, differs: Tensor) -> list[str]:
    owner = torch.arange(len(given.offsets) - 1)
    if len(owner) != len(differs):
        owner = owner.repeat_interleave(given.offsets.diff())
    samples = len(torch.unique(owner[differs]))
    found = [f"in {given.column} of {samples} of {len(given.offsets) - 1} samples"]
    if len(given.mask) == len(differs) and not bool((differs & given.mask).any()):
        found.append("only at masked tokens")
    return found


def _equal(one: Tensor, other: Tensor) -> Tensor:
    """Whether values are equal as float32 holds them, NaN to NaN."""
    one, other = one.float(), other.float()
    return (one == other) | (one.isnan() & other.isnan())


def _handed(cohort: LoadedCohort, sources: Sources, names: Sequence[str]) -> Iterator[Handed]:
    """The columns on both sides, over all rollouts that the step consumed from."""
    table, run_id = cohort.table, cohort.report.run_id
    attempts = table["source_attempt"].to_numpy()
    rollouts = table["source_rollout_id"].to_numpy()
    matched: list[tuple[Source, np.ndarray, np.ndarray]] = []
    for attempt, rollout in sorted(source_pairs(table)):
        source = sources.find(run_id, attempt, rollout)
        if isinstance(source, str):
            continue  # what the others hold is explained all the same
        mine = ((attempts == attempt) & (rollouts == rollout)).nonzero()[0]
        theirs = source.rows_of(table["sample_id"].take(pa.array(mine)))
        matched.append((source, mine[theirs >= 0], theirs[theirs >= 0]))
    earlier = _earlier(cohort, [mine for _, mine, _ in matched])
    for name in names:
        sides = _column(table, matched, name, name)
        if sides is None:
            continue
        recorded, origin, offsets = sides
        others: dict[str, Tensor] = {}
        owns: dict[str, Tensor] = {}
        for other in (*_NUMBERS, "log_probs"):
            if other == name:
                continue
            pair = _column(table, matched, name, other)
            if pair is not None and len(pair[1]) == len(recorded):
                others[other] = pair[1]
            if other in table.column_names and not table[other].null_count:
                own = _column(table, matched, other, name)
                if own is not None and len(own[0]) == len(recorded):
                    owns[other] = own[0]
        mask = others.get("loss_mask")
        per_token = len(offsets) - 1 != len(recorded)
        yield Handed(
            name,
            recorded,
            origin,
            offsets,
            mask != 0 if mask is not None and per_token else torch.ones(len(recorded)) != 0,
            others,
            owns,
            earlier={
                words: values for words, values in earlier.items() if len(values) == len(recorded)
            },
        )


def _earlier(cohort: LoadedCohort, rows: list[np.ndarray]) -> dict[str, Tensor]:
    """What was captured before of the samples in some rows of a step, by words."""
    if not rows:
        return {}
    lengths = cohort.table["response_length"].to_numpy()
    chosen = np.concatenate(rows)
    begins = np.concatenate([[0], np.cumsum(lengths)])[chosen]
    counts = lengths[chosen]
    inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    tokens = torch.from_numpy(np.repeat(begins, counts) + inside).long()
    return {
        f"{name} of {when}": values[tokens]
        for (name, when), values in cohort.earlier.items()
        if when != "the rollout"  # which the column is held against
    }


def _column(
    table: pa.Table,
    matched: list[tuple[Source, np.ndarray, np.ndarray]],
    mine_name: str,
    their_name: str,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """A column of the step and one of its rollouts, of samples whose lengths agree."""
    parts: list[tuple[Tensor, Tensor, np.ndarray]] = []
    for source, mine, theirs in matched:
        if their_name not in source.table.column_names:
            return None
        ours = table[mine_name].take(pa.array(mine))
        other = source.table[their_name].take(pa.array(theirs))
        if ours.null_count or other.null_count:
            return None
        if pa.types.is_list(ours.type) != pa.types.is_list(other.type):
            return None
        if not pa.types.is_list(ours.type):
            values = (
                torch.from_numpy(np.array(one.to_numpy(), np.float64)) for one in (ours, other)
            )
            parts.append((*values, np.ones(len(mine), np.int64)))  # type: ignore[arg-type]
            continue
        lengths, there = list_lengths(ours), list_lengths(other)
        alike = pa.array((lengths == there).nonzero()[0])
        pair = (packed_values(one.take(alike), np.float64) for one in (ours, other))
        parts.append((*pair, lengths[lengths == there]))
    if not parts:
        return None
    counts = np.concatenate([one[2] for one in parts])
    offsets = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]))
    return torch.cat([one[0] for one in parts]), torch.cat([one[1] for one in parts]), offsets
