"""Copies of what is on a CUDA device, for which no thread that trains ever waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from trajreplay.schema.errors import CaptureError

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

    def copy(
        self,
        parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
        unused: Callable[[], None] = lambda: None,
    ) -> Any:
        """Queue copies, all of them by one way.

        Args:
            parts: At least one pair of pinned memory and the values for it, which are in no graph
                and on one CUDA device, the same for all.
            unused: Is called before it raises, where nothing was queued that fills the memory.

        Returns:
            The event after which all memory has its values; whoever reads it waits for that before.
        """
        import torch

        refuse_in_a_graph()
        training = torch.cuda.current_stream(parts[0][1].device)
        size = sum(values.nbytes for _, values in parts)
        if not self._allowed(size):
            for held, values in parts:
                held.copy_(values, non_blocking=True)
            return _marked(training)
        try:
            event = self._copy_clones(parts, training, unused)
        except BaseException:
            with self._lock:
                self._bytes -= size
            raise
        with self._lock:
            self._clones.append((event, size))
        return event

    def _copy_clones(
        self,
        parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
        training: torch.cuda.Stream,
        unused: Callable[[], None],
    ) -> Any:
        import torch

        try:
            clones = [values.clone() for _, values in parts]
        except BaseException:  # as where the device has no memory left
            unused()
            raise
        device = clones[0].device
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = self._streams[device]
        stream.wait_event(training.record_event())
        with torch.cuda.stream(stream):
            for (held, _), clone in zip(parts, clones, strict=True):
                clone.record_stream(stream)  # its memory is not used again before the copy is done
                held.copy_(clone, non_blocking=True)
        return _marked(stream)

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
        value: Its copy.
        copied: The event after which the copy has the value and lies in memory of the host; None
            where it lies on the device, and reading it waits.
    """

    def __init__(self, value: torch.Tensor, copied: Any) -> None:
        self._value, self._copied = value, copied

    def is_there(self) -> bool:
        """Whether reading it waits for nothing that a stream still has to do."""
        return self._copied is None or self._copied.query()

    def item(self) -> Any:
        """Its value; waits for it."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._value.item()

    def __float__(self) -> float:
        return float(self.item())


def copied(value: torch.Tensor) -> DeviceScalar:
    """A scalar of a device, in no graph, as it is now.

    That of a CUDA device goes to pinned memory in the stream of the training: no device memory is
    taken, and whoever reads it later, be it the training, waits for no other work of the device.

    Raises:
        ValueError: It is several numbers.
        CaptureError: A CUDA graph is being captured.
    """
    if value.numel() != 1:
        raise ValueError("expected one number")
    if not value.is_cuda:
        return DeviceScalar(value.clone(), None)
    import torch

    refuse_in_a_graph()
    held = value.to("cpu", non_blocking=True)  # to memory that torch pins, and does not wait for
    return DeviceScalar(held, _marked(torch.cuda.current_stream(value.device)))


def _marked(stream: Any) -> Any:
    """An event after what is queued on a stream; a thread that waits for it sleeps meanwhile."""
    import torch

    return stream.record_event(torch.cuda.Event(blocking=True))  # type: ignore[no-untyped-call]


def refuse_in_a_graph() -> None:
    """Refuse what a CUDA graph would do again, into memory that has another use by then.

    Asked before anything else is done: memory that is pinned, and an event that is asked for, may
    make a capture of the graph invalid.

    Raises:
        CaptureError: A CUDA graph is being captured.
    """
    import torch

    if torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            "values of a device are recorded while a CUDA graph is captured",
            hint="Record them after the graph was replayed, from the tensors that it fills.",
        )
