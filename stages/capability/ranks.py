"""What the V2 matrix says of settings by which it matters which rank holds what."""

from __future__ import annotations

from collections.abc import Collection

from trajreplay.schema.identity import ParallelCoordinates
from trajreplay.schema.settings import Settings
from trajreplay.schema.shards import SHARDED

# All-gathered shards are handed on as zigzag ones before anything is whitened.
_HELD = ("zigzag", "contiguous")


def of_ranks(
    stage: str, settings: Settings, parallel: ParallelCoordinates, columns: Collection[str]
) -> str:
    """Why a stage that goes by ranks or their rows cannot be recomputed; empty if it can.

    Args:
        stage: The stage.
        settings: The arithmetic in force.
        parallel: Where a capturing rank stands.
        columns: Columns that the capture holds.
    """
    context, rows = settings.layout.context, "context_size" in columns
    said = "rows say which shard of their sample they are"
    if stage == "reward.post_process" and settings.reward.grouping == "stride" and rows:
        return f"reward.grouping is 'stride', and {said}"
    for name in ("whiten", "whiten_centre") if stage == "advantage.estimate" else ():
        sets = getattr(settings.advantage, name)
        what = f"advantage.{name} is {sets!r}"
        if sets not in ("rank", "context-rank"):
            continue
        if rows:
            return f"{what}, and {said}"
        if parallel.context_size == 1:
            continue
        if sets == "rank" and context in SHARDED:
            return f"{what} and layout.context is {context!r}: ranks hold parts of samples"
        if sets == "context-rank" and context not in _HELD:
            return f"{what} and layout.context is {context!r}; v2 recomputes 'zigzag', 'contiguous'"
    return ""
