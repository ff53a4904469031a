"""A block: cohorts of one plan, packed together, on which each stage runs once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import pairwise

import pyarrow as pa
import torch
from torch import Tensor

from trajreplay.schema.columns import has_column
from trajreplay.schema.contracts import STAGE_OF_COLUMN
from trajreplay.schema.policy import Tolerance
from trajreplay.schema.tables import OWN_LENGTH
from trajreplay.stages.cohorts.cohort import LoadedCohort
from trajreplay.stages.cohorts.packed import Packed
from trajreplay.stages.compare import Active, Look
from trajreplay.stages.report import Divergence, Finding, StageResult
from trajreplay.stages.reuse import UserKernel


class Block:
    """Cohorts that are packed and judged together.

    Args:
        cohorts: Cohorts of one plan.

    Attributes:
        chained: Columns in which values that disagree with their recomputation are replaced by
            it. What agrees keeps its recorded value, so that rounding does not add up along the
            chain and the chained look of an undisturbed block is its isolated one.
    """

    def __init__(self, cohorts: list[LoadedCohort]) -> None:
        self.cohorts = cohorts
        self.settings = cohorts[0].settings
        self.stages = cohorts[0].stages
        self.dtypes = cohorts[0].dtypes
        self.packed = Packed([cohort.table for cohort in cohorts])
        self.chained: dict[str, Tensor] = {}
        self._tolerances: dict[tuple[str, str], Tolerance] = {}
        # Columns in which nobody has to look for NaN and infinities any more.
        self._read = set(frozenset.intersection(*(cohort.finite for cohort in cohorts)))
        for name in sorted({name for cohort in cohorts for name in cohort.chained}):
            parts = [
                cohort.chained.get(name, self.column(name)[start:stop])
                for cohort, (start, stop) in zip(cohorts, self.spans(name), strict=True)
            ]
            self.chained[name] = torch.cat(parts)

    def spans(self, name: str) -> list[tuple[int, int]]:
        """Where each cohort begins and ends in a column."""
        bounds = self.bounds_of(name)
        return list(pairwise(bounds))

    def per_token(self, name: str) -> bool:
        """Whether a column has a value per response token."""
        is_list = pa.types.is_list(self.packed.table.schema.field(name).type)
        return bool(is_list) and name not in OWN_LENGTH

    def bounds_of(self, name: str) -> list[int]:
        """Where each cohort begins in a column."""
        if name == "reward_components":
            count = len(self.settings.reward.weights)
            return [count * bound for bound in self.packed.sample_bounds]
        return self.packed.token_bounds if self.per_token(name) else self.packed.sample_bounds

    def column(self, name: str) -> Tensor:
        """A recorded column: (N,) or (S,) float64, the mask as bool, components (S K,)."""
        if name == "loss_mask":
            return self.packed.mask
        is_list = self.per_token(name) or name in OWN_LENGTH
        return self.packed.tokens(name) if is_list else self.packed.scalars(name)

    @cached_property
    def active(self) -> Active | None:
        """Trainable tokens; None if all are."""
        packed = self.packed
        if sum(packed.trained) == packed.token_bounds[-1]:
            return None
        return Active(packed.masked, packed.trained)

    def kernel(self, stage: str) -> UserKernel | None:
        """The user's function that recomputes a stage; None for its own arithmetic."""
        return self.cohorts[0].abilities[stage].kernel

    def tolerance(self, stage: str, column: str) -> Tolerance:
        """The tolerance of a recorded column; equal for all cohorts of a block."""
        dtype = self.dtypes.get(column, "float32")
        if (stage, dtype) not in self._tolerances:
            self._tolerances[stage, dtype] = self.cohorts[0].tolerance(stage, dtype)
        return self._tolerances[stage, dtype]

    @property
    def exact(self) -> bool:
        """Whether a pass must have the bits of its evaluation in the recorded dtype."""
        return self.cohorts[0].comparison.exact

    def as_recorded(self, name: str, values: Tensor) -> Tensor:
        """Values of float32 arithmetic as a column holds them: rounded to its dtype, as float64."""
        return values.to(getattr(torch, self.dtypes.get(name, "float32"))).double()

    def ranks_of_samples(self, samples: Tensor) -> frozenset[int]:
        """The ranks of packed samples."""
        return frozenset(self.packed.ranks[samples.numpy()].tolist())

    def ranks_of_tokens(self, tokens: Tensor) -> frozenset[int]:
        """The ranks of packed tokens."""
        return self.ranks_of_samples(
            torch.searchsorted(self.packed.offsets, tokens, right=True) - 1
        )

    def token_divergence(self, name: str, token: int, recorded: float, new: float) -> Divergence:
        """A divergence at a packed token."""
        sample, position = self.packed.sample_of(token)
        return self.sample_divergence(name, sample, recorded, new, position)

    def sample_divergence(
        self, name: str, sample: int, recorded: float, new: float, token: int | None = None
    ) -> Divergence:
        """A divergence at a packed sample."""
        return Divergence(
            name,
            recorded,
            new,
            sample_id=self.packed.text("sample_id", sample),
            group_id=self.packed.text("group_id", sample),
            rank=int(self.packed.ranks[sample]),
            token=token,
        )

    def _check_finite(self, stage: str, columns: tuple[str, ...]) -> list[Look]:
        """Locate NaN and infinities in the columns that no earlier stage answered for.

        On trainable tokens each is a mismatch of the stage that first holds it; under the mask it
        is a warning.
        """
        looks = [Look() for _ in self.cohorts]
        for name in columns:
            if name in self._read or not has_column(self.packed.table, name):
                continue
            self._read.add(name)
            values = self.column(name)
            if bool(torch.isfinite(values.sum())):
                continue
            for index, (start, stop) in enumerate(self.spans(name)):
                self._find_non_finite(stage, name, index, start, values[start:stop], looks)
        return looks

    def _find_non_finite(
        self, stage: str, name: str, index: int, start: int, values: Tensor, looks: list[Look]
    ) -> None:
        found = (~torch.isfinite(values)).nonzero().squeeze(1) + start
        masked = torch.zeros(0, dtype=torch.int64)
        if self.per_token(name):
            trained = self.packed.mask[found]
            found, masked = found[trained], found[~trained]
        place = self.token_divergence if self.per_token(name) else self.sample_divergence
        column = self.column(name)
        examples = [place(name, one, float(column[one]), torch.nan) for one in found[:10].tolist()]
        look = Look(0, len(found), 0, torch.nan if len(found) else 0.0, examples)
        look.ranks = (self.ranks_of_tokens if self.per_token(name) else self.ranks_of_samples)(
            found
        )
        looks[index] = looks[index].merged(look)
        if len(masked):
            first = self.token_divergence(name, int(masked[0]), 0.0, 0.0)
            self.cohorts[index].report.findings.append(
                Finding(
                    "non-finite.masked",
                    "warning",
                    f"{name} holds {len(masked)} NaN or infinite values under the mask, first "
                    f"{float(column[masked[0]])} at {first.sample_id} token {first.token}",
                    stage=stage,
                    sample_id=first.sample_id,
                    token=first.token,
                )
            )

    def record(
        self,
        stage: str,
        isolated: list[Look],
        chained: list[Look] | None = None,
        *,
        inputs: tuple[str, ...] = (),
        outputs: tuple[str, ...] = (),
        after: str = "",
        replaced: tuple[str, ...] = (),
        noun: str = "values",
    ) -> None:
        """Turn looks into the results of a stage, one a cohort.

        Args:
            stage: Name of the stage.
            isolated: Looks from recorded inputs.
            chained: Looks from recomputed inputs; None where those agree with the recorded ones.
            inputs: Columns it reads, in which a NaN or infinity is a mismatch of its own.
            outputs: Columns it writes, in which the comparison has counted them already.
            after: The stage that recomputes what it reads; a step also reads from its rollouts.
            replaced: Columns that the chained look takes from their recomputation.
            noun: What is counted.
        """
        read, written = self._check_finite(stage, inputs), self._check_finite(stage, outputs)
        for index, cohort in enumerate(self.cohorts):
            look = isolated[index].merged(read[index])
            if not look.compared and not look.mismatches:
                message = f"nothing to compare: the cohort has no {noun} that count"
                cohort.report.stages.append(StageResult(stage, "skipped", message=message))
                continue
            result = StageResult(stage, look.verdict)
            result.isolated = look.verdict
            result.max_abs_error = look.max_abs_error if look.compared else None
            result.mismatches, result.compared = look.mismatches, look.compared
            result.non_finite = read[index].mismatches + written[index].mismatches
            result.divergences, result.ranks = look.divergences, sorted(look.ranks)
            if look.mismatches:
                result.message = f"{look.mismatches} of {look.compared} {noun}"
            else:
                result.message = "; ".join(self._reservations(look, noun))
            if after in self.stages or (after and cohort.linked):
                other = look if chained is None else chained[index].merged(read[index])
                result.chained = other.verdict
                result.chained_error = other.max_abs_error if other.compared else None
                self._judge_chain(result, index, replaced)
            cohort.report.stages.append(result)

    def _reservations(self, look: Look, noun: str) -> Iterator[str]:
        """Why what agrees is precision and no pass."""
        asked = self.cohorts[0].comparison
        for count, what in (
            (look.undecided, "are outside the tolerance and inside the bound that float32 allows"),
            (look.accepted, f"are outside the policy's tolerance, accepted as asked: {asked}"),
            (look.inexact, "agree and do not have the bits that float32 arithmetic gives"),
        ):
            if count:
                yield f"{count} of {look.compared} {noun} {what}"

    def _judge_chain(self, result: StageResult, index: int, replaced: tuple[str, ...]) -> None:
        if result.isolated != "diverged" and result.chained == "diverged":
            result.inherited = True
        elif result.isolated == "diverged" and result.chained != "diverged":
            result.suspect = "recorded-intermediate"
            recorders = self._recorders(index, replaced)
            result.message += f"; agrees when chained: what {' and '.join(recorders)} recorded"
            result.message += " is not what was consumed"
            for one in self.cohorts[index].report.stages:
                if one.stage in recorders and one.verdict == "diverged":
                    one.suspect = "recorded-intermediate"

    def _recorders(self, index: int, replaced: tuple[str, ...]) -> list[str]:
        """The stages whose records of one cohort the chained look does not take."""
        handed = {one.check for one in self.cohorts[index].report.findings}
        found = []
        for name in replaced:
            start, stop = self.spans(name)[index]
            if not torch.equal(self.column(name)[start:stop], self.chained[name][start:stop]):
                at_handoff = f"handoff.{name}" in handed
                found.append("sample" if at_handoff else STAGE_OF_COLUMN.get(name, "sample"))
        return list(dict.fromkeys(found))
