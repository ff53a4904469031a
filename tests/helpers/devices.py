"""The devices that a kernel is tested on, as parameters of a test, and a stand-in for one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

CUDA = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    ],
)
DEVICES = ("cpu", CUDA)


class Device:
    """Stands in for a CUDA device that runs behind the host: what is read too early is refused.

    Args:
        monkeypatch: Makes events of it those of torch.cuda.
    """

    type = "cuda"

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.queued = self.done = 0
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: device)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        monkeypatch.setattr(torch.cuda, "Event", lambda blocking: None)

    def record_event(self, event: None) -> Event:
        """What is queued so far."""
        self.queued += 1
        return Event(self, self.queued)

    def catch_up(self) -> None:
        """Do all that is queued."""
        self.done = self.queued

    def number(self, value: float) -> Any:
        """A scalar tensor of it."""
        return Number(self, value)


class Event:
    """An event of it; nobody may wait for one that is not there, as no training may."""

    def __init__(self, device: Device, at: int) -> None:
        self._device, self._at = device, at

    def query(self) -> bool:
        return self._device.done >= self._at

    def synchronize(self) -> None:
        assert self.query(), "a device is waited for"


class Number:
    """A scalar of it."""

    is_cuda = True

    def __init__(self, device: Device, value: float) -> None:
        self.device, self._value, self._at = device, value, device.queued + 1

    def detach(self) -> Number:
        return self

    def numel(self) -> int:
        return 1

    def to(self, device: str, *, non_blocking: bool) -> Number:
        """A copy on the host that a stream still has to make."""
        assert (device, non_blocking) == ("cpu", True), "a device is waited for"
        return Number(self.device, self._value)

    def item(self) -> float:
        assert self.device.done >= self._at, "a device is waited for"
        return self._value

    def __float__(self) -> float:
        return self.item()

    def fill_(self, value: float) -> None:
        self._value = value
