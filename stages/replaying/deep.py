"""Contract checks over a whole lake, for a validation that looks at values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from trajreplay.query import Catalog, Cohort, Selection, select
from trajreplay.schema.columns import has_column
from trajreplay.schema.errors import TrajReplayError
from trajreplay.schema.tables import SAMPLE_TABLES
from trajreplay.stages.cohorts.cohort import LoadedCohort
from trajreplay.stages.cohorts.not_finite import Samples, harmful_columns
from trajreplay.stages.cohorts.sources import FILLED
from trajreplay.stages.contract_checks import check_contracts
from trajreplay.stages.replaying.judge import DEFAULT_MEMORY_BYTES
from trajreplay.stages.replaying.whole import WholeCohorts, block_of
from trajreplay.stages.report import Finding
from trajreplay.stages.rewards.group_sizes import group_size_looks, odd_group
from trajreplay.stages.sample.samples import judge_samples

UNCHECKED = "contracts.unchecked"
# What a replay says of itself, or a validation by another name.
_OTHERWISE = frozenset(
    {
        *("completeness", "copy", "handoff", "kernel", "outputs.not-compared", "refused"),
        *("settings.not-read", "tolerance", "non-finite.unread", "non-finite.masked"),
    }
)


class Checked(NamedTuple):
    """What was found, and of which run or cohort."""

    place: str
    finding: Finding


def contract_findings(
    catalog: Catalog, *, memory_bytes: int = DEFAULT_MEMORY_BYTES
) -> Iterator[Checked]:
    """Check every cohort as a replay does before its arithmetic, without recomputing anything.

    Args:
        catalog: The lake.
        memory_bytes: What the samples of one cohort may take in memory.

    Yields:
        What is wrong; and, as `contracts.unchecked`, each run and cohort that was not looked at:
        an error where it was to be, else an info.
    """
    for run_id in sorted({cohort.run_id for cohort in catalog.by_cohort}):
        try:
            whole = WholeCohorts(
                catalog, select(catalog, Selection(run=run_id)), memory_bytes=memory_bytes
            )
            turns = [place for place, _ in whole.turns()]
        except TrajReplayError as error:
            yield Checked(f"run {run_id!r}", _unchecked(error.message))
            continue
        for place in turns:
            yield from (Checked(str(place), one) for one in _of_cohort(whole, place))


def _unchecked(why: str) -> Finding:
    return Finding(UNCHECKED, "error", f"was not checked: {why}")


def _of_cohort(whole: WholeCohorts, place: Cohort) -> Iterator[Finding]:
    try:
        cohort = whole.load(place)
        if not isinstance(cohort, LoadedCohort):
            why = "nothing that it declares can be recomputed"
            info = Finding(UNCHECKED, "info", f"was not checked: {why}")
            yield _unchecked(cohort.refusal) if cohort.refusal else info
            return
        if not cohort.table.num_rows:
            return
        own = _as_captured(cohort)
        if "sample" in cohort.stages:
            judge_samples(own, whole.sources)
        found = [one for one in cohort.report.findings if one.check not in _OTHERWISE]
        found += [*_not_finite(own), *_sizes(cohort), *check_contracts(block_of(cohort))[0]]
    except TrajReplayError as error:
        yield _unchecked(error.message)
        return
    if cohort.report.refusal:
        yield _unchecked(cohort.report.refusal)
    yield from found


def _as_captured(cohort: LoadedCohort) -> LoadedCohort:
    """A step without the columns that it was given by its rollouts, which answer for them."""
    held = {name for one in cohort.owners for file in one.files for name in file.columns}
    given = [one for one in FILLED if has_column(cohort.table, one) and one not in held]
    return replace(cohort, table=cohort.table.drop_columns(given)) if given else cohort


def _not_finite(cohort: LoadedCohort) -> Iterator[Finding]:
    """NaN and infinities of every column, whether a stage reads it or not."""
    table = SAMPLE_TABLES["rollout" if cohort.report.step_id is None else "step"]
    names = [one for one in harmful_columns(table, cohort.settings) if one not in cohort.finite]
    used = {name for one in cohort.abilities.values() for name in (*one.reads, *one.writes)}
    for samples in map(Samples, filter(None, (cohort.table, cohort.incomplete))):
        for odd in filter(None, map(samples.not_finite, names)):
            diverges = not odd.masked and ("sample" in cohort.stages or odd.column in used)
            yield Finding(
                "non-finite.masked" if odd.masked else "non-finite.trained",
                "error" if diverges else "warning",
                f"{odd.column} holds {odd.count} NaN or infinite values, {odd.trained} of them "
                f"trained, first {odd.value}",
                sample_id=odd.sample_id,
                token=odd.token,
            )


def _sizes(cohort: LoadedCohort) -> Iterator[Finding]:
    """Groups of another size than the settings say, where rewards are normalised over them."""
    normalised = "reward.post_process" in cohort.stages
    if normalised and cohort.settings.reward.grouping != "none":
        odd = odd_group(group_size_looks(block_of(cohort), None)[0])
        yield from () if odd is None else (odd,)
