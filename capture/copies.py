"""Copies of what a trainer hands over, made at once into memory that is used again and again."""

from __future__ import annotations

import copy
import itertools
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trajreplay.capture.device import DeviceCopies
from trajreplay.schema.errors import CaptureError

if TYPE_CHECKING:
    import torch

_LEAST_VALUES = 1024


class Block(NamedTuple):
    """Copied values of some samples; cut into rows when they are written, not before.

    Args:
        held: All of them packed, or padded to (samples, tokens), or a list with one for each.
        lengths: Tokens of each sample; None where `held` is a list.
    """

    held: Any
    lengths: Sequence[int] | None

    def rows(self) -> list[Any]:
        """One value a sample: its tokens as a tensor, array or list, or None."""
        held, lengths = self
        if lengths is None:
            return list(held)
        if held.ndim == 2:
            return [held[row, :length] for row, length in enumerate(lengths)]
        ends = list(itertools.accumulate(lengths))
        return [held[end - length : end] for end, length in zip(ends, lengths, strict=True)]


class Slot(NamedTuple):
    """Memory of a copy, and the event after which it has its values; None where it has them."""

    memory: torch.Tensor
    filled: Any


class Slots:
    """Host memory for copies. A fresh page costs more than the copy into it, so slots are kept.

    Args:
        limit_bytes: Most that may lie idle.
        device_bytes: Device memory that copies from it may take.

    Attributes:
        device: What brings values of a CUDA device into pinned slots.
    """

    def __init__(self, limit_bytes: int, device_bytes: int = 0) -> None:
        self._limit_bytes = limit_bytes
        self._idle_bytes = 0
        self._lock = threading.Lock()  # one thread takes, another gives back
        self._idle: dict[tuple[torch.dtype, int, bool], list[Slot]] = defaultdict(list)
        self.device = DeviceCopies(device_bytes)

    def take(self, dtype: torch.dtype, count: int, *, pinned: bool = False) -> torch.Tensor:
        """A flat tensor of at least `count` values, whatever they are."""
        import torch

        capacity = max(_LEAST_VALUES, 1 << (count - 1).bit_length())
        with self._lock:
            idle = self._idle[dtype, capacity, pinned]
            # A copy that was given up may still be under way into its slot.
            if idle and (idle[-1].filled is None or idle[-1].filled.query()):
                slot = idle.pop().memory
                self._idle_bytes -= slot.nbytes
                return slot
        return torch.empty(capacity, dtype=dtype, pin_memory=pinned)

    def give_back(self, slots: Sequence[Slot]) -> None:
        """Let slots be used again, whose values nobody reads any more."""
        with self._lock:
            for slot in slots:
                memory = slot.memory
                if self._idle_bytes + memory.nbytes <= self._limit_bytes:
                    self._idle_bytes += memory.nbytes
                    kind = memory.dtype, memory.numel(), slot.filled is not None
                    self._idle[kind].append(slot)


class Copier:
    """Copies values into slots and remembers which, for one capture.

    Args:
        slots: Where the memory comes from.

    Attributes:
        held_bytes: Memory that the copies take.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._taken: list[Slot] = []
        self.held_bytes = 0

    def wait(self) -> None:
        """Wait until all values are there; for a thread that reads them, and never for training."""
        for _, filled in self._taken:
            if filled is not None:
                filled.synchronize()

    def release(self) -> None:
        """Give the memory back: the copies are written, or given up."""
        self._slots.give_back(self._taken)
        self._taken = []

    def block(self, name: str, values: Any, lengths: Sequence[int]) -> Block:
        """Copy a column of some samples.

        Args:
            name: The column, for messages.
            values: A tensor or array of all samples packed, or padded on the right to (S, T); or
                one tensor, array, list or None per sample.
            lengths: Tokens of each sample.

        Raises:
            CaptureError: The values have another form, or another number of rows.
        """
        dimensions = getattr(values, "ndim", None)
        if dimensions == 2:
            rows, width = values.shape
            if rows != len(lengths):
                raise _odd_form(name, f"has {rows} rows for {len(lengths)} samples")
            if rows and max(lengths) > width:
                raise _odd_form(name, f"has {width} columns for a sample of {max(lengths)} tokens")
            return Block(self._whole(values), lengths)
        if dimensions == 1 and getattr(values, "dtype", None) != np.dtype(object):
            if len(values) != sum(lengths):
                raise _odd_form(name, f"has {len(values)} packed values for {sum(lengths)} tokens")
            return Block(self._whole(values), lengths)
        if dimensions is not None or isinstance(values, (str, bytes)):
            raise _odd_form(name, f"has {dimensions} dimensions")
        if len(values) != len(lengths):
            raise _odd_form(name, f"has {len(values)} rows for {len(lengths)} samples")
        return self._joined(values) or Block([self.value(one) for one in values], None)

    def routes(self, name: str, values: Any, samples: int) -> Block:
        """Copy choices of experts, one (tokens, layers, top_k) array or None per sample.

        Raises:
            CaptureError: There are more or fewer.
        """
        if hasattr(values, "ndim") or len(values) != samples:
            found = f"has {values.ndim} dimensions" if hasattr(values, "ndim") else ""
            raise CaptureError(
                f"{name} {found or f'has {len(values)} rows for {samples} samples'}",
                hint="Give a list with one (tokens, layers, top_k) array per sample.",
                column=name,
            )
        held = []
        for one in values:
            flat = None if one is None else self.value(one.reshape(-1))
            held.append(None if flat is None else flat.reshape(one.shape))
        return Block(held, None)

    def value(self, value: Any) -> Any:
        """Copy one value of any make."""
        if _is_torch(value):
            return self._whole(value)
        self.held_bytes += getattr(value, "nbytes", 8 * len(value) if value is not None else 0)
        return copy.copy(value)

    def _whole(self, values: Any) -> Any:
        if not _is_torch(values):
            array = np.array(values)
            self.held_bytes += array.nbytes
            return array
        return self._filled([values.detach()], values.shape)

    def _joined(self, values: Sequence[Any]) -> Block | None:
        """Copies of many small tensors in one; None where they are not of one kind."""
        if not values or not _is_torch(values[0]):
            return None
        torch, lengths = sys.modules["torch"], []
        dtype, device = values[0].dtype, values[0].device
        for one in values:
            if type(one) is not torch.Tensor or one.dtype is not dtype or one.ndim != 1:
                return None
            if one.device != device:
                return None
            lengths.append(one.numel())
        with torch.no_grad():
            held = self._filled(values, (sum(lengths),))
        return Block(held, lengths)

    def _filled(self, values: Sequence[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        """Tensors of one dtype and device one after the other, in a slot of this shape."""
        first, count = values[0], sum(one.numel() for one in values)
        slot = self._slots.take(first.dtype, count, pinned=first.is_cuda)
        self.held_bytes += slot.nbytes
        held, filled = _shaped(slot, shape), None
        if first.is_cuda:
            ends = itertools.accumulate(one.numel() for one in values)
            parts = [
                (slot[end - one.numel() : end].view(one.shape), one)
                for end, one in zip(ends, values, strict=True)
            ]
            filled = self._slots.device.copy(parts)
        elif len(values) == 1:
            held.copy_(first)
        else:
            import torch

            torch.cat([one.cpu() for one in values], out=held)
        self._taken.append(Slot(slot, filled))
        return held


def _shaped(slot: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The beginning of a slot in a shape, by one operation where a slice and a view are two."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return slot.as_strided(shape, strides[: len(shape)])


def _is_torch(value: Any) -> bool:
    """Whether it is a tensor; a trainer without torch never loads it for this."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _odd_form(name: str, found: str) -> CaptureError:
    return CaptureError(
        f"{name} {found}",
        hint="Give one tensor per sample, all of them packed, or padded to (samples, tokens).",
        column=name,
    )
