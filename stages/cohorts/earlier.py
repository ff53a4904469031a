"""Log-probs that earlier steps, and the rollouts, captured of the samples that a step consumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from trajreplay.query.files.reading import read_columns
from trajreplay.query.manifest.capture_sets import CaptureSets
from trajreplay.query.manifest.catalog import Cohort, cohort_of
from trajreplay.schema.columns import has_column
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.lists import Int64s
from trajreplay.schema.tables import STEPS
from trajreplay.stages.cohorts.checks import source_pairs
from trajreplay.stages.cohorts.cohort import LoadedCohort
from trajreplay.stages.cohorts.packed import list_lengths, packed_values
from trajreplay.stages.cohorts.sources import Source, Sources

LOG_PROBS = ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs")
_NAMES = ("source_attempt", "source_rollout_id", "sample_id")
# Earlier steps that are looked at: the last ones.
_STEPS = 16
# A column, and when it was captured, in words.
Earlier = dict[tuple[str, str], Tensor]


def earlier_log_probs(cohort: LoadedCohort, sets: CaptureSets, sources: Sources) -> Earlier:
    """By column and time, the log-probs of the samples of a step as they were captured before it.

    Args:
        cohort: The step, whole.
        sets: The visible capture sets.
        sources: The rollouts.

    Returns:
        (N,) float64 each: of the rollouts, of the first and of the last earlier step that consumed
        each sample. What lacks a sample, or holds one of another length, is left out; so is what
        equals the step's own column.
    """
    report = cohort.report
    if report.step_id is None or cohort.own_ids:
        return {}
    place = Cohort(report.run_id, report.attempt, report.rollout_id, report.step_id)
    found: Earlier = {}
    steps = _earlier_steps(cohort, place, sets)
    times = [(steps[::-1], "the step before that consumed each sample")]
    if len(steps) > 1:
        times.append((steps, "the first step that consumed each sample"))
    tables = {one: _rows(one, sets) for one in steps}
    for order, words in times:
        said = (
            f"rollout {order[0].rollout_id} step {order[0].step_id}" if len(steps) == 1 else words
        )
        for name, values in _taken(cohort.table, [tables[one] for one in order]):
            found.setdefault((name, said), values)
    for name, values in _taken(cohort.table, list(_of_rollouts(cohort, sources))):
        found.setdefault((name, "the rollout"), values)
    kept: Earlier = {}
    for (name, when), values in found.items():
        own = cohort.table[name] if has_column(cohort.table, name) else None
        known = [one for (other, _), one in kept.items() if other == name]
        if own is not None and not own.null_count:
            known.append(packed_values(own, np.float64))
        if not any(torch.equal(one, values) for one in known):
            kept[name, when] = values
    return kept


def _earlier_steps(cohort: LoadedCohort, place: Cohort, sets: CaptureSets) -> list[Cohort]:
    """The steps before this one that consumed from its rollouts, in order."""
    catalog = sets.catalog
    found = {
        cohort_of(key)
        for attempt, rollout in source_pairs(cohort.table)
        for key in catalog.consumers.get(Cohort(place.run_id, attempt, rollout, None), ())
    }
    earlier = [one for one in found if one in sets and one.order < place.order]
    return sorted(earlier, key=lambda one: one.order)[-_STEPS:]


def _rows(step: Cohort, sets: CaptureSets) -> pa.Table:
    """The samples of a step and their log-probs; none of context-parallel shards."""
    catalog = sets.catalog
    empty = pa.schema([(one, STEPS[one].type) for one in (*_NAMES, *LOG_PROBS)]).empty_table()
    parts = [empty]
    for entry in sets[step].owners:
        if entry.parallel.context_size > 1:
            continue
        try:
            part = read_columns(catalog.store, entry, STEPS, [*_NAMES, *LOG_PROBS])
        except DatasetError:  # what is damaged is refused where it is replayed
            continue
        parts.append(part.cast(empty.schema))
    return pa.concat_tables(parts)


def _of_rollouts(cohort: LoadedCohort, sources: Sources) -> Iterator[pa.Table]:
    for attempt, rollout_id in sorted(source_pairs(cohort.table)):
        source = sources.find(cohort.report.run_id, attempt, rollout_id)
        if isinstance(source, Source):
            names = [one for one in LOG_PROBS if has_column(source.table, one)]
            rows = source.table.select(["sample_id", *names])
            for name, value in zip(_NAMES, (attempt, rollout_id), strict=False):
                own = pa.array(np.full(len(rows), value), STEPS[name].type)
                rows = rows.append_column(name, own)
            yield rows


def _taken(table: pa.Table, given: Sequence[pa.Table]) -> Iterator[tuple[str, Tensor]]:
    """The log-probs of all samples of a step, each from the first of some tables that holds it."""
    wanted = _keys(table)
    lengths = table["response_length"].to_numpy()
    for name in LOG_PROBS:
        parts = [
            one.filter(pc.is_valid(one[name])).select([*_NAMES, name])
            for one in given
            if has_column(one, name)
        ]
        if not parts:
            continue
        held = pa.concat_tables(parts)
        rows = pc.index_in(wanted, value_set=_keys(held))
        if rows.null_count or not len(rows):
            continue
        values = held[name].take(rows)
        if np.array_equal(_lengths(values), lengths):
            yield name, packed_values(values, np.float64)


def _keys(rows: pa.Table) -> pa.Array:
    """What tells samples apart: the rollout that each is of, and its id."""
    texts = [rows[name].cast(pa.string()) for name in _NAMES]
    return pc.binary_join_element_wise(*texts, "/").combine_chunks()


def _lengths(values: pa.ChunkedArray) -> Int64s:
    return list_lengths(pa.chunked_array([values.combine_chunks()]))
