"""The file of micro-batches that prime-rl packs for one rank, read within bounds.

Source: MicroBatch of src/prime_rl/transport/types.py, 0.8, an array of 16 fields by position.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import numpy as np

from trajreplay.capture.importers.places import opened
from trajreplay.schema.bundles.fields import shown
from trajreplay.schema.errors import DatasetError

_FIELDS = (
    *("input_ids", "loss_mask", "advantages", "inference_logprobs", "position_ids"),
    *("sequence_lengths", "temperatures", "env_names", "seq_lens", "ref_logprobs"),
    *("routed_experts", "mm_kwargs", "mm_token_type_ids", "rl_weights", "ce_weights"),
    "ref_kl_weights",
)
_NEEDED = _FIELDS[:8]
# What each list holds, as numpy's kind of it; those of names are lists of text.
_KINDS = {
    **dict.fromkeys(("input_ids", "position_ids", "sequence_lengths"), "i"),
    "loss_mask": "b",
    **dict.fromkeys(("advantages", "inference_logprobs", "temperatures", "ref_logprobs"), "f"),
}
NOT_TAKEN = _FIELDS[10:]
_LARGEST = float(np.finfo(np.float32).max)
_MAX_FILE_BYTES = 8 << 30
_MAX_LISTS = 1024  # in one micro-batch: its fields, and what images and experts bring


def begins(path: Path) -> bool:
    """Whether a file begins with a list of lists of eight or more fields, the first a list."""
    try:
        with opened(path) as file:
            start = file.read(16)
    except (DatasetError, OSError):
        return False
    for least in (1, len(_NEEDED), 0):
        found = _list_at(start)
        if found is None or found[0] < least:
            return False
        start = start[found[1] :]
    return True


def _list_at(start: bytes) -> tuple[int, int] | None:
    """The length of the list that bytes begin with, and the size of its head."""
    if start and 0x90 <= start[0] <= 0x9F:
        return start[0] & 0xF, 1
    size = {0xDC: 2, 0xDD: 4}.get(start[0]) if start else None
    if size is None or len(start) <= size:
        return None
    return int.from_bytes(start[1 : size + 1], "big"), size + 1


def micro_batches(path: Path) -> Iterator[dict[str, Any]]:
    """The micro-batches of a file, one at a time in memory."""
    with opened(path) as file:
        budget = _Budget()
        unpacker = msgpack.Unpacker(
            file,
            list_hook=budget.take,
            max_buffer_size=_MAX_FILE_BYTES,
            max_map_len=_MAX_LISTS,
            # Memory is asked for by the length a list claims; each of its values takes a byte.
            max_array_len=os.fstat(file.fileno()).st_size,
        )
        try:
            for number in range(unpacker.read_array_header()):
                budget.lists = 0
                yield _batch(unpacker.unpack(), f"{path}, micro-batch {number}")
            if unpacker.read_bytes(1):
                raise odd(str(path), "goes on after its last micro-batch")
        except (
            msgpack.UnpackException,
            ValueError,
            OverflowError,
            RecursionError,
            MemoryError,
        ) as error:
            what = str(error) or type(error).__name__
            raise odd(str(path), f"is no whole file of packed micro-batches: {what}") from error


class _Budget:
    """Turns lists into arrays as they are read, and refuses more of them than a batch can have."""

    def __init__(self) -> None:
        self.lists = 0

    def take(self, values: list[Any]) -> Any:
        """A list of numbers as an array; any other as it is."""
        self.lists += 1
        if self.lists > _MAX_LISTS:
            raise ValueError(f"more than {_MAX_LISTS} lists in one micro-batch")
        kinds = set(map(type, values))
        return np.array(values) if kinds <= {int} or kinds <= {float} or kinds == {bool} else values


def _batch(values: Any, where: str) -> dict[str, Any]:
    """The fields of a micro-batch by name, each of its kind and length."""
    if type(values) is not list or len(values) != len(_FIELDS):
        raise odd(
            where, f"is {shown(values)}, expected a list of {len(_FIELDS)} fields as 0.8 has them"
        )
    batch = dict(zip(_FIELDS, values, strict=True))
    for name, kind in _KINDS.items():
        if batch[name] is not None or name in _NEEDED:
            batch[name] = _numbers(batch[name], kind, name, where)
    names = batch["env_names"]
    if isinstance(names, np.ndarray) and not len(names):
        names = batch["env_names"] = []
    if type(names) is not list or not set(map(type, names)) <= {str}:
        raise odd(where, f"env_names is {shown(names)}, expected a list of names")
    _check_lengths(batch, where)
    return batch


def _numbers(values: Any, kind: str, name: str, where: str) -> Any:
    """A list of one kind of number; an empty one is of none, and taken for it."""
    if isinstance(values, np.ndarray) and not len(values):
        return values.astype({"b": bool}.get(kind, kind))
    if not isinstance(values, np.ndarray) or values.ndim != 1 or values.dtype.kind != kind:
        raise odd(where, f"{name} is {shown(values)}, expected a list of one kind of number")
    if kind == "f" and (np.isfinite(values) & (np.abs(values) > _LARGEST)).any():
        raise odd(where, f"{name} has numbers that float32 cannot hold")
    return values


def _check_lengths(batch: dict[str, Any], where: str) -> None:
    ids, lengths = batch["input_ids"], batch["sequence_lengths"]
    for name in (*_NEEDED, "ref_logprobs"):
        if name != "sequence_lengths" and batch[name] is not None and len(batch[name]) != len(ids):
            raise odd(where, f"{name} has {len(batch[name])} values, expected {len(ids)}")
    if ((lengths < 0) | (lengths > len(ids))).any() or lengths.sum() != len(ids):
        raise odd(where, f"sequence_lengths add up to {lengths.sum()}, expected {len(ids)} tokens")
    if len(ids) and not 0 <= ids.min() <= ids.max() < 2**31:
        raise odd(where, "input_ids has values outside 0 to 2147483647")


def odd(where: str, what: str) -> DatasetError:
    """What to raise of a file that this version of prime-rl did not write so."""
    return DatasetError(
        f"{where}: {what}",
        hint="Another version of prime-rl may have written it, or it is damaged: get it again.",
        path=where,
    )
