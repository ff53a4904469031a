"""What explains a divergence: the faults that reproduce it, or the shape of what is left."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trajreplay.query import Cohort
from trajreplay.stages.report import json_float

UNSEARCHED = "tried only what explained cohorts before"
# Explanations that are spelt out where several cannot be told apart.
_SHOWN = 4


@dataclass(frozen=True)
class Hypothesis:
    """One fault, or two at once, held against what was recorded.

    Args:
        faults: Ids of the faults.
        known_as: Their names.
        sentence: What the recorded values equal.
        look: Settings or code to look at.
        references: Reports.
        settings: Settings that are others under it, by name.
        values: How many values it was held against.
        agree: How many it reproduces.
        max_error: The largest error of those.
        exact: Whether all agree within the tolerance; else some only within float32's bound.
        alike: What else the recorded values equal, by the same faults in other ways.
        by_chance: Where it rests on a few values that only count tokens: how many; else 0. Another
            mistake that counts as many tokens gives these, too.
    """

    faults: tuple[str, ...]
    known_as: str
    sentence: str
    look: str
    references: tuple[str, ...]
    settings: dict[str, Any]
    values: int
    agree: int
    max_error: float
    exact: bool = True
    alike: tuple[str, ...] = ()
    by_chance: int = 0

    @property
    def reproduces(self) -> bool:
        """Whether it explains every value."""
        return self.agree == self.values

    @property
    def doubt(self) -> str:
        """What to say first where chance may give as much; else nothing."""
        if not self.by_chance:
            return ""
        values = "1 value" if self.by_chance == 1 else f"{self.by_chance} values"
        verb = "counts" if self.by_chance == 1 else "count"
        return (
            f"not certain, resting on {values} that only {verb} tokens, which other mistakes give "
            "by chance: perhaps "
        )

    def to_json(self) -> dict[str, Any]:
        """All facts as JSON values."""
        return {
            "faults": list(self.faults),
            "known_as": self.known_as,
            "sentence": self.sentence,
            "look": self.look,
            "references": list(self.references),
            "settings": {
                name: list(one) if isinstance(one, tuple) else one
                for name, one in self.settings.items()
            },
            "values": self.values,
            "agree": self.agree,
            "max_error": json_float(self.max_error),
            "exact": self.exact,
            "alike": list(self.alike),
            "by_chance": self.by_chance,
        }


@dataclass
class Explanation:
    """What is known of one diverged stage of one cohort.

    Args:
        cohort: The cohort.
        stage: The stage.
        noun: What its values are: samples, tokens or scalars.
        differ: How many recorded values disagree with the settings.
        of: How many were compared.
        misses_by: The largest error of the settings in force.
        hypotheses: Those that reproduce what was recorded, the most believable first; all after
            the first cannot be told from it on this cohort.
        nearest: Where none does: the fault that comes nearest, if one explains more than the
            settings do.
        residual: Where none does: the shape of the error.
        audit: Of each recorded field: how many of its values disagree, and how many there are.
        note: What else is to be said, such as why nothing could be tried.
        told: Of what a contract check found: its finding, in words.
        searched: Whether every fault was tried; not, where what explained a cohort before explains
            this one, or where many before had no explanation.
        warns: Whether it is a warning of a check, by which no stage diverged.
        weights: The newest weight version that sampled it, where that was captured.
        failed: Faults that could not be tried, as one of an installed package may fail, and why.
        kind: What tells it from other explanations that name no fault: the check, what differs
            and the shapes that its error has for certain.
        fits: What its error may be of besides, few as its values are.
    """

    cohort: Cohort
    stage: str
    noun: str = "values"
    differ: int = 0
    of: int = 0
    misses_by: float = 0.0
    hypotheses: list[Hypothesis] = field(default_factory=list)
    nearest: Hypothesis | None = None
    residual: list[str] = field(default_factory=list)
    audit: dict[str, tuple[int, int]] = field(default_factory=dict)
    note: str = ""
    told: str = ""
    searched: bool = True
    warns: bool = False
    weights: int | None = None
    failed: list[str] = field(default_factory=list)
    kind: frozenset[str] = frozenset()
    fits: frozenset[str] = frozenset()

    @property
    def first(self) -> Hypothesis | None:
        """The explanation, if there is one."""
        return self.hypotheses[0] if self.hypotheses else None

    @property
    def text(self) -> str:
        """The explanation in sentences."""
        if self.first is None:
            return self._unexplained()
        best = self.first
        look = f"Look at: {best.look}. See: trajreplay faults {best.faults[0]}"
        if self.told:
            start = f"{self.stage}: {'a warning: ' if self.warns else ''}"
            return f"{start}{self.told}. Known as: {best.known_as}. {look}"
        fit = f"max error {_short(best.max_error)} on {best.agree} of {best.values} {self.noun}"
        parts = [
            f"{self.stage}: {best.doubt or 'recorded values equal '}{best.sentence}",
            f"({fit}; the settings in force miss by {_short(self.misses_by)}).",
            f"Known as: {best.known_as}.",
        ]
        if not best.exact:
            parts.append("Some agree only within the bound of float32.")
        parts += self._audited
        others = [one.sentence for one in self.hypotheses[1:]]
        others += [alike for one in self.hypotheses for alike in one.alike]
        if others:
            more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
            parts.append(f"On this cohort the same as: {'; '.join(others[:_SHOWN])}{more}.")
        if not self.searched:
            parts.append(f"{UNSEARCHED[0].upper()}{UNSEARCHED[1:]}.")
        return " ".join([*parts, *self._not_tried, look])

    @property
    def nothing_known(self) -> str:
        """That nothing explains it, in words."""
        tried = " that could be tried" if self.failed else ""
        return f"no known fault{tried} reproduces this"

    @property
    def _not_tried(self) -> list[str]:
        if not self.failed:
            return []
        more = f" and {len(self.failed) - _SHOWN} more" if len(self.failed) > _SHOWN else ""
        return [f"Not tried: {'; '.join(self.failed[:_SHOWN])}{more}."]

    @property
    def _audited(self) -> list[str]:
        """Which of several recorded scalars disagree, and which do not."""
        wrong = [name for name, (bad, _) in self.audit.items() if bad]
        right = [name for name in self.audit if name not in wrong]
        if self.noun != "scalars" or not wrong or not right:
            return []
        return [f"Of the recorded metrics {', '.join(wrong)} disagree, {', '.join(right)} agree."]

    def _unexplained(self) -> str:
        if self.note:
            return f"{self.stage}: {self.note}"
        differ = f"{self.differ} of {self.of} {self.noun} differ"
        start = "" if self.searched else f"{UNSEARCHED}: "
        parts = [
            f"{self.stage}: {start}{self.nothing_known}",
            f"({differ}, by up to {_short(self.misses_by)}).",
        ]
        parts += self._audited
        if self.residual:
            parts.append(f"The error is {'; '.join(self.residual)}.")
        if self.nearest is not None:
            near = self.nearest
            parts.append(f"Nearest: {near.sentence}, which gives {near.agree} of {near.values}.")
        return " ".join([*parts, *self._not_tried])

    def to_json(self) -> dict[str, Any]:
        """All facts as JSON values."""
        return {
            **self.cohort._asdict(),
            "stage": self.stage,
            "text": self.text,
            "differ": self.differ,
            "of": self.of,
            "misses_by": json_float(self.misses_by),
            "hypotheses": [one.to_json() for one in self.hypotheses],
            "nearest": None if self.nearest is None else self.nearest.to_json(),
            "residual": self.residual,
            "audit": {name: {"differ": bad, "of": of} for name, (bad, of) in self.audit.items()},
            "note": self.note,
            "told": self.told,
            "searched": self.searched,
            "warns": self.warns,
            "weights": self.weights,
            "failed": self.failed,
        }


def _short(value: float) -> str:
    return f"{value:.3g}"
