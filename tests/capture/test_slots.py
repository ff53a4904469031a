"""Memory for copies: ready beforehand, used again, and never while anybody still reads it."""

import math
import tempfile
import time
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.recorded import captured, switched
from trajreplay import Lake, RecomputeConfig, SampleRecord, capture
from trajreplay.capture import Selection
from trajreplay.capture.taking import slots as slots_module
from trajreplay.capture.taking.copies import Copier
from trajreplay.capture.taking.slots import READY_BYTES, Slots

LIMIT = 1 << 26


@given(
    taken=st.lists(
        st.tuples(
            st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64]),
            st.integers(0, 5000),
            st.booleans(),  # whether one that is held is given back before
        ),
        max_size=30,
    ),
    ready=st.booleans(),
)
def test_no_two_that_are_held_share_memory(
    taken: list[tuple[torch.dtype, int, bool]], ready: bool
) -> None:
    slots = Slots(1 << 18)
    if ready:
        slots.make_ready()
    held: list[tuple[Any, torch.Tensor]] = []
    for number, (dtype, count, returned) in enumerate(taken):
        if returned and held:
            slots.give_back([held.pop(number % len(held))[0]])
        slot = slots.take(dtype, (count,))
        slot.held.fill_(number)
        held.append((slot, slot.held.clone()))
    assert all(slot.held.equal(values) for slot, values in held)


def test_what_is_made_ready_is_taken_first_and_once() -> None:
    slots = Slots(LIMIT)
    slots.make_ready()
    slots.make_ready()
    first = [slots.take(torch.float32, (1 << 18,)) for _ in range(READY_BYTES >> 20)]
    places = [one.held.untyped_storage().data_ptr() for one in first]
    assert len(set(places)) == 1
    assert len({one.held.data_ptr() for one in first}) == len(first)
    fresh = slots.take(torch.float32, (1 << 18,))
    assert fresh.held.untyped_storage().data_ptr() != places[0]
    slots.give_back(first)
    again = slots.take(torch.float32, (1 << 18,))
    assert again.held.data_ptr() in {one.held.data_ptr() for one in first}


@pytest.mark.parametrize("limit", [0, 1, 1000, 1 << 16, 1 << 20])
def test_what_lies_idle_is_bounded_with_what_was_made_ready(limit: int) -> None:
    slots = Slots(limit)
    slots.make_ready()
    held = [slots.take(torch.uint8, (3000,)) for _ in range(1000)]
    slots.give_back(held)
    assert slots._idle_bytes <= limit
    kept = [one for some in slots._idle.values() for one in some]
    uncut = sum(map(len, slots._uncut.values()))
    assert sum(one.size_bytes for one in kept) + uncut <= limit + 64 * len(kept)


def test_a_training_finds_memory_that_was_made_ready(lake: Lake) -> None:
    recorder = capture.enable(switched(lake), settings=RecomputeConfig())
    slots = recorder._outlet.slots  # type: ignore[attr-defined]
    deadline = time.monotonic() + 30.0
    while not slots._uncut and time.monotonic() < deadline:
        time.sleep(0.01)
    record(recorder, 0, torch.zeros(1, 8), 0.0)
    assert 0 < len(slots._uncut[False]) < READY_BYTES
    recorder.close()


def record(recorder: Any, step: int, values: torch.Tensor, loss: float) -> None:
    """Record a step of one micro-batch with one sample a row."""
    width = values.shape[1]
    samples = [SampleRecord(f"s-{at}", width, width, [1] * width) for at in range(len(values))]
    with recorder.step(step, 0):
        columns = {"entropy": 2 * values, "kl": [*(3 * values)]}
        recorder.record_policy_loss(0, samples, {"loss": loss}, values, columns=columns)


ACTS = st.sampled_from(["step", "rollout", "step", "spike", "promote", "drop", "flush"])


QUERIES = (
    "select rollout_id, null, log_probs from rollouts order by rollout_id, row",
    "select rollout_id, step_id, log_probs, entropy, kl from steps order by rollout_id, row",
)


@settings(max_examples=15)  # each makes a lake
@given(
    acts=st.lists(st.tuples(ACTS, st.integers(1, 3), st.sampled_from([5, 6, 300])), max_size=14),
    keep=st.integers(0, 3),
    by_consumer=st.booleans(),
    ring_bytes=st.sampled_from([1 << 13, 1 << 17]),
    queue_bytes=st.sampled_from([1, 1 << 14, 1 << 26]),
)
def test_what_reaches_the_lake_is_what_was_handed_over_bit_for_bit(
    acts: list[tuple[str, int, int]],
    keep: int,
    by_consumer: bool,
    ring_bytes: int,
    queue_bytes: int,
) -> None:
    """Whatever is held, promoted, dropped or written, and in whatever order."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lake = Lake.create(f"{folder}/lake")
        switches = switched(
            lake,
            strict=False,
            keep_last=keep,
            ring_bytes=ring_bytes,
            queue_bytes=queue_bytes,
            selection=Selection(steps="every:2") if by_consumer else Selection(),
        )
        stages = ["sample"]
        recorder = capture.enable(
            switches, settings=RecomputeConfig(), rollout_stages=stages, step_stages=stages
        )
        working = torch.empty(3, 300)  # what a training writes over, step by step
        handed: dict[tuple[int, int | None], torch.Tensor] = {}
        for number, (act, rows, width) in enumerate(acts):
            values = working[:rows, :width]
            values.copy_(-torch.rand(rows, width))
            if act in ("step", "spike"):
                record(recorder, number, values, math.nan if act == "spike" else 0.0)
                handed[number, 0] = values.clone()
            elif act == "rollout":
                samples = [SampleRecord(f"s-{at}", width, width, [1] * width) for at in range(rows)]
                with recorder.rollout(number):
                    recorder.record(samples, log_probs=values)
                handed[number, None] = values.clone()
            elif act == "drop":
                recorder.begin_step(number, 0)
                recorder.record_policy_loss(
                    0, [SampleRecord("s", width, width, [1] * width)], {}, values[:1]
                )
                recorder.drop("a-test")
            elif act == "promote":
                recorder.promote("a-test")
            else:
                recorder.flush()
            values.fill_(9.0)
        recorder.close()
        entries = {(one.key.rollout_id, one.key.step_id): one.status for one in captured(lake)}
        whole = {place for place, status in entries.items() if status == "complete"}
        assert whole <= handed.keys()
        found: dict[tuple[int, int | None], list[list[Any]]] = {}
        for query in QUERIES:
            for rollout_id, step_id, *lists in zip(
                *lake.sql(query).arrow().to_pydict().values(), strict=True
            ):
                found.setdefault((rollout_id, step_id), []).append(lists)
        assert found.keys() == whole
        for place, listed in found.items():
            for factor, column in zip((1, 2, 3), zip(*listed, strict=True), strict=False):
                assert torch.tensor(column).equal(factor * handed[place])


def test_a_slot_that_is_still_being_filled_is_not_used_again() -> None:
    class Late:
        done = False

        def query(self) -> bool:
            return self.done

    slots, event = Slots(LIMIT), Late()
    slot = slots.take(torch.float32, (8,))
    slots.give_back([slot._replace(filled=event)])
    other = slots.take(torch.float32, (8,))
    assert other.held.data_ptr() != slot.held.data_ptr()
    event.done = True
    again = slots.take(torch.float32, (8,))
    assert (again.held.data_ptr(), again.filled) == (slot.held.data_ptr(), event)


def test_a_copier_that_let_go_gives_nothing_back_again() -> None:
    slots = Slots(LIMIT)
    copier = Copier(slots)
    copier.block("kl", torch.ones(1, 8), [8])
    copier.release()
    copier.release()
    first, second = (slots.take(torch.float32, (1, 8)) for _ in range(2))
    assert first.held.data_ptr() != second.held.data_ptr()


def test_memory_for_which_there_is_no_room_is_asked_for_by_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    fresh = slots_module._fresh

    def counted(dtype: torch.dtype, count: int, *, pinned: bool) -> torch.Tensor:
        made.append(count)
        return fresh(dtype, count, pinned=pinned)

    slots = Slots(LIMIT)
    used = [slots.take(torch.uint8, (LIMIT // 4 * 15 // 16,)) for _ in range(4)]
    slots.give_back(used)  # torch was loaded after the first captures
    idle = slots._idle_bytes
    assert idle + READY_BYTES > LIMIT
    monkeypatch.setattr(slots_module, "_fresh", counted)
    for _ in range(3):
        slots.make_ready()
    assert (made, slots._idle_bytes) == ([], idle)
    slots.take(torch.uint8, (used[0].size_bytes,))  # there is room again, and slots that were used
    slots.make_ready()
    assert (made, slots._uncut) == ([], {})


def test_memory_that_is_short_is_asked_for_again_and_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def short(dtype: torch.dtype, count: int, *, pinned: bool) -> torch.Tensor:
        raise RuntimeError("no memory is left")

    slots = Slots(LIMIT)
    with monkeypatch.context() as patched:
        patched.setattr(slots_module, "_fresh", short)
        slots.make_ready()
    assert (slots._idle_bytes, slots._uncut) == (0, {})
    slots.make_ready()
    assert slots._idle_bytes == len(slots._uncut[False]) == READY_BYTES
