"""Copies from a CUDA device: in order with edits in place, bounded, and never waited for."""

from typing import Any

import pytest
import torch

from tests.helpers.devices import CUDA
from trajreplay.capture.copies import Copier, Slots

SHAPE = (8, 1 << 14)


@pytest.mark.parametrize("device", [CUDA])
@pytest.mark.parametrize("device_bytes", [0, 1 << 28])
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
