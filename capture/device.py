"""Copies of what is on a CUDA device, for which no thread that trains ever waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
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

    def copy(self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Queue copies, all of them by one way.

        Args:
            parts: At least one pair of pinned memory and the values for it, which are in no graph
                and on one CUDA device, the same for all.

        Returns:
            The event after which all memory has its values; whoever reads it waits for that before.
        """
        import torch

        training = torch.cuda.current_stream(parts[0][1].device)
        size = sum(values.nbytes for _, values in parts)
        if not self._allowed(size):
            for held, values in parts:
                held.copy_(values, non_blocking=True)
            return training.record_event()
        try:
            event = self._copy_clones(parts, training)
        except BaseException:
            with self._lock:
                self._bytes -= size
            raise
        with self._lock:
            self._clones.append((event, size))
        return event

    def _copy_clones(
        self, parts: Sequence[tuple[torch.Tensor, torch.Tensor]], training: torch.cuda.Stream
    ) -> Any:
        import torch

        clones = [values.clone() for _, values in parts]
        device = clones[0].device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_event(training.record_event())
        with torch.cuda.stream(stream):
            for (held, _), clone in zip(parts, clones, strict=True):
                held.copy_(clone, non_blocking=True)
        for clone in clones:
            clone.record_stream(stream)  # its memory is not used again before the copy is done
        return stream.record_event()

    def _allowed(self, size: int) -> bool:
        """Whether a clone fits beside those whose copies are not done yet."""
        with self._lock:
            while self._clones and self._clones[0][0].query():
                self._bytes -= self._clones.popleft()[1]
            if self._bytes + size > self._limit_bytes:
                return False
            self._bytes += size
            return True


class DeviceScalar:
    """A scalar of a device as it was when it was handed over; `float` waits for it.

    Args:
        value: Its clone.
        cloned: The event after which the clone has the value; None where reading it waits.
    """

    def __init__(self, value: torch.Tensor, cloned: Any) -> None:
        self._value, self._cloned = value, cloned

    def is_there(self) -> bool:
        """Whether reading it waits for nothing that a stream still has to do."""
        return self._cloned is None or self._cloned.query()

    def item(self) -> Any:
        """Its value; waits for it."""
        if self._cloned is not None:  # the thread that reads has a stream of its own
            self._cloned.synchronize()
        return self._value.item()

    def __float__(self) -> float:
        return float(self.item())


def cloned(value: torch.Tensor) -> DeviceScalar:
    """A scalar of a device, in no graph, as it is now."""
    clone, event = value.clone(), None
    if value.is_cuda:
        import torch

        event = torch.cuda.current_stream(value.device).record_event()
    return DeviceScalar(clone, event)
