"""The proximal policy of a block where it is interpolated between the rollout's and the current."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from trajreplay.schema.errors import StageError
from trajreplay.stages.block import Block
from trajreplay.stages.kernels import proximal_log_probs

OLD = "old_log_probs"


@dataclass(frozen=True)
class Interpolation:
    """The weights that tokens were sampled with, and those of now.

    Args:
        sampled: (N,) int64. Of each response token, -1 where none sampled it.
        current: (N,) int64. That the current log-probs were made with.
    """

    sampled: Tensor
    current: Tensor

    @classmethod
    def of(cls, block: Block) -> Interpolation:
        """That of a block.

        Raises:
            StageError: A capture does not say which weights its current log-probs are of.
        """
        lengths = block.packed.lengths
        return cls(block.packed.weight_versions, current_versions(block).repeat_interleave(lengths))

    def with_old(self, columns: dict[str, Tensor]) -> dict[str, Tensor]:
        """Columns and, in their dtype, the log-probs of the policy before the update."""
        pair = columns["log_probs"], columns["rollout_log_probs"]
        return columns | {OLD: proximal_log_probs(*pair, self.sampled, self.current)}


def current_versions(block: Block) -> Tensor:
    """(S,) int64. The weights that the current log-probs of each sample were made with.

    Raises:
        StageError: A capture does not say.
    """
    found: list[int] = []
    for cohort, (start, stop) in zip(block.cohorts, block.spans("response_length"), strict=True):
        stated = {
            entry.key.rank: origin.weight_version
            for entry in cohort.owners
            if (origin := entry.origins.get("log_probs")) is not None
        }
        for rank in block.packed.ranks[start:stop].tolist():
            version = stated.get(rank)
            if version is None:
                raise StageError(
                    f"rank {rank} does not say which weights its log_probs were made with, of "
                    "which an interpolated proximal policy is made",
                    hint="Give weight_version with capture.tensor('log_probs', ...).",
                )
            found.append(version)
    return torch.tensor(found, dtype=torch.int64)
