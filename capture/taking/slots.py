"""Host memory for copies, made ready before it is asked for, and used again and again."""

from __future__ import annotations

import functools
import math
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from trajreplay.capture.taking.device import DeviceCopies

if TYPE_CHECKING:
    import torch

READY_BYTES = 1 << 24  # of either kind
_LEAST_VALUES = 1024
_SIZES = 4  # between a power of two and the next, so that a slot is used again by what is alike
_ALIGNED = 64


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

    What is taken belongs to who took it until it is given back. Where no slot is idle, one is cut
    from memory that was made ready; where that is used up, there is new memory.

    Args:
        limit_bytes: Most that may lie idle, what was made ready included.
        device_bytes: Device memory that copies from it may take.

    Attributes:
        device: What brings values of a CUDA device into pinned slots.
    """

    def __init__(self, limit_bytes: int, device_bytes: int = 0) -> None:
        self._limit_bytes = limit_bytes
        self._idle_bytes = 0
        self._lock = threading.Lock()  # one thread takes, another gives back
        self._idle: dict[tuple[torch.dtype, int, bool], list[Slot]] = defaultdict(list)
        self._uncut: dict[bool, torch.Tensor] = {}  # bytes that were made ready, by being pinned
        self._settled: set[bool] = set()  # what is ready by being pinned, or never will be
        self.device = DeviceCopies(device_bytes)

    def make_ready(self) -> None:
        """Make memory ready, once; for a thread beside the training, and called until it is.

        Pinned memory is, once the program uses CUDA: a driver may stop the thread that asks for it.
        Where slots that were used lie idle instead, up to the limit, none is needed.
        """
        torch = sys.modules.get("torch")
        size = min(READY_BYTES, self._limit_bytes // 4)
        for pinned in (False, True):
            if torch is None or pinned in self._settled or not size:
                continue
            try:
                if pinned and not torch.cuda.is_initialized():
                    continue
                if self._has_taken_room(size):
                    self._fill_room(size, pinned=pinned)
            except (AttributeError, RuntimeError):  # torch is being loaded, or memory is short
                continue
            self._settled.add(pinned)

    def _has_taken_room(self, size: int) -> bool:
        """Whether as much more may lie idle; counted as if it did from here on."""
        with self._lock:
            if self._idle_bytes + size > self._limit_bytes:
                return False
            self._idle_bytes += size
            return True

    def _fill_room(self, size: int, *, pinned: bool) -> None:
        """Make bytes ready for which room was taken; it is given back where there are none."""
        import torch

        try:
            # Written once, so that they have their pages.
            fresh = _fresh(torch.uint8, size, pinned=pinned).zero_()
        except BaseException:
            with self._lock:
                self._idle_bytes -= size
            raise
        with self._lock:
            self._uncut[pinned] = fresh

    def take(self, dtype: torch.dtype, shape: tuple[int, ...], *, pinned: bool = False) -> Slot:
        """Memory for values in this shape, whatever it holds."""
        kind = _kind(dtype, shape, pinned)
        slot = None
        with self._lock:
            idle = self._idle[kind]
            # A copy that was given up may still be under way into its slot.
            if idle and (idle[-1].filled is None or idle[-1].filled.query()):
                slot = idle.pop()
                self._idle_bytes -= slot.size_bytes
        if slot is None and (slot := self._cut(kind)) is None:
            fresh = _fresh(dtype, kind[1], pinned=pinned)
            slot = Slot(fresh, kind, fresh.nbytes)
        if slot.held.shape == shape:  # as where batches are padded to one width
            return slot
        return Slot(slot.held.as_strided(shape, _strides(shape)), kind, slot.size_bytes)

    def _cut(self, kind: tuple[torch.dtype, int, bool]) -> Slot | None:
        """A slot of what was made ready and never used, if there is room."""
        dtype, count, pinned = kind
        size = dtype.itemsize * count
        with self._lock:
            uncut = self._uncut.get(pinned)
            if uncut is None or len(uncut) < size:
                return None
            import torch

            with torch.inference_mode(mode=False), torch.no_grad():
                held = uncut[:size].view(dtype)
                self._uncut[pinned] = uncut[-(-size // _ALIGNED) * _ALIGNED :]
            self._idle_bytes -= len(uncut) - len(self._uncut[pinned])
        return Slot(held, kind, size)

    def give_back(self, slots: Sequence[Slot]) -> None:
        """Let slots be used again, whose values nobody reads any more."""
        with self._lock:
            for slot in slots:
                if self._idle_bytes + slot.size_bytes <= self._limit_bytes:
                    self._idle_bytes += slot.size_bytes
                    self._idle[slot.kind].append(slot)


@functools.lru_cache(maxsize=256)
def _kind(
    dtype: torch.dtype, shape: tuple[int, ...], pinned: bool
) -> tuple[torch.dtype, int, bool]:
    """What a slot for values in this shape is."""
    count = math.prod(shape)
    step = max(_LEAST_VALUES, (1 << (count - 1).bit_length()) // (2 * _SIZES))
    return dtype, -(-count // step) * step or step, pinned


def _fresh(dtype: torch.dtype, count: int, *, pinned: bool) -> torch.Tensor:
    import torch

    # Whatever the training is in the midst of: a tensor of inference, or on its default
    # device, would be of no use to what comes later.
    with torch.inference_mode(mode=False), torch.no_grad():
        return torch.empty(count, dtype=dtype, device="cpu", pin_memory=pinned)


def _strides(shape: Sequence[int]) -> list[int]:
    """Steps from one value to the next in each dimension, of values that lie together."""
    strides = [1]
    for size in reversed(shape[1:]):
        strides.insert(0, strides[0] * size)
    return strides[: len(shape)]
