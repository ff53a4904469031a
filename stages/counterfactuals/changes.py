"""What other settings make of cohorts: by stage and field, how many values change, and how far."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trajreplay.query import Cohort
from trajreplay.stages.report import json_float


@dataclass(frozen=True)
class FieldChange:
    """What other settings make of one recorded field of a stage.

    Args:
        stage: The stage.
        field: The column or scalar.
        per: What has a value: sample, token or scalar.
        values: How many values were recomputed, those of masked tokens left out.
        changed: How many of them change.
        max_change: The largest change; NaN where one becomes NaN or ceases to be it.
        where: The sample, rank or micro-batch of that change, or nothing.
        recorded: The recorded value there.
        declared: What the settings in force give there, chained from the raw rewards on.
        then: What the others give there.
        agree: How many recorded values agree with the settings in force, from recorded inputs.
        then_agree: How many would agree with the others.
    """

    stage: str
    field: str
    per: str
    values: int
    changed: int
    max_change: float
    where: str
    recorded: float
    declared: float
    then: float
    agree: int
    then_agree: int

    def to_json(self) -> dict[str, Any]:
        """All facts as JSON values."""
        facts = dict(vars(self))
        for name in ("max_change", "recorded", "declared", "then"):
            facts[name] = json_float(facts[name])
        return facts


@dataclass
class CohortChange:
    """What other settings make of one cohort.

    Args:
        cohort: Its coordinates.
        fields: By stage and field, in order.
        notes: What could not be recomputed, and why.
        stages: What can be recomputed under the settings in force, shown or not.
        complete: Whether all of it that the changes reach was recomputed under them.
        left: Declared stages that are not recomputed, each with the reason.
    """

    cohort: Cohort
    fields: list[FieldChange] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    stages: tuple[str, ...] = ()
    complete: bool = True
    left: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """All facts as JSON values."""
        return {
            **self.cohort._asdict(),
            "notes": self.notes,
            "fields": [one.to_json() for one in self.fields],
        }


@dataclass
class WhatIf:
    """The counterfactual over all selected cohorts.

    Args:
        changes: The settings that are others, by `section.field`.
        cohorts: What they make of each cohort, in the order in which these feed each other.
        notes: Settings that have no effect, and why.
        refused: Files that no cohort could be read from, by path, and why.
    """

    changes: dict[str, Any]
    cohorts: list[CohortChange]
    notes: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """All facts as JSON values."""
        return {
            "changes": {
                name: list(one) if isinstance(one, tuple) else one
                for name, one in self.changes.items()
            },
            "notes": self.notes,
            "cohorts": [one.to_json() for one in self.cohorts],
            **({"refused": self.refused} if self.refused else {}),
        }
