"""Raw rewards recomputed by a reward function, and what it may not see of a sample."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from trajreplay.schema.errors import StageError
from trajreplay.schema.policy import Redaction
from trajreplay.stages.block import Block
from trajreplay.stages.cohorts.cohort import LoadedCohort
from trajreplay.stages.compare import Look, compare_elements
from trajreplay.stages.kernels import half_ulp
from trajreplay.stages.plugins import Plugin, guarded
from trajreplay.stages.report import Finding

STAGE = "reward.raw"
_TEXT = ("prompt", "response", "label", "tool_output")
# Read for a reward function alone; but steps hand tokens on.
SCORED = (*_TEXT, "tokens")
FIELDS = ("sample_id", *SCORED, "response_length", "loss_mask")


class ScoredSample(Mapping[str, Any]):
    """One sample as a reward function sees it; what was not captured is noted when it is read.

    Args:
        fields: What was captured.
        withheld: By other field, why it is not there.
    """

    def __init__(self, fields: Mapping[str, Any], withheld: Mapping[str, str]) -> None:
        self._fields = fields
        self._withheld = withheld
        self.missed: list[str] = []

    def __getitem__(self, name: str) -> Any:
        if name in self._withheld:
            self.missed.append(name)
            raise KeyError(name)
        return self._fields[name]

    def __iter__(self) -> Iterator[str]:
        # Whoever takes all of it takes the text too.
        self.missed += [name for name in self._withheld if name in _TEXT]
        return iter(self._fields)

    def __len__(self) -> int:
        return len(self._fields)

    def __repr__(self) -> str:
        return f"ScoredSample({self._fields.get('sample_id')!r})"

    @property
    def reason(self) -> str:
        """Why what was read and is not there is not, or nothing."""
        return "; ".join(dict.fromkeys(self._withheld[name] for name in self.missed))


def score_cohort(cohort: LoadedCohort, reward: Plugin) -> None:
    """Recompute the raw rewards of a cohort, or note why that cannot be done.

    Args:
        cohort: The cohort; afterwards it holds the scores, and no longer what was read for them.
        reward: The reward function.
    """
    cohort.rescored = True
    if STAGE in cohort.abilities and cohort.table.num_rows:
        message = f"raw rewards are recomputed with {reward.origin}"
        cohort.report.findings.append(Finding("reward.function", "info", message, stage=STAGE))
        if "raw_reward" in cohort.abilities[STAGE].reads:
            try:
                cohort.scores = _scores(cohort, reward)
            except StageError as error:
                cohort.unscored = error.message
        else:
            cohort.unscored = (
                "the reward function gives one raw_reward a sample, and reward_components alone "
                "were captured"
            )
    handed_on = cohort.report.step_id is not None and "sample" in cohort.abilities
    done = {*SCORED} - {"tokens"} if handed_on else {*SCORED}
    cohort.table = cohort.table.drop_columns(
        [one for one in cohort.table.column_names if one in done]
    )
    cohort.lacking = tuple(name for name in cohort.lacking if name not in done)


def compare_scores(block: Block) -> list[Look] | None:
    """Hold recorded raw rewards against those of a reward function; None without one.

    What differs is recomputed for the stages that follow.
    """
    if block.cohorts[0].scores is None:
        return None
    recorded = block.packed.scalars("raw_reward")
    scores = torch.cat([one.scores for one in block.cohorts if one.scores is not None])
    # Of a sample that the settings leave out the function says so, and nothing is recorded.
    left_out = scores.isnan() & recorded.isnan()
    recomputed = torch.where(left_out, 0.0, scores)
    target = torch.where(left_out, 0.0, recorded)
    dtype = block.dtypes.get("raw_reward", "float32")
    compared = compare_elements(
        target,
        recomputed,
        block.packed.sample_bounds,
        block.tolerance(STAGE, "raw_reward"),
        slack=lambda samples: half_ulp(recomputed, dtype)[samples],
        describe=lambda one, old, new: block.sample_divergence("raw_reward", one, old, new),
        ranks=block.ranks_of_samples,
        exact=block.as_recorded("raw_reward", recomputed) if block.exact else None,
    )
    if compared.disagree is not None:
        block.chained["raw_reward"] = torch.where(compared.disagree, scores, recorded)
    for look in compared.looks:
        look.compared = 0  # the stage counts its samples itself
    return compared.looks


def _scores(cohort: LoadedCohort, reward: Plugin) -> Tensor:
    """(S,) float64. The score of each sample; NaN where the function has none.

    It may have none, and give None, where the settings leave samples without a reward out.

    Raises:
        StageError: The function fails on a sample, or reads what was not captured.
    """
    rules = {entry.key.rank: Redaction(entry.redaction) for entry in cohort.owners}
    count = cohort.table.num_rows
    found = [_score(cohort, reward, rules, row) for row in range(count)]
    scores = torch.tensor(found, dtype=torch.float64)
    for row in [row for row, one in enumerate(found) if not math.isnan(one)][:1]:
        again = _score(cohort, reward, rules, row)
        if again != float(scores[row]):
            raise StageError(
                f"{_place(cohort, row)}: the reward function gives {float(scores[row])!r} and, "
                f"called again, {again!r}; make it deterministic, or record a score that is not "
                "as recorded-only"
            )
    return scores


def _score(cohort: LoadedCohort, reward: Plugin, rules: Mapping[int, Redaction], row: int) -> float:
    sample = _sample(cohort, rules, row)
    where = f"{_place(cohort, row)}: the reward function"
    problem, value = "", math.nan
    try:
        with guarded(where):
            found: Any = reward.function(sample)
        value = _number(found)
        none = found is None and cohort.settings.reward.missing == "exclude"
        if not math.isfinite(value) and not none:
            problem = f"{where} gives {_shown(found)}, expected a finite number"
    except StageError as error:
        problem = error.message
    if reason := sample.reason:
        raise StageError(f"{where} reads what is not there: {reason}")
    if problem:
        raise StageError(problem)
    return value


def _number(value: Any) -> float:
    """A number of any type as a float, NaN for what is none."""
    try:
        return math.nan if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan


def _shown(value: object) -> str:
    return repr(value) if isinstance(value, str | float | int) else f"a {type(value).__name__}"


def _place(cohort: LoadedCohort, row: int) -> str:
    table = cohort.table
    return f"sample {table['sample_id'][row].as_py()} (rank {table['rank'][row].as_py()})"


def _sample(cohort: LoadedCohort, rules: Mapping[int, Redaction], row: int) -> ScoredSample:
    table = cohort.table
    there = set(table.column_names)
    fields: dict[str, Any] = {}
    withheld: dict[str, str] = {}
    redaction = rules[table["rank"][row].as_py()]
    for name in FIELDS:
        value = table[name][row].as_py() if name in there else None
        if name in _TEXT:
            why = redaction.withholds(name, value)
            if why:
                withheld[name] = (
                    f"{name} {why}; capture it with redaction={{{name!r}: 'truncate:N'}}, N more "
                    "than its characters"
                )
                continue
        elif value is None:
            withheld[name] = f"{name} were not captured; capture them, or score without"
            continue
        fields[name] = value
    return ScoredSample(fields, withheld)
