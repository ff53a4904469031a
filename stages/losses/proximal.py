"""The proximal policy of a block where it is interpolated between the rollout's and the current."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trajreplay.schema.errors import StageError
from trajreplay.stages.block import Block
from trajreplay.stages.cohorts.spans import UNKNOWN
from trajreplay.stages.kernels import proximal_log_probs

OLD = "old_log_probs"


@dataclass(frozen=True)
class Interpolation:
    """The weights that tokens were sampled with, and those of now.

    Args:
        sampled: (N,) int64. Of each response token, UNKNOWN where none sampled it.
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
    found = np.concatenate([cohort.versions("log_probs") for cohort in block.cohorts])
    silent = (found == UNKNOWN).nonzero()[0]
    if len(silent):
        raise StageError(
            f"rank {int(block.packed.ranks[silent[0]])} does not say which weights its log_probs "
            "were made with, of which an interpolated proximal policy is made",
            hint="Give weight_version with capture.tensor('log_probs', ...).",
        )
    return torch.from_numpy(found)
