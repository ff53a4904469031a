"""Host memory for copies, used again and again."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from trajreplay.capture.device import DeviceCopies

if TYPE_CHECKING:
    import torch

_LEAST_VALUES = 1024
_SIZES = 4  # between a power of two and the next, so that a slot is used again by what is alike


class Slot(NamedTuple):
    """Memory of a copy.

    Args:
        held: Its beginning, in the shape that was asked for.
        kind: dtype, number of values that there is room for, and whether it is pinned.
        size_bytes: All of it.
        filled: The event after which it has its values; None where it has them.
    """

    held: torch.Tensor
    kind: tuple[torch.dtype, int, bool]
    size_bytes: int
    filled: Any = None


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

    def take(self, dtype: torch.dtype, shape: Sequence[int], *, pinned: bool = False) -> Slot:
        """Memory for values in this shape, whatever it holds."""
        count = math.prod(shape)
        step = max(_LEAST_VALUES, (1 << (count - 1).bit_length()) // (2 * _SIZES))
        kind = dtype, max(step, -(-count // step) * step), pinned
        slot = self._kept(kind)
        if slot is None:
            import torch

            # Whatever the training is in the midst of: a tensor of inference, or on its default
            # device, would be of no use to what comes later.
            with torch.inference_mode(mode=False), torch.no_grad():
                fresh = torch.empty(kind[1], dtype=dtype, device="cpu", pin_memory=pinned)
            slot = Slot(fresh, kind, fresh.nbytes)
        if slot.held.shape == shape:  # as where batches are padded to one width
            return slot
        return slot._replace(held=slot.held.as_strided(shape, _strides(shape)))

    def _kept(self, kind: tuple[torch.dtype, int, bool]) -> Slot | None:
        with self._lock:
            idle = self._idle[kind]
            # A copy that was given up may still be under way into its slot.
            if idle and (idle[-1].filled is None or idle[-1].filled.query()):
                slot = idle.pop()
                self._idle_bytes -= slot.size_bytes
                return slot
        return None

    def give_back(self, slots: Sequence[Slot]) -> None:
        """Let slots be used again, whose values nobody reads any more."""
        with self._lock:
            for slot in slots:
                if self._idle_bytes + slot.size_bytes <= self._limit_bytes:
                    self._idle_bytes += slot.size_bytes
                    self._idle[slot.kind].append(slot)


def _strides(shape: Sequence[int]) -> list[int]:
    """Steps from one value to the next in each dimension, of values that lie together."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return strides[: len(shape)]
