"""A bundle that was written, read back: it says what the captures say that it was written from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trajreplay.schema.bundles.record import CaptureRecord
from trajreplay.schema.bundles.relax.bundle import read_bundle
from trajreplay.schema.bundles.relax.results import TOKEN_COLUMNS
from trajreplay.schema.errors import CaptureError, TrajReplayError
from trajreplay.schema.identity import BY_RANK, GLOBAL, own_prefix

_PLAIN = ("sample_id", "response_length", "total_length", "raw_reward", "reward", "micro_batch_id")
_INSTEAD = "Export a lake instead: trajreplay export lake."


def check_reads_back(folder: Path, records: Sequence[CaptureRecord], where: str) -> None:
    """Refuse a bundle that would be refused, or says anything else than its captures.

    Args:
        folder: The bundle.
        records: The captures.
        where: What they are, for messages.

    Raises:
        CaptureError: It would be refused, or a value of it is another.
    """
    scoped = all(own_prefix(one.producer.to_json(), one.rank) for one in records)
    try:
        found = read_bundle(folder, run_id=records[0].run_id, ids=BY_RANK if scoped else GLOBAL)
    except TrajReplayError as error:
        message = error.message.replace(f"{folder}/", "").replace(str(folder), folder.name)
        raise CaptureError(
            f"{where}: a bundle of it would be refused: {message}", hint=_INSTEAD
        ) from error
    in_order = sorted(records, key=lambda one: one.rank)
    wrong = [name for pair in zip(in_order, found, strict=True) for name in _differences(*pair)]
    if wrong:
        raise CaptureError(
            f"{where}: a bundle would say something else of {', '.join(dict.fromkeys(wrong))}",
            hint=_INSTEAD,
        )


def _differences(mine: CaptureRecord, theirs: CaptureRecord) -> Iterator[str]:
    for name in ("rank", "expected_ranks", "rollout_id", "step_id"):
        if getattr(mine, name) != getattr(theirs, name):
            yield name
    blank = all(one.reward is one.raw_reward is None for one in mine.samples)
    for name in _PLAIN:
        if blank and name in ("raw_reward", "reward"):
            continue  # zeros stand for them where the loss is claimed alone
        if _values(mine, name) != _values(theirs, name):
            yield name
    for one, other in zip(mine.samples, theirs.samples, strict=False):
        if not np.array_equal(np.asarray(one.loss_mask), np.asarray(other.loss_mask)):
            yield "loss_mask"
            break
    if not blank and _numbered(mine) != _numbered(theirs):
        yield "groups"
    for name in TOKEN_COLUMNS:
        if _bits(mine.tensors.get(name)) != _bits(theirs.tensors.get(name)):
            yield name


def _values(record: CaptureRecord, name: str) -> list[Any]:
    return [getattr(one, name) for one in record.samples]


def _numbered(record: CaptureRecord) -> list[int | None]:
    """Groups by the order in which they appear: their names are numbers in a bundle."""
    seen: dict[str, int] = {}
    names = [
        one.group_id if one.group_index is None else f"g-{one.group_index}"
        for one in record.samples
    ]
    return [None if name is None else seen.setdefault(name, len(seen)) for name in names]


def _bits(tensor: Any) -> tuple[str, bytes] | None:
    return None if tensor is None else (tensor.dtype, tensor.values.tobytes())
