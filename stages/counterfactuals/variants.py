"""Variants: a cohort under other settings, columns, groups or arithmetic than it was captured."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from torch import Tensor

from trajreplay.schema.settings import LOSS_TERMS, Settings, with_changes
from trajreplay.stages.block import Block
from trajreplay.stages.capability import ability
from trajreplay.stages.report import CohortReport

# Stages whose recorded values are compared with recomputed ones.
COMPUTED = (
    "reward.post_process",
    "advantage.kl",
    "advantage.estimate",
    "loss.policy",
    "loss.value",
)


class Arithmetic(Protocol):
    """What stands in for the arithmetic of a stage: the methods of `UserKernel` that it calls."""

    @property
    def what(self) -> str:
        """Its name."""
        ...


@dataclass(frozen=True, eq=False)
class Variant:
    """A changed computation.

    Args:
        settings: Settings that are others, each named `section.field`.
        columns: Columns that hold other values: (N,) or (S,), `loss_mask` as bool; under `groups`
            the group of each sample, (S,) int64.
        arithmetic: What recomputes the stage instead of its own arithmetic.
        scales: By scalar, a factor inside the recorded values that their meaning does not state.
    """

    settings: Mapping[str, Any] = field(default_factory=dict)
    columns: Mapping[str, Tensor] = field(default_factory=dict)
    arithmetic: Arithmetic | None = None
    scales: Mapping[str, float] = field(default_factory=dict)

    def with_(self, other: Variant) -> Variant:
        """Both changes; of what both change, the other's, and no two arithmetics."""
        return Variant(
            {**self.settings, **other.settings},
            {**self.columns, **other.columns},
            other.arithmetic or self.arithmetic,
            {**self.scales, **other.scales},
        )


def varied(block: Block, variant: Variant, stages: Sequence[str] = COMPUTED) -> Block:
    """A block of one cohort under a variant.

    Args:
        block: The cohort as captured; stays as it is.
        variant: What is changed.
        stages: Stages that will be recomputed; those that the changed settings, or the columns
            that are there, do not allow are left out.

    Raises:
        SchemaError: There is no such setting, or a value is of another kind.
    """
    (cohort,) = block.cohorts
    settings = changed_settings(block.settings, variant.settings)
    other = copy.copy(cohort)
    place = cohort.report
    other.report = CohortReport(
        place.run_id, place.attempt, place.rollout_id, place.step_id, place.ranks
    )
    other.settings = settings
    widest = max((one.parallel for one in cohort.owners), key=lambda one: one.context_size)
    held = [
        one
        for one in cohort.table.column_names
        if one not in cohort.lacking or not cohort.table[one].null_count
    ]
    other.abilities = {}
    for stage in stages:
        mine = cohort.abilities.get(stage)
        kernel = mine.kernel if mine is not None and variant.arithmetic is None else None
        found = ability(stage, settings, widest, held)
        if found.capability == "recompute" and {*found.reads} <= {*held}:
            other.abilities[stage] = replace(found, kernel=variant.arithmetic or kernel)  # type: ignore[arg-type]
    if variant.scales:
        other.owners = [
            replace(
                entry,
                outputs=tuple(
                    replace(one, scale=one.scale * variant.scales.get(one.field, 1.0))
                    for one in entry.outputs
                ),
            )
            for entry in cohort.owners
        ]
    made = copy.copy(block)
    for kept in ("active", "wide"):
        made.__dict__.pop(kept, None)
    made.cohorts, made.settings, made.chained = [other], settings, {}
    if variant.columns:
        made.packed = block.packed.replaced(variant.columns)
    return made


def changed_settings(settings: Settings, changes: Mapping[str, Any]) -> Settings:
    """Settings with some fields changed, and flags that contradict the changes unsaid.

    Raises:
        SchemaError: There is no such setting, or a value is of another kind.
    """
    if not changes:
        return settings
    # Distillation is a term of the advantages: what a changed loss says nothing of.
    kept = () if "advantage.opd_coef" in changes else ("opd",)
    terms = [one for one in LOSS_TERMS if one not in kept]
    unsaid = [f"loss.{one}" for one in terms if f"loss.{one}" not in changes]
    return with_changes(settings, {**changes, **dict.fromkeys(unsaid)})
