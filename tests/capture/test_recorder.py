"""The recorder: what it is told is what a replay finds, and what goes wrong is told, not raised."""

import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.cohorts import STEP_COLUMNS, record
from tests.helpers.recorded import (
    captured,
    enabled,
    micro_batch,
    reasons,
    record_rollout,
    record_step,
    switched,
)
from tests.helpers.scenes import WAY, drawn
from tests.helpers.trainer import Sample, Trainer
from trajreplay import CaptureError, Lake, RecomputeConfig, SampleRecord, capture
from trajreplay.capture import CaptureWarning, Recorder, Selection
from trajreplay.capture.taking.copies import Copier
from trajreplay.capture.taking.pending import Pending
from trajreplay.capture.taking.slots import Slots


class Untouchable:
    """An argument that may not be looked at."""

    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} was asked for")


def test_a_recorder_that_is_off_does_nothing_and_looks_at_nothing() -> None:
    recorder = capture.enable_from_env()
    thing = Untouchable()
    assert recorder.enabled is False
    with recorder.rollout(0):
        recorder.record(thing, log_probs=thing)  # type: ignore[arg-type]
    with recorder.step(0, 0):
        recorder.record_policy_loss(0, thing, scalars=thing, advantages=thing)  # type: ignore[arg-type]
        recorder.record_policy_loss(0, thing, thing, thing, thing, columns=thing)  # type: ignore[arg-type]
        recorder.record_value_loss(0, thing, values=thing)  # type: ignore[arg-type]
        recorder.record_scalars("loss.policy", thing)  # type: ignore[arg-type]
    recorder.describe_routes(thing, thing)  # type: ignore[arg-type]
    recorder.drop("")
    assert recorder.flush()
    assert recorder.close()


def test_what_is_recorded_replays(lake: Lake) -> None:
    recorder = enabled(lake)
    for rollout_id in range(2):
        samples = record_rollout(recorder, rollout_id)
        record_step(recorder, samples[:4], rollout_id, 0)
        record_step(recorder, samples[4:], rollout_id, 1)
    assert recorder.close()
    report = lake.replay()
    assert (report.verdict, len(report.cohorts)) == ("pass", 6)
    assert all(one.compared for cohort in report.cohorts for one in cohort.stages[:1])


def test_a_fault_in_what_is_recorded_is_found(lake: Lake) -> None:
    recorder = enabled(lake)
    samples = record_rollout(recorder)
    for one in samples:
        one.columns["advantages"] = one.columns["advantages"] * 1.5
    record_step(recorder, samples)
    recorder.close()
    assert lake.replay().first_divergent_stage == "sample"


@pytest.mark.parametrize("again", [1, 3])
def test_a_micro_batch_that_is_seen_again_is_taken_once(lake: Lake, again: int) -> None:
    recorder, samples = enabled(lake), drawn()
    with recorder.step(0, 0):
        for index in (0, 1):
            for _ in range(1 + again):
                micro_batch(recorder, index, samples[4 * index :][:4])
    recorder.close()
    (entry,) = captured(lake)
    assert entry.rows == 8
    assert lake.replay().verdict == "pass"


def test_a_loss_of_values_joins_the_micro_batch_of_its_policy(lake: Lake) -> None:
    recorder, samples = enabled(lake), drawn()
    values = [torch.ones(one.length) for one in samples]
    with recorder.step(0, 0):
        recorder.record_value_loss(1, [record(one) for one in samples[4:]], values=values[4:])
        micro_batch(recorder, 0, samples[:4])
        micro_batch(recorder, 1, samples[4:])
        recorder.record_value_loss(0, [record(one) for one in samples[:4]], values=values[:4])
    recorder.close()
    rows = lake.sql("select values, log_probs, micro_batch_id from steps order by sample_id")
    table = rows.arrow()
    assert table["values"].null_count == table["log_probs"].null_count == 0
    assert table["micro_batch_id"].to_pylist() == ["mb-0000"] * 4 + ["mb-0001"] * 4


def test_columns_of_some_micro_batches_are_null_in_the_others(lake: Lake) -> None:
    recorder, samples = enabled(lake), drawn()
    with recorder.step(0, 0):
        micro_batch(recorder, 0, samples[:2])
        micro_batch(recorder, 1, samples[2:4], ref_log_probs=[torch.ones(4), torch.ones(2)])
        micro_batch(recorder, 2, samples[4:])
    recorder.close()
    found = lake.sql("select ref_log_probs is null as none from steps order by row").arrow()
    assert found["none"].to_pylist() == [True, True, False, False, *[True] * 4]


def test_masks_are_handed_over_as_a_column_too(lake: Lake) -> None:
    recorder, samples = enabled(lake), drawn()
    whole = [record(one, ("micro_batch_id",)) for one in samples]
    records = [replace(one, loss_mask=()) for one in whole]
    masks = torch.nn.utils.rnn.pad_sequence(
        [torch.tensor(list(one.loss_mask)) for one in whole], batch_first=True
    )
    columns: dict[str, Any] = {
        name: [one.columns[name] for one in samples] for name in STEP_COLUMNS
    }
    with recorder.step(0, 0):
        recorder.record_policy_loss(0, [], scalars={"loss": 0.0})  # a rank may have no rows
        recorder.record_policy_loss(
            1,
            records,
            scalars=Trainer(WAY).loss(samples),
            reduction="sum",
            columns={"loss_mask": masks, **columns},
        )
    recorder.close()
    found = lake.sql("select loss_mask from steps order by row").arrow()["loss_mask"].to_pylist()
    assert found == [list(one.loss_mask) for one in whole]


def test_what_is_not_selected_is_not_copied(lake: Lake) -> None:
    chosen = capture.Selection(steps="1:0")
    recorder = enabled(lake, selection=chosen)
    with recorder.step(0, 0):
        recorder.record_policy_loss(0, [], advantages=Untouchable())
    for rollout_id in range(2):
        record_rollout(recorder, rollout_id)
        record_step(recorder, drawn(rollout_id=rollout_id), rollout_id)
    recorder.close()
    assert {(one.key.kind, one.key.rollout_id) for one in captured(lake)} == {
        ("rollout", 1),
        ("step", 1),
    }


def lenient(lake: Lake) -> Recorder:
    """A recorder as in production."""
    return enabled(lake, strict=False)


WRONG: dict[str, Callable[[Recorder, list[Sample]], None]] = {
    "without an index": lambda one, samples: micro_batch(one, None, samples),
    "another under its index": lambda one, samples: micro_batch(one, 0, samples[1:]),
    "ragged": lambda one, samples: micro_batch(one, 1, samples, log_probs=[torch.ones(1)]),
    "no samples": lambda one, _: one.record_policy_loss(1, None),  # type: ignore[arg-type]
    "unknown column": lambda one, samples: micro_batch(one, 1, samples, logits=[[1.0]] * 4),
    "a scalar that is none": lambda one, samples: micro_batch(one, 1, samples, scalars={"a": "b"}),
    "a column told twice": lambda one, samples: one.record_policy_loss(
        1, [record(three) for three in samples], log_probs=[], columns={"log_probs": []}
    ),
    "a sample twice": lambda one, samples: micro_batch(one, 1, samples[:1]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_goes_wrong_is_recorded_and_not_raised(lake: Lake, name: str) -> None:
    recorder, samples = lenient(lake), drawn()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with recorder.step(0, 0):
            micro_batch(recorder, 0, samples[:4])
            WRONG[name](recorder, samples[:4] if name == "a sample twice" else samples[4:])
        recorder.flush()
    record_step(recorder, samples, 0, 1)
    recorder.close()
    assert [one.category for one in told] == [CaptureWarning]
    assert [(one.key.step_id, one.status) for one in captured(lake)] == [
        (0, "dropped"),
        (1, "complete"),
    ]
    assert reasons(lake)[0]


@pytest.mark.parametrize("name", WRONG)
def test_what_goes_wrong_is_raised_where_that_is_asked_for(lake: Lake, name: str) -> None:
    recorder, samples = enabled(lake), drawn()

    def train() -> None:
        with recorder.step(0, 0):
            micro_batch(recorder, 0, samples[:4])
            WRONG[name](recorder, samples[:4] if name == "a sample twice" else samples[4:])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises((CaptureError, TypeError)):
            train()


def test_calls_out_of_order_are_told_and_not_raised(lake: Lake) -> None:
    recorder = lenient(lake)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        recorder.record([], log_probs=[])
        recorder.end_step()
        micro_batch(recorder, 0, drawn())
        recorder.begin_step(0, 0)
        recorder.begin_step(0, 1)
        recorder.end_step()
    recorder.close()
    assert len(told) == 3
    assert reasons(lake) == ["it was not ended when step 0 began"]


def test_an_exception_of_the_training_drops_the_capture_and_goes_on(lake: Lake) -> None:
    recorder = enabled(lake)

    def train() -> None:
        with recorder.step(0, 0):
            micro_batch(recorder, 0, drawn())
            raise ZeroDivisionError("loss")

    with pytest.raises(ZeroDivisionError):
        train()
    recorder.close()
    assert reasons(lake) == ["the step ended with ZeroDivisionError; of it 8 samples are lost"]


ODD: list[Any] = ["x", [1], object()]


@pytest.mark.parametrize("end", ["ends", "raises", "closes", "retires", "drops", "begins again"])
@pytest.mark.parametrize("odd", ODD, ids=["text", "list", "object"])
def test_no_source_of_a_sample_raises_and_its_step_is_noted(lake: Lake, odd: Any, end: str) -> None:
    """What a trainer gives is of any type; a step whose sources cannot be told is never lost."""
    recorder = enabled(lake, strict=False, selection=Selection(steps="0:0"))
    samples = [SampleRecord(f"s-{at}", 2, 3, [1, 1], source_rollout_id=odd) for at in range(2)]
    samples.append(SampleRecord("s-2", 2, 3, [1, 1]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        block = recorder.step(0, 0)
        block.__enter__()
        recorder.record_policy_loss(0, samples, {"loss": 1.0}, [[-1.0, -1.0]] * 3)
        if end == "raises":
            error = MemoryError("the training's own")
            block.__exit__(MemoryError, error, None)
        elif end == "ends":
            block.__exit__(None, None, None)
        elif end == "closes":
            assert recorder.close()
        elif end == "retires":
            recorder.retire()
        elif end == "drops":
            recorder.drop("loss-spike")
        else:
            recorder.begin_step(0, 1)
        assert recorder.close()
    assert [(one.key.step_id, one.status) for one in captured(lake)] == [(0, "dropped")]


def test_an_error_that_cannot_even_be_told_stays_in_the_recorder(lake: Lake) -> None:
    class OddError(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    class Values:
        def __iter__(self) -> Any:
            raise OddError

    recorder = enabled(lake, strict=False)
    recorder.begin_step(0, 0)
    with pytest.warns(CaptureWarning, match="record_policy_loss: OddError"):
        recorder.record_policy_loss(0, Values(), {})  # type: ignore[arg-type]
    recorder.end_step()
    assert recorder.close()
    assert [one.status for one in captured(lake)] == ["dropped"]


def test_what_is_open_at_the_end_is_noted_as_dropped(lake: Lake) -> None:
    recorder = enabled(lake)
    recorder.begin_step(0, 0)
    micro_batch(recorder, 0, drawn())
    recorder.close()
    assert reasons(lake) == ["recording was closed before it ended; of it 8 samples are lost"]


def test_a_rank_without_rows_is_captured(lake: Lake) -> None:
    recorder = enabled(lake)
    with recorder.step(0, 0):
        pass
    recorder.close()
    assert [one.status for one in captured(lake)] == ["complete"]


def test_each_start_is_another_attempt(lake: Lake) -> None:
    for expected in range(3):
        recorder = enabled(lake, resume_rollout_id=expected)
        assert recorder.attempt == expected
        record_rollout(recorder, expected)
        recorder.close()
    found = {one.key.attempt: one.resumed_from for one in captured(lake)}
    assert found == {0: None, 1: (0, 1), 2: (1, 2)}
    assert [one.attempt for one in lake.replay().cohorts] == [0, 1, 2]


def test_the_last_recorder_is_that_of_the_process(lake: Lake) -> None:
    assert capture.recorder().enabled is False
    first = enabled(lake)
    assert capture.recorder() is first
    second = capture.enable(switched(lake), settings=WAY.short)
    assert capture.recorder() is second
    with pytest.warns(CaptureWarning, match="closed before"), first.rollout(0):
        pass


def test_a_lake_that_cannot_be_made_switches_capture_off(lake: Lake) -> None:
    path = f"{lake.path}/lake.json/nested"
    with pytest.warns(CaptureWarning, match="nothing is captured"):
        recorder = enabled(path, strict=False)
    assert recorder.enabled is False


SECRET = "the prompt of a person"


@pytest.mark.parametrize(
    "error", [ValueError(SECRET), KeyError(SECRET), OSError(28, "No space left on device", SECRET)]
)
def test_the_text_of_an_error_never_reaches_the_lake(lake: Lake, error: Exception) -> None:
    recorder = enabled(lake)
    samples = record_rollout(recorder)

    def train() -> None:
        with recorder.step(0, 0):
            micro_batch(recorder, 0, samples[:2])
            raise error

    with pytest.raises(type(error)):
        train()
    recorder.close()
    (reason,) = reasons(lake)
    assert type(error).__name__ in reason
    for file in Path(lake.path).rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file


def test_a_recorder_whose_place_is_taken_notes_no_clean_end(lake: Lake) -> None:
    first = enabled(lake)
    record_step(first, record_rollout(first))
    second = enabled(lake)
    noted = "select count(*) as n from events where event = 'terminal'"
    assert Lake.open(lake.path).sql(noted).arrow().to_pylist() == [{"n": 0}]
    second.close()
    assert Lake.open(lake.path).sql(noted, attempt=1).arrow().to_pylist() == [{"n": 1}]


@pytest.mark.parametrize("as_torch", [False, True])
def test_choices_of_experts_are_those_at_the_time_they_were_handed_over(
    lake: Lake, as_torch: bool
) -> None:
    recorder, samples = enabled(lake), drawn()
    records = [record(one) for one in samples]
    made = routes_of(samples)
    routes: list[Any] = made if as_torch else [one.numpy() for one in made]
    kept = [one.flatten().tolist() for one in made]
    recorder.describe_routes(num_experts=8, layer_numbers=[2, 5])
    with recorder.rollout(0):
        recorder.record(records, rollout_experts=routes)
    with recorder.step(0, 0):
        for index in (0, 1):
            part = slice(4 * index, 4 * index + 4)
            choices: dict[str, Any] = {"old_experts": routes[part]} if index else {}
            recorder.record_policy_loss(
                index,
                records[part],
                scalars={"loss": 0.0},
                log_probs=[one.columns["log_probs"] for one in samples[part]],
                columns=choices,
            )
    for one in routes:
        one[:] = 0
    assert recorder.close()
    columns = "kind, row, num_experts, layer_numbers, rollout_experts, old_experts"
    found = lake.sql(f"select {columns} from routes").arrow().to_pylist()
    by_place = {(one["kind"], one["row"]): one for one in found}
    assert len(by_place) == 16
    for row, flat in enumerate(kept):
        assert by_place["rollout", row]["rollout_experts"] == flat
        assert by_place["step", row]["old_experts"] == (flat if row >= 4 else None)
    assert {(one["num_experts"], *one["layer_numbers"]) for one in found} == {(8, 2, 5)}


def routes_of(samples: Sequence[Sample]) -> list[torch.Tensor]:
    """Two layers, two experts of eight, for every token but the last."""
    total = [record(one).total_length for one in samples]
    return [torch.randint(0, 8, (length - 1, 2, 2), dtype=torch.int16) for length in total]


@pytest.mark.parametrize("wrong", ["few", "packed", "flat"])
def test_choices_of_another_form_give_the_capture_up_and_say_why(lake: Lake, wrong: str) -> None:
    recorder, samples = enabled(lake, strict=False), drawn()
    routes: Any = routes_of(samples)
    given = {"few": routes[:3], "packed": torch.cat(routes), "flat": [one[0] for one in routes]}
    records = [record(one) for one in samples]
    with pytest.warns(CaptureWarning):
        _record_and_close(recorder, records, given[wrong])
    (reason,) = reasons(lake)
    assert "rollout_experts" in reason


def _record_and_close(recorder: Recorder, records: Sequence[Any], routes: Any) -> None:
    with recorder.rollout(0):
        recorder.record(records, rollout_experts=routes)
    recorder.close()


FORMS: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "padded": lambda rows: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True),
    "one a sample": lambda rows: rows,
    "one a token": lambda rows: [[one.clone() for one in row] for row in rows],
    "one array a token": lambda rows: [[np.array(one.item()) for one in row] for row in rows],
}


def clear(values: Any) -> None:
    """Change in place whatever of it can be."""
    if isinstance(values, list):
        for one in values:
            clear(one)
    else:
        values[...] = 0


@settings(max_examples=8)  # each makes a lake
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any),
    forms=st.lists(st.sampled_from(sorted(FORMS)), min_size=3, max_size=3),
    seed=st.integers(0, 99),
)
def test_no_edit_after_the_hand_off_reaches_the_lake(
    lengths: list[int], forms: list[str], seed: int
) -> None:
    torch.manual_seed(seed)
    names = ("log_probs", "old_log_probs", "advantages")
    rows = {name: [torch.randn(one) for one in lengths] for name in names}
    given_now = {
        name: FORMS[form]([one.clone() for one in rows[name]])
        for name, form in zip(names, forms, strict=True)
    }
    mask = torch.ones(len(lengths), max(lengths), dtype=torch.uint8)
    loss = torch.tensor(1.5)
    records = [SampleRecord(f"s-{row}", one, one, ()) for row, one in enumerate(lengths)]
    with tempfile.TemporaryDirectory() as folder:
        recorder = enabled(Lake.create(f"{folder}/lake"))
        with recorder.step(0, 0):
            recorder.record_policy_loss(
                0, records, {"loss": loss}, columns={**given_now, "loss_mask": mask}
            )
            for one in (*given_now.values(), mask, loss):
                clear(one)
        recorder.close()
        lake = Lake.open(f"{folder}/lake")
        found = lake.sql(f"select {', '.join(names)}, loss_mask from steps order by row").arrow()
        value = lake.sql("select value from outputs where field = 'loss'").arrow()
    for name in names:
        assert found[name].to_pylist() == [one.tolist() for one in rows[name]]
    assert found["loss_mask"].to_pylist() == [[1] * one for one in lengths]
    assert value["value"].to_pylist() == [1.5]


@pytest.mark.parametrize("versions", [(3, 3), (3, 4), (3, 4, 3), (None, 3, 3)])
def test_origins_that_differ_between_micro_batches_are_those_of_none(
    lake: Lake, versions: tuple[int | None, ...]
) -> None:
    recorder, samples = lenient(lake), drawn()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with recorder.step(0, 0):
            for index, version in enumerate(versions):
                part = samples[2 * index : 2 * index + 2]
                recorder.record_policy_loss(
                    index,
                    [record(one) for one in part],
                    old_log_probs=[one.columns["old_log_probs"] for one in part],
                    origins={
                        "old_log_probs": {
                            "source": "trainer", "temperature": 1.0, "weight_version": version,
                        }
                    },
                )  # fmt: skip
    recorder.close()
    (entry,) = captured(lake)
    alike = len(set(versions) - {None}) == 1
    (origin,) = [one for name, one in entry.origins.items() if name == "old_log_probs"]
    assert (origin.source, origin.temperature) == ("trainer", 1.0)
    assert origin.weight_version == (3 if alike else None)
    assert ["weight_version of old_log_probs" in str(one.message) for one in told] == (
        [] if alike else [True]
    )


def test_text_and_lists_of_records_count_as_memory() -> None:
    pending = Pending(0, None, {}, Copier(Slots(1 << 20)))
    pending.append([SampleRecord("s", 10_000, 10_001, [1] * 10_000)], {})
    before = pending.held_bytes
    spans = [(at, at + 1, 7) for at in range(1000)]
    pending.append([SampleRecord("t", 1, 2, [1], prompt="p" * 50_000, weight_versions=spans)], {})
    assert before > 80_000
    assert pending.held_bytes - before > 50_000 + 100 * 1000


@settings(max_examples=10)  # each makes a lake
@given(
    form=st.sampled_from(["padded", "list", "array", "numbers"]),
    calls=st.integers(1, 6),
    held=st.booleans(),
)
def test_the_capture_that_is_open_takes_no_more_memory_than_may_wait(
    form: str, calls: int, held: bool
) -> None:
    limit, width = 2 << 20, 1 << 16
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        lake = Lake.create(f"{folder}/lake")
        bounds: dict[str, Any] = {"ring_bytes": limit, "keep_last": 2} if held else {}
        switches = switched(lake, strict=False, **{"queue_bytes": limit, **bounds})
        recorder = capture.enable(switches, settings=RecomputeConfig(), step_stages=["sample"])
        values = torch.zeros(2, width)
        forms: dict[str, Any] = {
            "padded": values,
            "list": list(values),
            "array": values.numpy(),
            "numbers": [[0.0] * width] * 2,
        }
        recorder.begin_step(0, 0)
        for number in range(calls):
            samples = [SampleRecord(f"{number}-{at}", width, width, ()) for at in range(2)]
            mask = torch.ones(2, width, dtype=torch.uint8)
            recorder.record_policy_loss(
                number, samples, {}, forms[form], columns={"loss_mask": mask}
            )
            pending = recorder._open["step"]  # type: ignore[attr-defined]
            assert pending.copier.held_bytes <= limit + (limit >> 2)  # slots are of a few sizes
        recorder.end_step()
        recorder.promote("a-test")
        assert recorder.close()
        taken = calls * 2 * width * ({"numbers": 8}.get(form, 4) + 1)
        (entry,) = captured(lake)
        assert entry.status == ("dropped" if taken > limit else "complete")
        assert bool(told) == (taken > limit)
        assert taken <= limit or "more would exceed" in entry.reason
