"""The trained tokens that a loss does not reject, for stages before it that go by them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch import Tensor

from trajreplay.schema.settings import LossSettings
from trajreplay.stages.cohorts.packed import Packed
from trajreplay.stages.compose import LossInputs, kept_tokens, moved_bounds

_NONE: Mapping[str, Tensor] = MappingProxyType({})


def remaining_tokens(
    packed: Packed,
    loss: LossSettings,
    replaced: Mapping[str, Tensor] = _NONE,
    against: float = 0.0,
) -> Tensor:
    """(N,) bool. What is kept, false where masked.

    Args:
        packed: The samples.
        loss: The loss, which says what is rejected.
        replaced: Columns to read instead of the recorded ones.
        against: How far the bounds that reject tokens are moved.
    """
    names = ("old_log_probs", "rollout_log_probs")
    given = LossInputs(
        {one: replaced.get(one, packed.tokens(one)) for one in names},
        packed.mask,
        packed.offsets,
        packed.micro_batches if loss.m2_threshold is not None else None,
        packed.cohorts,
    )
    if against:
        loss = moved_bounds(loss, 0.0, against, longest=int(packed.lengths.max()))
    kept = kept_tokens(loss, given)
    return packed.mask if kept is None else kept
