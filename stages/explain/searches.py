"""How much of a run is searched: what is new in full, what is as before by what explained it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from trajreplay.query import Cohort
from trajreplay.stages.block import Block
from trajreplay.stages.explain.explanation import Explanation
from trajreplay.stages.explain.search import explain_stage
from trajreplay.stages.faults import Fault

# Cohorts of a stage of a run that were searched in vain, after which one is searched in full only
# where its error is of a kind that was searched less often than this, or as every so-manieth.
SEARCHES, OF_A_KIND, EVERY = 8, 2, 20
# So many times as many in vain, and kinds count no more: errors may come in any number of them.
ENOUGH = 2


@dataclass
class _Course:
    """What the searches of a stage of a run came to, one cohort after another."""

    in_vain: int = 0
    left: int = 0  # cohorts since the last search in full
    kinds: Counter[frozenset[str]] = field(default_factory=Counter)

    def wants(self, kind: frozenset[str]) -> bool:
        """Whether an error of a kind is worth a search in full."""
        new = self.in_vain < ENOUGH * SEARCHES and self.kinds[kind] < OF_A_KIND
        return new or self.left >= EVERY


class Searches:
    """The searches of one call of explain.

    Args:
        faults: The catalogue.
    """

    def __init__(self, faults: Sequence[Fault]) -> None:
        self._faults = faults
        self._known: dict[str, list[tuple[str, ...]]] = {}  # by stage, what explained a cohort
        self._courses: dict[tuple[str, str], _Course] = {}
        self._left: list[tuple[Explanation, int]] = []

    def explain(self, block: Block, one: Explanation) -> None:
        """Search what reproduces a stage of a cohort.

        Args:
            block: The cohort.
            one: Gets what is found.
        """
        course = self._courses.setdefault((one.cohort.run_id, one.stage), _Course())
        known = self._known.setdefault(one.stage, [])
        tired = course.in_vain >= SEARCHES
        self._search(block, one, only_first=tired)
        if tired and not one.searched and one.first is None and one.differ and not one.note:
            if course.wants(one.kind):
                self._search(block, one, only_first=False)
            else:
                course.left += 1
                self._left.append((one, len(known)))
        if one.searched and one.first is None and one.differ and not one.note:
            course.in_vain += 1
            course.left = 0
            course.kinds[one.kind] += 1
        known += [each.faults for each in one.hypotheses if each.faults not in known]

    def again(self, load: Callable[[Cohort], Block | None]) -> None:
        """Try what was left by what explained a later cohort.

        Args:
            load: Gives a cohort once more, if it can be had.
        """
        for one, known in self._left:
            if len(self._known[one.stage]) > known:
                block = load(one.cohort)
                if block is not None:
                    self._search(block, one, only_first=True)

    def _search(self, block: Block, one: Explanation, *, only_first: bool) -> None:
        found = Explanation(one.cohort, one.stage)
        known = self._known[one.stage]
        explain_stage(block, one.stage, found, self._faults, known, only_first=only_first)
        vars(one).update(vars(found))
