"""Values of steps computed from what was captured, which count before what a heartbeat tells."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import chain
from typing import cast

from trajreplay.query import Catalog, Selection, mismatch, run_sql
from trajreplay.query.mismatch.keys import Step
from trajreplay.schema.errors import QueryError
from trajreplay.stages.gate.heartbeats import Values

StepPlace = tuple[int, int]  # rollout and step
OF_MISMATCH = (
    "valid_tokens",
    "over_0_5",
    "over_1_0",
    "abs_delta_max",
    "abs_delta",
    "generation_kl",
)
MISMATCH_ERRORS = "mismatch_errors"  # why the statistics do not mean what they say
MISMATCH_NOTES = "mismatch_notes"  # what they leave open of the two columns
EQUAL_TOKENS = "equal_tokens"  # of the valid tokens, those in which trainer and sampler are equal
OF_OTHER_VERSION = "of_other_version"  # valid tokens that the statistics leave out
# The spread of a group is that of its samples in the step; advantages count on valid tokens.
_SIGNAL = """
WITH told AS (
  SELECT rollout_id, step_id, source_attempt, source_rollout_id, group_id, raw_reward, truncated,
         list_max(list_transform(list_zip(advantages, loss_mask),
           lambda one: CASE WHEN one[2] = 0 THEN 0.0 ELSE abs(one[1]) END)) AS advantage,
         advantages IS NULL AS untold
  FROM samples WHERE step_id IS NOT NULL AND {where}
), spreads AS (
  SELECT rollout_id, step_id, max(spread) AS spread, bool_or(untold) AS untold FROM (
    SELECT rollout_id, step_id, max(raw_reward) - min(raw_reward) AS spread,
           count(raw_reward) < count(*) OR group_id IS NULL AS untold
    FROM told GROUP BY rollout_id, step_id, source_attempt, source_rollout_id, group_id
  ) GROUP BY rollout_id, step_id
)
SELECT rollout_id, step_id,
       CASE WHEN NOT any_value(spreads.untold) THEN any_value(spread) END AS reward_std,
       CASE WHEN NOT bool_or(told.untold) THEN coalesce(max(advantage), 0) END
         AS advantage_abs_max,
       CASE WHEN count(truncated) = count(*) THEN avg(truncated::INT) END AS truncation_rate
FROM told JOIN spreads USING (rollout_id, step_id)
GROUP BY rollout_id, step_id"""
# Of the widest scope at which it was recorded; of several the one furthest from 0, NaN if one is.
_LOSS = """
SELECT rollout_id, step_id, arg_max(value, (own = widest, abs(value))) AS loss
FROM (
  SELECT *, max(own) OVER (PARTITION BY rollout_id, step_id) AS widest
  FROM (
    SELECT *, CASE scope WHEN 'global' THEN 3 WHEN 'rank' THEN 2 WHEN 'micro_batch' THEN 1
                         ELSE 0 END AS own
    FROM outputs
    WHERE kind = 'step' AND stage = 'loss.policy' AND field = 'loss' AND {where}
  )
) WHERE own = widest GROUP BY rollout_id, step_id"""

_STATEMENTS = {"signal": _SIGNAL, "loss": _LOSS}
# The mismatch as it is read without the tokens of other weights, and with them.
MISMATCH, MISMATCH_ANY_VERSION = "mismatch", "mismatch_any_version"
SOURCES = (*_STATEMENTS, MISMATCH, MISMATCH_ANY_VERSION)


def captured_steps(
    catalog: Catalog,
    run_id: str,
    attempt: int,
    only: tuple[int, int | None] | None = None,
    *,
    reads: Collection[str],
) -> dict[StepPlace, Values]:
    """What the step captures of one attempt say, by rollout and step.

    A step of which a capture is missing or dropped is there without values. What the mismatch has
    stands under the name of its source; it lacks values where a sample lacks one of the log-probs.

    Args:
        catalog: The lake.
        run_id: The run.
        attempt: The attempt; nothing of what it continues is taken.
        only: One rollout and step; all of the attempt if omitted.
        reads: Which of SOURCES are wanted.

    Raises:
        DatasetError: A file is not what its entry says, or a column is a copy of the other.
        QueryError: A step says what cannot be summed up.
    """
    found: dict[StepPlace, Values] = {}
    keys = catalog.by_attempt.get((run_id, attempt), ())
    wanted = [key for key in keys if key.kind == "step" and only in (None, key[3:5])]
    for key in wanted:  # a step of which nothing can be said counts, as one without values
        found.setdefault(cast(StepPlace, key[3:5]), {})
    if not wanted:
        return found
    where = f"attempt = {attempt}"
    if only is not None:
        where += f" AND rollout_id = {only[0]} AND step_id = {only[1]}"
    for text in (text for name, text in _STATEMENTS.items() if name in reads):
        rows = run_sql(catalog, text.format(where=where), run=run_id, attempt=attempt)
        for row in rows.arrow().to_pylist():
            place = row.pop("rollout_id"), row.pop("step_id")
            found.setdefault(place, {}).update(row)
    selection = Selection(run=run_id, attempt=attempt, where=where)
    for source in (one for one in (MISMATCH, MISMATCH_ANY_VERSION) if one in reads):
        any_version = source == MISMATCH_ANY_VERSION
        for place, values in _mismatch(catalog, selection, any_version=any_version).items():
            found.setdefault(place, {})[source] = values
    return found


def _mismatch(
    catalog: Catalog, selection: Selection, *, any_version: bool
) -> dict[StepPlace, Values]:
    """The statistics by step, what is wrong with them, and how many tokens they leave out."""
    others: Mapping[Step, int]
    found: dict[StepPlace, Values] = {}
    try:
        report = mismatch(catalog, selection, by=["step"], level="step", any_version=any_version)
    except QueryError as error:
        if error.facts.get("compared") != 0:
            raise
        others = error.facts["of_other_version"]  # no step holds the pair, or none of one version
    else:
        (others,), (without,) = report.of_other_version.values(), report.without.values()
        odd = [one.message for one in report.findings if one.severity == "error"]
        odd += [
            f"{column} is interpolated in some captures, expected to be recomputed"
            for column in chain.from_iterable(report.interpolated.values())
        ]
        notes = list(chain.from_iterable(report.unproven.values()))
        lacking = {step[2:] for step in without}
        for row in report.table.to_pylist():
            place = row["rollout_id"], row["step_id"]
            if place not in lacking:
                values = {name: row[name] for name in (*OF_MISMATCH, EQUAL_TOKENS)}
                found[place] = values | {MISMATCH_ERRORS: odd, MISMATCH_NOTES: notes}
    for step, count in others.items():
        found.setdefault(cast(StepPlace, step[2:]), {})[OF_OTHER_VERSION] = count
    return found
