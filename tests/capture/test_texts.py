"""No text of a training enters a lake but under the redaction policy, whatever is wrong with it."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.recorded import captured, reasons, switched
from trajreplay import Lake, RecomputeConfig, SampleRecord, capture
from trajreplay.capture import Recorder

MARK = "Jane Doe"  # what a reader of the lake may not find
TEXTS = [f'{MARK}\'s diagnosis is "x"\n' * 9, f"My name is {MARK}. " * 40, f"{MARK} \\' {MARK}" * 9]
STAGE = "loss.policy"
ONE = SampleRecord("s", 2, 3, [1, 1], raw_reward=1.0)


def loss(recorder: Recorder, *records: SampleRecord, **changes: Any) -> None:
    """A step of one micro-batch."""
    given_now: dict[str, Any] = {"scalars": {"loss": 1.0}, "log_probs": -torch.ones(1, 2)}
    index = changes.pop("index", 0)
    with recorder.step(0, 0, **changes.pop("options", {})):
        recorder.record_policy_loss(index, records or [ONE], **{**given_now, **changes})


def rollout(recorder: Recorder, record: SampleRecord, **columns: Any) -> None:
    with recorder.rollout(0):
        recorder.record([record], **columns)


def again(recorder: Recorder, text: str) -> None:
    with recorder.step(0, 0):
        recorder.record_policy_loss(0, [ONE], {"loss": 1.0})
        recorder.record_policy_loss(0, [replace(ONE, sample_id=text)], {"loss": 1.0})


def routes(recorder: Recorder, **common: Any) -> None:
    recorder.describe_routes(**common)
    rollout(recorder, ONE, rollout_experts=[torch.zeros(3, 1, 1, dtype=torch.int16)])


def open_and(recorder: Recorder, call: Callable[[], object]) -> None:
    recorder.begin_step(0, 0)
    call()
    recorder.end_step()


def noted(recorder: Recorder, *given_now: Any) -> None:
    with recorder.rollout(0):
        recorder.note(*given_now)


def of_log_probs(**said: Any) -> dict[str, Any]:
    return {"log_probs": {"source": "trainer", **said}}


def ended(recorder: Recorder, text: str) -> None:
    recorder.begin_step(0, 0)
    recorder.end_step(**{text: math.nan, "loss": text})


def promoted(recorder: Recorder, text: str) -> None:
    loss(recorder)
    recorder.promote(text)


def said(text: str) -> dict[str, Any]:
    return {text: 1}


def guarded(recorder: Recorder, text: str) -> None:
    with recorder.guard(text):
        raise ValueError(text)


def raised(recorder: Recorder, text: str) -> None:
    with pytest.raises(RuntimeError), recorder.step(0, 0):
        raise RuntimeError(text)


IDS = ("sample_id", "group_id", "consumer_batch_id", "trajectory_id", "agent_id", "episode_id")
PLACES: dict[str, Callable[[Recorder, str], object]] = {
    **{
        one: lambda r, t, one=one: loss(r, replace(ONE, **{one: t}))  # type: ignore[misc]
        for one in IDS
    },
    "sample_id, long": lambda r, t: loss(r, replace(ONE, sample_id=t, response_length=9)),
    "a sample twice": lambda r, t: loss(r, *[replace(ONE, sample_id=t[:60])] * 2),
    "an odd mask": lambda r, t: loss(r, replace(ONE, sample_id=t[:60], loss_mask=[1, 7])),
    "a prompt": lambda r, t: loss(r, replace(ONE, prompt=t, response=t, label=t, tool_output=t)),
    "a list of prompts": lambda r, t: loss(r, replace(ONE, prompt=[t])),  # type: ignore[arg-type]
    "mask": lambda r, t: loss(r, replace(ONE, loss_mask=t)),
    "mask of texts": lambda r, t: loss(r, replace(ONE, loss_mask=[t, t])),
    "count": lambda r, t: loss(r, replace(ONE, turns=t)),  # type: ignore[arg-type]
    "group_index": lambda r, t: loss(r, replace(ONE, group_index=t)),  # type: ignore[arg-type]
    "reward": lambda r, t: loss(r, replace(ONE, reward=t)),  # type: ignore[arg-type]
    "rewards": lambda r, t: rollout(r, replace(ONE, reward_components={t: 1.0})),
    "reward in rewards": lambda r, t: rollout(r, replace(ONE, reward_components={"a": t})),  # type: ignore[dict-item]
    "spans": lambda r, t: rollout(r, replace(ONE, weight_versions=[(0, 2, t)])),  # type: ignore[list-item]
    "column": lambda r, t: loss(r, columns={t: torch.ones(1, 2)}),
    "column of another form": lambda r, t: loss(r, columns={t: torch.ones(7)}),
    "column of a rollout": lambda r, t: rollout(r, ONE, **{t: torch.ones(1, 2)}),
    "column twice": lambda r, t: loss(r, columns={"log_probs": t}),
    "values": lambda r, t: loss(r, log_probs=[t]),
    "values of texts": lambda r, t: loss(r, log_probs=[[t, t]]),
    "values behind a number": lambda r, t: loss(r, log_probs=[[1.0, t]]),
    "scalar": lambda r, t: loss(r, scalars={"loss": t}),
    "name of a scalar": lambda r, t: loss(r, scalars={t: 1.0}),
    "name of no number": lambda r, t: loss(r, scalars={t: math.nan}),
    "origin": lambda r, t: loss(r, origins={"log_probs": {"source": t}}),
    "origin copied": lambda r, t: loss(r, origins={"log_probs": {"source": f"copy:{t}"}}),
    "origin of a column": lambda r, t: loss(r, origins={t: {"source": "trainer"}}),
    "origin of a name": lambda r, t: loss(r, origins={"log_probs": {t: 1}}),
    "version": lambda r, t: loss(r, origins=of_log_probs(weight_version=t)),
    "temperature": lambda r, t: loss(r, origins=of_log_probs(temperature=t)),
    "reduction": lambda r, t: loss(r, reduction=t),
    "scale": lambda r, t: loss(r, scale=t),
    "denominator": lambda r, t: loss(r, denominator=t),
    "index": lambda r, t: loss(r, index=t),
    "another under its index": again,
    "settings": lambda r, t: loss(r, options={"settings": t}),
    "stages": lambda r, t: loss(r, options={"stages": [t]}),
    "option": lambda r, t: loss(r, options={t: 1}),
    "cohort_size": lambda r, t: loss(r, options={"cohort_size": t}),
    "step": lambda r, t: r.begin_step(0, t),  # type: ignore[arg-type]
    "stage": lambda r, t: open_and(r, lambda: r.record_scalars(t, {"loss": 1.0})),
    "scope": lambda r, t: open_and(r, lambda: r.record_scalars(STAGE, {"a": 1}, scope=t)),
    "meaning": lambda r, t: open_and(r, lambda: r.record_scalars(STAGE, {"a": 1}, **said(t))),
    "scalar of the end": ended,
    "drop": lambda r, t: open_and(r, lambda: r.drop(t)),
    "promote": promoted,
    "guard": lambda r, t: open_and(r, lambda: guarded(r, t)),
    "error": raised,
    "fate": lambda r, t: noted(r, t, ["s"]),
    "reason of a fate": lambda r, t: noted(r, "filtered", ["s"], t),
    "sample of a fate": lambda r, t: noted(r, "scored", [t]),
    "experts": lambda r, t: routes(r, num_experts=t),
    "layers": lambda r, t: routes(r, layer_numbers=[t]),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::trajreplay.capture.CaptureWarning")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("keep_last", [0, 2])
def test_no_text_enters_a_lake(lake: Lake, place: str, keep_last: int) -> None:
    for text in TEXTS:
        recorder = capture.enable(
            switched(lake, strict=False, keep_last=keep_last),
            settings=RecomputeConfig(),
            step_stages=["sample"],
            rollout_stages=["sample"],
        )
        PLACES[place](recorder, text)
        recorder.promote("of-a-test")
        recorder.close()
    for file in Path(lake.path).rglob("*"):
        if file.is_file():
            assert MARK.encode() not in file.read_bytes(), (file, reasons(lake))
    assert captured(lake) or place == "step"
