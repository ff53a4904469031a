"""Modes of torch that a training may be in: what is recorded in one is whole in another."""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.recorded import captured, enabled
from trajreplay import Lake, SampleRecord
from trajreplay.capture.taking.copies import Copier
from trajreplay.capture.taking.slots import Slots


@contextlib.contextmanager
def of_default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def on_default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "none": contextlib.nullcontext,
    "inference": torch.inference_mode,
    "no gradient": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default device": lambda: on_default_device("meta"),
    "device": lambda: torch.device("meta"),
    "default dtype": lambda: of_default_dtype(torch.float64),
    "half default dtype": lambda: of_default_dtype(torch.float16),
    "deterministic": deterministic,
    "anomaly": torch.autograd.detect_anomaly,
}
SEQUENCE = st.lists(st.lists(st.sampled_from(sorted(MODES)), max_size=2), min_size=2, max_size=4)


@contextlib.contextmanager
def within(names: list[str]) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(MODES[name]())
        yield


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@given(
    modes=SEQUENCE,
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.int64]),
    form=st.sampled_from(["padded", "list", "numbers", "in a graph"]),
    made_within=st.booleans(),
)
def test_memory_is_used_again_in_whatever_mode_a_training_is(
    modes: list[list[str]], dtype: torch.dtype, form: str, made_within: bool
) -> None:
    slots = Slots(1 << 20)
    for names in modes:
        whole = torch.arange(6.0).reshape(2, 3).to(dtype) - 3
        if form == "in a graph" and dtype.is_floating_point:
            whole = whole.requires_grad_() * 1
        with within(names):
            values = whole.clone() if made_within else whole
            if form == "list":
                values = list(values)  # type: ignore[assignment]
            elif form == "numbers":
                values = [list(row) for row in values]  # type: ignore[assignment]
            copier = Copier(slots)
            column = (values, [3, 2] if form in ("padded", "in a graph") else [3, 3])
            held = copier.columns({"log_probs": column[0]}, column[1]).blocks()["log_probs"]
        rows = held.rows()
        expected = [row[:length] for row, length in zip(whole, column[1], strict=True)]
        assert all(one.equal(row) for one, row in zip(rows, expected, strict=True))
        assert all(one.dtype is dtype and not one.requires_grad for one in rows)
        copier.release()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@settings(max_examples=6)  # each makes a lake
@given(modes=SEQUENCE)
def test_every_step_is_whole_in_whatever_mode_it_is_recorded(modes: list[list[str]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake.create(f"{folder}/lake")
        recorder = enabled(lake)
        for step, names in enumerate(modes):
            values, loss = -torch.rand(1, 2), torch.tensor(1.0)
            with within(names), recorder.step(step, 0):
                recorder.record_policy_loss(
                    0, [SampleRecord("s", 2, 3, [1, 1])], {"loss": loss}, log_probs=values
                )
            recorder.flush()  # so that its memory is used again
        assert recorder.close()
        assert {one.status for one in captured(lake)} == {"complete"}
        assert len(captured(lake)) == len(modes)
