"""Whether a step holds the whole batch that a statistic is of, and each trajectory with it."""

from __future__ import annotations

from collections.abc import Callable, Collection

import pyarrow as pa
import pyarrow.compute as pc

from trajreplay.query.manifest.catalog import Cohort
from trajreplay.schema.columns import has_column
from trajreplay.schema.settings import RewardSettings, Settings
from trajreplay.stages.capability import Ability, over_batches, over_trajectories
from trajreplay.stages.cohorts.checks import source_pairs
from trajreplay.stages.cohorts.cohort import LoadedCohort
from trajreplay.stages.cohorts.constant_groups import without_dropped
from trajreplay.stages.cohorts.other_samples import other_samples
from trajreplay.stages.cohorts.sources import Source, Sources
from trajreplay.stages.report import CohortReport, StageResult
from trajreplay.stages.wide import WEIGHED

_CHANGED = ("recomputed", "bfloat16", "float16")  # on the way from a rollout to its steps
_ELSEWHERE = "declare the stage at the rollout, whose capture holds them all"


def check_batches(
    table: pa.Table,
    abilities: dict[str, Ability],
    settings: Settings,
    report: CohortReport,
    sources: Sources,
) -> dict[str, pa.Table]:
    """Leave out stages whose statistics may be of other samples than those of the cohort.

    Where one rollout feeds several steps, a training normalises either over what it sampled or over
    what each step consumes, and the values of a step say nothing of which it should have been.

    Args:
        table: All samples of the cohort.
        abilities: The stages; those that cannot be verified are taken out.
        settings: The arithmetic in force.
        report: Gets the results of those.
        sources: The rollouts that steps consumed from.

    Returns:
        By stage that is left, the samples that it reads besides, where there are such.
    """
    batch = settings.layout.batch
    parts: list[str] | None = None
    wide: dict[str, pa.Table] = {}
    for stage, one in list(abilities.items()):
        by_batch = over_batches(stage, settings, one)
        by_trajectory = "" if one.kernel else over_trajectories(stage, settings)
        if not by_batch and not by_trajectory:
            continue
        problem = ""
        if report.step_id is None:
            if by_batch and batch == "step":
                problem = f"{by_batch} and layout.batch is 'step': declare the stage at the steps"
        elif batch != "step":
            if parts is None:
                parts = _parts(table, report.run_id, sources, settings.reward, _is_elsewhere)
            if by_batch:
                problem = _of_batch(by_batch, batch, parts, len(source_pairs(table)))
                if problem and batch == "rollout" and not one.kernel:
                    found = _not_wide(stage, settings, _reads(stage, one)) or other_samples(
                        table,
                        report.run_id,
                        sources,
                        _reads(stage, one),
                        ranks=report.ranks if _by_rank(stage, settings) else None,
                    )
                    problem = f"{problem}; {found}" if isinstance(found, str) else ""
                    wide |= {} if isinstance(found, str) else {stage: found}
            elif parts:
                cut = _parts(table, report.run_id, sources, settings.reward, _is_cut)
                problem = f"{by_trajectory}, and {cut[0]}; {_ELSEWHERE}" if cut else ""
        if problem:
            report.stages.append(StageResult(stage, "unverified", message=problem))
            del abilities[stage]
    return wide


def others_of_rollouts(cohort: LoadedCohort, sources: Sources) -> dict[str, pa.Table]:
    """By stage whose statistics are said to be of the step, what else its rollouts hold.

    Args:
        cohort: The step.
        sources: The rollouts.
    """
    settings = cohort.settings
    if cohort.report.step_id is None or settings.layout.batch != "step":
        return {}
    found: dict[str, pa.Table] = {}
    for stage, one in cohort.abilities.items():
        by_batch = over_batches(stage, settings, one)
        if not by_batch or one.kernel:
            continue
        if not _not_wide(stage, settings, _reads(stage, one)):
            others = other_samples(
                cohort.table,
                cohort.report.run_id,
                sources,
                _reads(stage, one),
                ranks=cohort.report.ranks if _by_rank(stage, settings) else None,
            )
            found |= {} if isinstance(others, str) or not others.num_rows else {stage: others}
    return found


def _reads(stage: str, ability: Ability) -> Collection[str]:
    """What a statistic takes of samples that a step does not hold."""
    return WEIGHED if stage == "loss.policy" else ability.reads


def _by_rank(stage: str, settings: Settings) -> bool:
    """Whether the rank that held a sample decides what it shares statistics with."""
    sets = settings.advantage.whiten, settings.advantage.whiten_centre
    return stage == "advantage.estimate" and sets[0] != "none" and "rank" in sets


def _not_wide(stage: str, settings: Settings, reads: Collection[str]) -> str:
    """Why statistics cannot be of samples that a step does not hold; empty if they can."""
    reward = settings.reward
    if stage == "loss.policy" and settings.loss.proximal != "recorded":
        return f"loss.proximal is {settings.loss.proximal!r}, of which rollouts hold nothing"
    sums = reward.rescale != "none" or reward.combination == "normalise-then-sum"
    if stage == "reward.post_process" and reward.grouping == "stride" and sums:
        return "reward.grouping is 'stride', which counts the rows that a rank consumed"
    changed = [one for one in (*reads, "loss_mask") if settings.handoff.get(one) in _CHANGED]
    if changed:
        return f"handoff.{changed[0]} is {settings.handoff[changed[0]]!r}"
    return ""


def _of_batch(what: str, batch: str, parts: list[str], rollouts: int) -> str:
    """Why a statistic of a whole batch is not recomputed from a step; empty if it is."""
    if batch == "rollout":
        return f"{what}, layout.batch is 'rollout' and {parts[0]}; {_ELSEWHERE}" if parts else ""
    found = parts[0] if parts else f"it consumed from {rollouts} rollouts" if rollouts > 1 else ""
    if not found:
        return ""
    return (
        f"{what}, and {found}: state layout.batch, 'step' if it is "
        f"taken over each step; or {_ELSEWHERE}"
    )


_Others = Callable[[pa.Table, pa.Table], int]


def _parts(
    table: pa.Table, run_id: str, sources: Sources, settings: RewardSettings, others: _Others
) -> list[str]:
    """The rollouts that have other samples than the step consumed, in words.

    Args:
        table: The samples of the step.
        run_id: The run.
        sources: Its rollouts.
        settings: Which groups no step consumes.
        others: How many samples of a rollout, or of all steps that consumed from it, count.
    """
    found = []
    for attempt, rollout_id in sorted(source_pairs(table)):
        from_here = pc.and_(
            pc.equal(table["source_attempt"], attempt),
            pc.equal(table["source_rollout_id"], rollout_id),
        )
        source = sources.find(run_id, attempt, rollout_id)
        known = sources.consumed.of(Cohort(run_id, attempt, rollout_id, None))
        held = [source.table] if isinstance(source, Source) else []
        tables = [known, *(without_dropped(one, settings) for one in held)]
        count = max(others(table.filter(from_here), one) for one in tables)
        if count:
            found.append(f"{count} samples of rollout {rollout_id} are not in it")
    return found


def _is_elsewhere(mine: pa.Table, known: pa.Table) -> int:
    """How many samples are not in the step."""
    here = pc.is_in(known["sample_id"], value_set=mine["sample_id"].combine_chunks())
    return int(known.num_rows - (pc.sum(here).as_py() or 0))


def _is_cut(mine: pa.Table, known: pa.Table) -> int:
    """How many are not, of trajectories that the step holds fragments of."""
    names = "trajectory_id"
    if not has_column(mine, names) or not has_column(known, names):
        return 0
    own = mine[names].combine_chunks()
    return _is_elsewhere(mine, known.filter(pc.is_in(known[names], value_set=own)))
