"""Copies from CUDA devices into pinned memory, for which no thread that trains ever waits."""

from __future__ import annotations

import threading
from collections import deque
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


class DeviceCopies:
    """Brings values of a device to the host, in order with what the training does to them.

    A copy is queued on the stream that trains, so that an edit in place comes after it: the
    device is as busy for as long as the copy takes. With device memory allowed, values are cloned
    there instead, and a stream of its own brings the clone to the host beside the training.

    Args:
        limit_bytes: Most device memory that clones take. Bytes.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes, self._bytes = limit_bytes, 0
        self._clones: deque[tuple[Any, int]] = deque()  # those under way, oldest first
        self._streams: dict[torch.device, Any] = {}
        self._lock = threading.Lock()

    def copy(self, held: torch.Tensor, values: torch.Tensor) -> Any:
        """Queue a copy.

        Args:
            held: Pinned memory.
            values: On a CUDA device, in no graph.

        Returns:
            The event after which `held` has them; whoever reads it waits for that before.
        """
        import torch

        training = torch.cuda.current_stream(values.device)
        if not self._allowed(values.nbytes):
            held.copy_(values, non_blocking=True)
            return training.record_event()
        clone = values.clone()
        if values.device not in self._streams:
            made = torch.cuda.Stream(values.device)  # type: ignore[no-untyped-call]
            self._streams[values.device] = made
        stream = self._streams[values.device]
        stream.wait_event(training.record_event())
        with torch.cuda.stream(stream):
            held.copy_(clone, non_blocking=True)
        clone.record_stream(stream)  # its memory is not used again before the copy is done
        event = stream.record_event()
        with self._lock:
            self._clones.append((event, values.nbytes))
        return event

    def _allowed(self, size: int) -> bool:
        """Whether a clone fits beside those whose copies are not done yet."""
        with self._lock:
            while self._clones and self._clones[0][0].query():
                self._bytes -= self._clones.popleft()[1]
            if self._bytes + size > self._limit_bytes:
                return False
            self._bytes += size
            return True
