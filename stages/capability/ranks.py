"""What the V2 matrix says of settings by which it matters which rank holds what."""

from __future__ import annotations

from collections.abc import Collection

from trajreplay.schema.identity import ParallelCoordinates
from trajreplay.schema.settings import LayoutSettings, Settings
from trajreplay.schema.shards import SHARDED

# All-gathered shards are handed on as zigzag ones before anything is whitened.
_HELD = ("zigzag", "contiguous")


def uneven(layout: LayoutSettings, size: int) -> str:
    """Why a sequence cannot be cut into chunks for so many ranks; empty if it can."""
    multiple = layout.context_multiple
    if size == 1 or multiple is None or layout.context not in SHARDED:
        return ""
    chunks = 2 * size if layout.context == "zigzag" else size
    if multiple > 0 and multiple % chunks == 0:
        return ""
    return (
        f"layout.context_multiple is {multiple}, and {layout.context!r} over {size} ranks cuts "
        f"sequences into {chunks} chunks of one length"
    )


def unpadded(layout: LayoutSettings, columns: Collection[str]) -> str:
    """Why it cannot be told where sequences of ranks were cut; empty if it can."""
    if layout.context_padding == "sequence" or layout.context not in SHARDED:
        return ""
    stated = f"layout.context_padding is {layout.context_padding!r}"
    if layout.context == "all-gather":
        return f"{stated} and layout.context is 'all-gather', which cuts no sequence by itself"
    return "" if "padded_length" in columns else f"{stated}, and padded_length was not captured"


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
