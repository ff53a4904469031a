"""Copies from a CUDA device: in order with edits in place, bounded, and never waited for."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from tests.helpers.devices import CUDA, Device
from trajreplay import CaptureError
from trajreplay.capture.taking.copies import Copier
from trajreplay.capture.taking.device import DeviceCopies, DeviceScalar
from trajreplay.capture.taking.slots import Slots
from trajreplay.capture.taking.values import kept

SHAPE = (8, 1 << 14)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("device_bytes", [0, 1 << 16, 1 << 28])  # for none, one row and all
@pytest.mark.parametrize("form", ["padded", "list", "strided"])
def test_a_copy_is_not_waited_for_and_precedes_later_edits(
    device: str, device_bytes: int, form: str
) -> None:
    slots, lengths = Slots(1 << 28, device_bytes), [SHAPE[1]] * SHAPE[0]
    warm = Copier(slots)  # the driver may wait where it pins memory
    warm.block("kl", torch.ones(SHAPE, device=device), lengths)
    warm.wait()
    warm.release()
    values = torch.randn(SHAPE[1], SHAPE[0], device=device).T
    given: Any = values if form == "strided" else values.contiguous()
    expected = given.cpu()
    if form == "list":
        given = list(given)
    busy = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    copier = Copier(slots)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            busy = busy @ busy
        block = copier.block("kl", given, lengths)
        for one in given if form == "list" else [given]:
            one.fill_(9.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    copier.wait()
    assert torch.stack(block.rows()).equal(expected)
    copier.release()


@pytest.mark.parametrize("device", [CUDA])
def test_clones_take_no_more_device_memory_than_is_allowed(device: str) -> None:
    values = torch.ones(SHAPE, device=device)
    slots = Slots(1 << 28, 2 * values.nbytes)
    busy = torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    copiers = [Copier(slots) for _ in range(6)]
    for _ in range(20):
        torch.mm(busy, busy)
    for one in copiers:
        one.block("kl", values, [SHAPE[1]] * SHAPE[0])
    assert torch.cuda.memory_allocated() - before <= 2 * values.nbytes + busy.nbytes
    for one in copiers:
        one.wait()


class Stream:
    """Stands in for a stream of CUDA; an event of it is the stream."""

    def record_event(self, event: None = None) -> "Stream":
        return self

    def wait_event(self, event: "Stream") -> None:
        assert event is not self

    def query(self) -> bool:
        return False


@pytest.mark.parametrize("fitting", [0, 1, 2])
def test_parts_of_a_column_go_by_one_way(monkeypatch: pytest.MonkeyPatch, fitting: int) -> None:
    training, side = Stream(), Stream()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: training)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: side)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    held, values = torch.zeros(2, 4), torch.rand(2, 4)
    event = DeviceCopies(fitting * values[0].nbytes).copy(list(zip(held, values, strict=True)))
    assert event is (side if fitting == 2 else training)
    assert held.equal(values)


def test_a_clone_without_memory_gives_its_bound_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.Tensor, "clone", full)
    values = torch.ones(4)
    copies = DeviceCopies(values.nbytes)
    for _ in range(2):  # a clone is tried again, as nothing is under way
        with pytest.raises(torch.OutOfMemoryError):
            copies.copy([(torch.empty(4), values)])


def test_a_scalar_of_a_device_is_read_after_its_event() -> None:
    copy = torch.zeros(())

    class Copied:
        def synchronize(self) -> None:
            copy.fill_(2.0)

    assert float(DeviceScalar(copy, Copied())) == 2.0


def test_what_a_graph_would_do_again_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(CaptureError, match="a CUDA graph is captured"):
        kept(device.number(1.0))
    with pytest.raises(CaptureError, match="a CUDA graph is captured"):
        DeviceCopies(0).copy([(torch.empty(1), torch.ones(1))])


class OnDevice(torch.Tensor):
    """Stands in for values of a CUDA device: whatever is computed of them is refused."""

    is_cuda, is_cpu = True, False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        assert name in ("detach", "__get__", "numel", "__len__"), f"{name} disturbs a graph"
        kwargs = kwargs or {}
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


FORMS: dict[str, Callable[[Copier, torch.Tensor], Any]] = {
    "padded": lambda copier, values: copier.block("kl", values, [4, 4]),
    "columns": lambda copier, values: copier.columns({"kl": values}, [4, 4]),
    "value": lambda copier, values: copier.value(values),
    "numbers": lambda copier, values: copier.value([values, values]),
    "routes": lambda copier, values: copier.routes("routes", [values], 1),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_graph_is_not_disturbed_before_its_values_are_refused(
    monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    asked: list[str] = []

    class Filled:
        def query(self) -> bool:
            asked.append("event")
            return True

    slots = Slots(1 << 20)
    slot = slots.take(torch.float32, (8,))
    kept_slot = slot._replace(kind=(*slot.kind[:2], True), filled=Filled())
    slots.give_back([kept_slot])
    idle = slots._idle_bytes
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: asked.append("stream"))
    monkeypatch.setattr(slots, "take", lambda *_, **__: asked.append("memory"))
    shape = (1,) if form == "numbers" else (2, 4)
    values = torch.zeros(shape).as_subclass(OnDevice)
    with pytest.raises(CaptureError, match="a CUDA graph is captured"):
        FORMS[form](Copier(slots), values)
    assert (asked, slots._idle_bytes) == ([], idle)


def test_a_slot_that_nothing_was_queued_into_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory is left")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.Tensor, "clone", full)
    slots = Slots(1 << 20, 1 << 20)
    slot = slots.take(torch.float32, (2, 4))
    slots.give_back([slot._replace(kind=(*slot.kind[:2], True))])  # as if it were pinned
    idle = slots._idle_bytes
    values = torch.zeros(2, 4).as_subclass(OnDevice)
    copier = Copier(slots)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            copier.block("kl", values, [4, 4])
        assert slots._idle_bytes == idle
    copier.release()
    assert slots._idle_bytes == idle


@pytest.mark.parametrize("device", [CUDA])
def test_a_capture_within_a_graph_is_refused_and_the_graph_is_whole(device: str) -> None:
    value = torch.zeros((), device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        value.add_(1.0)
        with pytest.raises(CaptureError, match="a CUDA graph is captured"):
            kept(value)
    graph.replay()
    assert float(value) == 1.0


@pytest.mark.parametrize("device", [CUDA])
def test_scalars_of_a_device_take_none_of_its_memory(device: str) -> None:
    values = torch.arange(4096.0, device=device)
    parts = list(values)
    before = torch.cuda.memory_allocated()
    held = [kept(one) for one in parts]
    assert torch.cuda.memory_allocated() == before
    values.zero_()
    assert [float(one) for one in held] == list(range(4096))


@pytest.mark.parametrize("device", [CUDA])
def test_a_scalar_that_is_there_is_read_without_waiting_for_what_came_later(device: str) -> None:
    busy, value = torch.randn(4096, 4096, device=device), torch.ones((), device=device)
    held = kept(value)
    torch.cuda.synchronize()
    assert held.is_there()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            busy = busy @ busy
        assert float(held) == 1.0
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_several_numbers_of_a_device_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    several = Device(monkeypatch).number(1.0)
    monkeypatch.setattr(type(several), "numel", lambda self: 2)
    with pytest.raises(CaptureError, match="for one number"):
        kept(several)


@pytest.mark.parametrize("device", [CUDA])
def test_a_scalar_of_another_stream_is_read_as_it_was(device: str) -> None:
    busy, value = torch.randn(4096, 4096, device=device), torch.zeros((), device=device)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
        for _ in range(20):
            busy = busy @ busy
        value.fill_(2.0)
        held = kept(value)
        value.fill_(9.0)
    assert float(held) == 2.0


@pytest.mark.parametrize("device", [CUDA])
def test_rows_of_several_devices_are_copied_each_from_its_own(device: str) -> None:
    copier = Copier(Slots(1 << 20))
    rows = [torch.ones(3, device=device), torch.zeros(2), torch.ones(1, device=device)]
    block = copier.block("kl", rows, [3, 2, 1])
    copier.wait()
    assert [one.tolist() for one in block.rows()] == [[1.0] * 3, [0.0] * 2, [1.0]]
