"""Groups of equal raw rewards, which a training may leave out, or hold without training them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

from trajreplay.schema.columns import has_column
from trajreplay.schema.settings import RewardSettings, Settings
from trajreplay.stages.cohorts.cohort import LoadedCohort
from trajreplay.stages.cohorts.packed import Packed, list_lengths, packed_values
from trajreplay.stages.cohorts.sources import Source, Sources
from trajreplay.stages.kernels import constant_groups
from trajreplay.stages.report import Finding

_GROUP = ("source_attempt", "source_rollout_id", "group_id")
_NEEDED = ("sample_id", "group_id", "raw_reward")


def batches_of(packed: Packed, settings: Settings, *, by_rank: bool = False) -> Tensor:
    """(S,) int64. What statistics over all samples are of, without the groups that are dropped.

    Args:
        packed: The samples.
        settings: Which groups are dropped, and what a batch is.
        by_rank: Whether the samples of each rank are a batch.
    """
    batches = (packed.rank_batches if by_rank else packed.batches)(settings.layout)
    if settings.reward.constant_groups != "drop":
        return batches
    raw = packed.scalars("raw_reward")
    dropped = constant_groups(raw, packed.groups, within=settings.reward.constant_within)
    apart: Tensor = 2 * batches + dropped  # they are a batch of their own, which is never trained
    return apart


def without_dropped(table: pa.Table, settings: RewardSettings) -> pa.Table:
    """The samples of a rollout that are left of it, as far as its columns tell."""
    if settings.constant_groups != "drop" or not _complete(table) or not table.num_rows:
        return table
    _, equal = _equal(table, settings)
    return table.filter(pa.array([not one for one in equal]))


def check_constant_groups(cohort: LoadedCohort, sources: Sources) -> None:
    """Look for groups of equal raw rewards that a step trains, where settings say that none is.

    A group that lies across steps is known from the rollout that generated it. What cannot be told
    is no pass.

    Args:
        cohort: The step; its report gets the findings.
        sources: The rollouts that steps consumed from.
    """
    settings, table = cohort.settings.reward, cohort.table
    if settings.constant_groups == "keep" or not has_column(table, "source_rollout_id"):
        return
    trained = np.ones(table.num_rows, bool)
    if settings.constant_groups == "mask":
        trained = _has_trained(table)
    constant, known = _constant(cohort, sources)
    said = f"reward.constant_groups is {settings.constant_groups!r}"
    odd = (constant & trained).nonzero()[0]
    if len(odd):
        row = int(odd[0])
        message = (
            f"{len(odd)} samples of groups of equal raw rewards are "
            f"{'trained' if settings.constant_groups == 'mask' else 'consumed'}, here of "
            f"{table['group_id'][row].as_py()}, and {said}"
        )
        sample = str(table["sample_id"][row].as_py())
        cohort.report.findings.append(Finding("group.filter", "error", message, "sample", sample))
    unknown = (~known & trained).nonzero()[0]
    if len(unknown):
        row = int(unknown[0])
        message = (
            f"{said}, and whether the raw rewards of a group are equal is not on record for "
            f"{len(unknown)} samples, here of {table['group_id'][row].as_py()}: capture raw_reward "
            "and group_id of all members, at the rollout or at the step"
        )
        cohort.report.unproven = True
        cohort.report.findings.append(Finding("group.filter", "warning", message, "sample"))


def _has_trained(table: pa.Table) -> np.ndarray:
    """(S,) bool. Samples with a trained token."""
    mask = packed_values(table["loss_mask"]).numpy() != 0
    owners = np.arange(table.num_rows).repeat(list_lengths(table["loss_mask"]))
    return np.bincount(owners[mask], minlength=table.num_rows) > 0


def _constant(cohort: LoadedCohort, sources: Sources) -> tuple[np.ndarray, np.ndarray]:
    """(S,) bool each. Samples of a step whose group is constant, and those where that is known."""
    settings, table = cohort.settings.reward, cohort.table
    constant, known = (np.zeros(table.num_rows, bool) for _ in range(2))
    keys = list(zip(*(table[name].to_pylist() for name in _GROUP[:2]), strict=True))
    for place in dict.fromkeys(keys):
        mine = np.array([key == place for key in keys]).nonzero()[0]
        own = table.take(pa.array(mine))
        source = sources.find(cohort.report.run_id, *place)
        if isinstance(source, Source) and _complete(source.table):
            names, equal = _equal(source.table, settings)
            whole = set(names)
        elif _complete(own):
            names, equal = _equal(own, settings)
            whole = _whole(own, names, settings)
        else:
            continue
        verdict = dict(zip(names, equal, strict=True))
        for row, group in zip(mine.tolist(), own["group_id"].to_pylist(), strict=True):
            alike = verdict.get(group)
            # Members that are not seen make no group equal that is not.
            known[row] = alike is False or (alike is True and group in whole)
            constant[row] = known[row] and bool(alike)
    return constant, known


def _complete(table: pa.Table) -> bool:
    return all(has_column(table, one) and not table[one].null_count for one in _NEEDED)


def _equal(table: pa.Table, settings: RewardSettings) -> tuple[list[str], list[bool]]:
    """The group of each sample, and whether its raw rewards are equal."""
    groups = pc.dictionary_encode(table["group_id"].combine_chunks())
    index = torch.from_numpy(np.array(groups.indices.to_numpy(), np.int64))
    raw = torch.from_numpy(np.array(table["raw_reward"].to_numpy(), np.float64))
    found = constant_groups(raw, index, within=settings.constant_within)
    return table["group_id"].to_pylist(), found.tolist()


def _whole(table: pa.Table, groups: list[str], settings: RewardSettings) -> set[str]:
    """The groups of which a step has all members, as far as it says how many they are."""
    if has_column(table, "group_size") and not table["group_size"].null_count:
        sizes = table["group_size"].to_pylist()
    else:
        sizes = [settings.n_samples_per_prompt or np.inf] * len(groups)
    counts = Counter(groups)
    return {one for one, size in zip(groups, sizes, strict=True) if counts[one] >= size}
