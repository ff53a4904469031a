"""Rollout dumps of slime and Relax: the samples of a rollout as they were generated and scored.

Source: slime/utils/types.py (Sample) and slime/ray/rollout.py, 0.3; relax train_dump_utils.py.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trajreplay.capture.importers.places import run_of
from trajreplay.capture.importers.registry import ImportOptions
from trajreplay.capture.importers.stating import groups_by_position, stated
from trajreplay.capture.importers.torch_dumps import (
    ROUTES,
    integers,
    load_fields,
    routes_of,
    scalar,
    vector,
)
from trajreplay.schema.bundles import fields as read
from trajreplay.schema.bundles.fields import Fields
from trajreplay.schema.bundles.record import CaptureRecord
from trajreplay.schema.entry import LogProbOrigin
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import ProducerInfo
from trajreplay.schema.records import SampleRecord

FOLDERS = ("rollout_data", "train_data")  # as --dump-details names them
_TENSORS = ("tokens", "rollout_log_probs", "teacher_log_probs")
_TEXTS = ("prompt", "response", "label")
_TAKEN = (
    *("index", "group_index", "rollout_id", "response_length", "loss_mask", "remove_sample"),
    *("reward", "status", "weight_versions", *_TENSORS, *_TEXTS),
)
_VERSION = re.compile(r"0|[1-9][0-9]{0,17}")
_ORIGINS = {"rollout_log_probs": LogProbOrigin("sampler")}
_NO_STATUS, _TRUNCATED = "", "truncated"


@dataclass(frozen=True)
class RolloutDump:
    """What a rollout dump holds.

    Args:
        rollout_id: The rollout.
        samples: Its samples in order.
        indices: Their numbers in the training job, None where there is none.
        tensors: Values of their tokens.
        routes: The sampler's choices of experts.
        grouped: Whether it says of any sample which group it is of.
        notes: What is said of what was not taken.
    """

    rollout_id: int
    samples: tuple[SampleRecord, ...]
    indices: tuple[int | None, ...]
    tensors: dict[str, list[Any]]
    routes: dict[str, list[Any]]
    grouped: bool
    notes: tuple[str, ...]


def read_rollout(path: Path, options: ImportOptions, framework: str) -> list[CaptureRecord]:
    """The capture of a rollout dump; one of an evaluation is of a run of its own.

    Raises:
        DatasetError: It is unsafe, broken, or no rollout dump.
    """
    found = load_rollout(path, options)
    if found.grouped:
        options = replace(options, group_by_position=None)
    samples, positions = found.samples, options.group_by_position
    if positions is not None:
        groups = groups_by_position(options, len(samples), str(path))
        samples = tuple(
            replace(one, group_id=group, group_size=positions)
            for one, group in zip(samples, groups, strict=True)
        )
    raw = all(one.raw_reward is not None for one in samples)
    stages = {"sample": "", **({"reward.raw": ""} if raw else {})}
    said = stated(options, stages, grouped=found.grouped or positions is not None)
    return [
        CaptureRecord(
            run_id=run_of_dump(options, path, evaluation=is_evaluation(path, found.rollout_id)),
            rollout_id=found.rollout_id,
            step_id=None,
            settings=said.settings,
            samples=samples,
            tensors=found.tensors,
            routes=found.routes,
            stages=said.stages,
            origins=_ORIGINS if "rollout_log_probs" in found.tensors else {},
            producer=ProducerInfo(role="rollout", framework=framework, extra=said.facts),
            notes=found.notes,
        )
    ]


def run_of_dump(options: ImportOptions, path: Path, *, evaluation: bool = False) -> str:
    """The run that a dump is of: as the user says, else the folder that `--dump-details` names."""
    folder = path.parent.parent if path.parent.name in FOLDERS else path.parent
    return run_of(options, folder, validation=evaluation)


def is_evaluation(path: Path, rollout_id: int) -> bool:
    """Whether a rollout dump is of an evaluation, which its name alone says: `eval_7.pt`."""
    return bool(re.search(rf"(?<![a-z])eval_{rollout_id}(?![0-9])", path.name))


def load_rollout(path: Path, options: ImportOptions) -> RolloutDump:
    """Read a rollout dump.

    Raises:
        DatasetError: It is unsafe, broken, or no rollout dump.
    """
    dump = load_fields(path, options)
    rollout_id = dump.get("rollout_id", read.coordinate)
    rows = dump.objects("samples")
    if not rows:
        raise DatasetError(f"{path}: no samples, expected at least one", path=str(path))
    indices = tuple(one.get("index", read.coordinate, None) for one in rows)
    names = sample_ids(indices)
    parts = [execution_of(one, "rollout_id") for one in rows]
    shared = is_shared(parts)
    samples = tuple(
        _sample(one, name, rollout_id, part if shared else None)
        for one, name, part in zip(rows, names, parts, strict=True)
    )
    groups = Counter(one.group_index for one in samples)
    grouped = set(groups) != {None}
    samples = tuple(
        one if one.group_index is None else replace(one, group_size=groups[one.group_index])
        for one in samples
    )
    tensors = {
        name: [one.get(name, vector, None) for one in rows]
        for name in _TENSORS
        if any(name in one for one in rows)
    }
    routes = routes_of(rows)
    taken = {*_TAKEN, ROUTES} if routes else set(_TAKEN)
    notes = tuple(_notes(path, rows, options, taken, grouped=grouped))
    return RolloutDump(rollout_id, samples, indices, tensors, routes, grouped, notes)


def execution_of(row: Fields, name: str) -> int | None:
    """The execution of the agent that a sample is of; one that was cut has several samples."""
    found: int | None = row.get(name, read.coordinate, None)
    return found


def is_shared(executions: Iterable[int | None]) -> bool:
    """Whether any execution has several samples."""
    return any(count > 1 for one, count in Counter(executions).items() if one is not None)


def sample_ids(indices: Sequence[int | None]) -> list[str]:
    """The id of each sample of a rollout: its number, and its place among those that share it."""
    counts, seen = Counter(indices), Counter[int | None]()
    found = []
    for place, index in enumerate(indices):
        name = f"p-{place}" if index is None else f"s-{index}"
        found.append(name if index is None or counts[index] == 1 else f"{name}.{seen[index]}")
        seen[index] += 1
    return found


def _sample(one: Fields, name: str, rollout_id: int, part: int | None) -> SampleRecord:
    length = one.get("response_length", read.count)
    tokens = one.get("tokens", vector, [])
    total = len(tokens.values) if hasattr(tokens, "values") else len(tokens)
    if length > total:
        raise one.error("response_length", f"is {length}", f"at most the {total} tokens")
    # A sample without a mask is trained on in full, one that is removed not at all.
    mask = one.get("loss_mask", integers, np.ones(length, np.int64))
    if len(mask) != length:
        raise one.error("loss_mask", f"has {len(mask)} values", f"response_length = {length}")
    if one.get("remove_sample", read.flag, False):
        mask = np.zeros(length, np.int64)
    return SampleRecord(
        sample_id=name,
        group_index=one.get("group_index", read.coordinate, None),
        response_length=length,
        total_length=total,
        loss_mask=mask,
        raw_reward=one.get("reward", _reward, None),
        source_rollout_id=rollout_id,
        trajectory_id=None if part is None else f"r-{part}",
        weight_versions=_spans(one.get("weight_versions", read.texts, []), length),
        truncated=one.get("status", read.text, _NO_STATUS) == _TRUNCATED,
        prompt=one.get("prompt", _text, None),
        response=one.get("response", _text, None),
        label=one.get("label", _text, None),
    )


def _reward(value: Any) -> float | None:
    """The score; of several under names of their own, the arguments of slime choose one."""
    return None if type(value) is dict else scalar(value)


def _text(value: Any) -> str:
    """Text; a conversation as JSON."""
    if type(value) is str:
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError("text, or messages") from error


def _spans(versions: list[str], length: int) -> list[tuple[int, int, int]] | None:
    """The weights that sampled a response; of several, the dump does not say where each began."""
    distinct = set(versions)
    if len(distinct) != 1 or not length or not _VERSION.fullmatch(versions[0]):
        return None
    return [(0, length, int(versions[0]))]


def _notes(
    path: Path, rows: Sequence[Fields], options: ImportOptions, taken: set[str], *, grouped: bool
) -> Iterator[str]:
    odd = sorted({name for one in rows for name in one.unknown(taken) if _says(one.tree[name])})
    if odd:
        more = f" and {len(odd) - 8} more" if len(odd) > 8 else ""
        yield f"{path}: not taken: {', '.join(map(read.shown, odd[:8]))}{more}"
    if any(type(one.tree.get("reward")) is dict for one in rows):
        yield f"{path}: rewards of several parts, of which the dump does not say which counts"
    if any(len(set(one.get("weight_versions", read.texts, []))) > 1 for one in rows):
        yield f"{path}: responses of several weight versions, and not where each began: left out"
    if grouped and options.group_by_position is not None:
        yield f"{path}: groups are recorded, and --group-by-position is not used"


def _says(value: Any) -> bool:
    """Whether a field holds anything: most of a sample are there and empty."""
    if type(value) is dict:
        return any(map(_says, value.values()))
    return value not in (None, False, 0, 0.0, "", [], ())
