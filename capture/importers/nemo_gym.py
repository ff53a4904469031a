"""Importer of rollouts that NeMo-Gym collected for training: JSON lines with the routes of a call.

Source: nemo_gym/rollout_collection.py and `TokenIDLogProbMixin` of nemo_gym/openai_utils.py, as of
mid 2026; NeMo-RL's envelope of routed experts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trajreplay.capture.importers.json_lines import (
    Float32s,
    Int32s,
    begins_with_no_object,
    first_names,
    float32s,
    objects,
    token_ids,
)
from trajreplay.capture.importers.places import below_or_damaged, is_plain_file, run_of
from trajreplay.capture.importers.registry import Importer, ImportOptions
from trajreplay.capture.importers.stating import refuse_statements, stated, trivial
from trajreplay.schema.bundles import fields as read
from trajreplay.schema.bundles.fields import Fields
from trajreplay.schema.bundles.r3 import decode_envelope
from trajreplay.schema.bundles.record import CaptureRecord
from trajreplay.schema.entry import LogProbOrigin
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import ProducerInfo
from trajreplay.schema.records import SampleRecord

_NAMES = frozenset({"responses_create_params", "response", "reward"})
_CALL = "generation_token_ids"
_NUMBER = re.compile(r"(0|[1-9][0-9]{0,17})\Z")
_NO_LOSS = "neither the trainer's log-probs nor a loss are recorded"
_FACTS = {
    "rollout_id": "not recorded: the number that the name of the file ends in, else 0",
    "loss_mask": "not recorded: 1 for every token that the call generated",
}


@dataclass(frozen=True)
class _Call:
    """One call of the model: a sample."""

    record: SampleRecord
    log_probs: Float32s
    routes: Any


def _find(path: Path) -> Iterable[Path]:
    def wanted(one: Path) -> bool:
        return one.suffix == ".jsonl" and is_plain_file(one) and first_names(one) >= _NAMES

    return below_or_damaged(path, wanted, begins_with_no_object, _family)


def _family(path: Path) -> str | None:
    """The name but for its number; without one, another file of any name is no sign of it."""
    numbered = path.suffix == ".jsonl" and _NUMBER.search(path.stem)
    return path.stem[: numbered.start()] if numbered else None


def _read(path: Path, options: ImportOptions) -> Sequence[CaptureRecord]:
    if options.group_by_position is not None:
        only = ImportOptions(group_by_position=options.group_by_position)
        refuse_statements(only, "samples of a task are a group, and its number is recorded")
    calls = [call for line, one in enumerate(objects(path)) for call in _calls(one, line)]
    if not calls:
        raise DatasetError(
            f"{path}: no output has {_CALL}, expected those of the calls that are trained on",
            hint="Collect rollouts with return_token_ids, as for a training.",
            path=str(path),
        )
    number = _NUMBER.search(path.stem)
    without = sum(call.routes is None for call in calls)
    notes = (f"{path}: {without} of {len(calls)} calls have no routed_experts",) if without else ()
    grouped = calls[0].record.group_id is not None
    said = stated(options, trivial(_NO_LOSS), grouped=grouped)
    return [
        CaptureRecord(
            run_id=run_of(options, path.parent),
            rollout_id=int(number[1]) if number else 0,
            step_id=None,
            settings=said.settings,
            samples=tuple(call.record for call in calls),
            tensors={"rollout_log_probs": [call.log_probs for call in calls]},
            routes={"rollout_experts": [call.routes for call in calls]},
            stages=said.stages,
            origins={"rollout_log_probs": LogProbOrigin("sampler")},
            producer=ProducerInfo(
                role="rollout", framework="nemo-gym", extra={**_FACTS, **said.facts}
            ),
            notes=notes,
        )
    ]


def _calls(one: Fields, line: int) -> Iterator[_Call]:
    """The calls of one trajectory that hold what is trained on."""
    outputs = [item for item in one.object("response").objects("output") if _CALL in item]
    reward = one.get("reward", read.number)
    task = one.get("_ng_task_index", read.count) if "_ng_task_index" in one else None
    name = f"line-{line}"
    if task is not None and "_ng_rollout_index" in one:
        name = f"task-{task}/{one.get('_ng_rollout_index', read.count)}"
    for place, item in enumerate(outputs):
        prompt, answer = (item.get(key, token_ids) for key in ("prompt_token_ids", _CALL))
        log_probs = item.get("generation_log_probs", float32s)
        if len(log_probs) != len(answer):
            raise item.error(
                "generation_log_probs", f"has {len(log_probs)} values", f"{len(answer)}, as {_CALL}"
            )
        several = len(outputs) > 1
        record = SampleRecord(
            f"{name}/{place}" if several else name,
            len(answer),
            len(prompt) + len(answer),
            np.ones(len(answer), np.uint8),
            group_id=None if task is None else f"task-{task}",
            raw_reward=reward,
            trajectory_id=name if several else None,
            fragment_index=place if several else None,
        )
        yield _Call(record, log_probs, _routes(item, prompt, answer))


def _routes(item: Fields, prompt: Int32s, answer: Int32s) -> Any:
    """(tokens, layers, top_k) Of the tokens of a call, the last of which may lack."""
    routes = item.get("routed_experts", _decoded, None)
    total = len(prompt) + len(answer)
    if routes is not None and len(routes) not in (total, total - 1):
        raise item.error(
            "routed_experts",
            f"has routes of {len(routes)} tokens",
            f"{total}, as prompt and answer have, or one less",
        )
    return routes


def _decoded(value: Any) -> Any:
    """An envelope, or nested lists of integers."""
    if type(value) is str:
        return decode_envelope(value)
    if type(value) is not list:
        raise ValueError("an envelope nrlre1:DTYPE:SxLxK:..., or nested lists")
    found = np.array(value)
    if found.ndim != 3 or found.dtype.kind != "i":
        raise ValueError("lists of tokens of layers of integers")
    narrow = found.astype(np.int16)  # as NeMo-RL holds what comes as lists
    return narrow if np.array_equal(narrow, found) else found


NEMO_GYM = Importer(
    kind="nemo-gym",
    doc="Rollouts that NeMo-Gym collected for a training, a trajectory a line, with their routes.",
    find=_find,
    read=_read,
)
