"""Importer of the trajectories that AReaL dumps as text: `rollout/<version>/<task>.jsonl`.

Source: WorkflowExecutor._dump_trajectory of areal/infra/workflow_executor.py, 1.0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from trajreplay.capture.importers.json_lines import begins_with_no_object, first_names, objects
from trajreplay.capture.importers.places import below_or_damaged, is_plain_file, run_of
from trajreplay.capture.importers.registry import Importer, ImportOptions
from trajreplay.capture.importers.stating import refuse_statements, stated
from trajreplay.capture.importers.texts import NO_TOKENS
from trajreplay.schema.bundles import fields as read
from trajreplay.schema.bundles.fields import Fields
from trajreplay.schema.bundles.folder import is_folder
from trajreplay.schema.bundles.record import CaptureRecord
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import ProducerInfo
from trajreplay.schema.records import SampleRecord

_NUMBER = re.compile(r"(0|[1-9][0-9]{0,17})")
_TRAINING, _VALIDATION = "rollout", "eval-rollout"
_NAMES = (
    *("task_id", "sample_idx", "seqlen", "prompt_len", "head_version", "tail_version"),
    *("reward", "prompt", "completion"),
)
_LACKS = dict.fromkeys(
    ("sample", "reward.raw", "reward.post_process", "advantage.estimate", "loss.policy"), NO_TOKENS
)
_FACTS = {
    "loss_mask": "not recorded: 0 throughout",
    "short_groups": "samples without a trained last token are left out where they are written",
}


def _find(path: Path) -> Iterable[Path]:
    asked = path.absolute()
    if is_plain_file(asked) and asked in _dumps(asked.parent):
        asked = asked.parent
    return below_or_damaged(asked, _is_version, _is_damaged, _family, folders=True, kin=_kin)


def _dumps(version: Path) -> list[Path]:
    """The files of a folder of one version; none of any other folder."""
    if not _NUMBER.fullmatch(version.name) or not is_folder(version):
        return []
    return sorted(one for one in version.glob("[!.]*.jsonl") if is_plain_file(one))


def _is_version(folder: Path) -> bool:
    marks = {"task_id", "sample_idx", "tail_version"}
    return any(marks <= first_names(one) for one in _dumps(folder))


def _is_damaged(folder: Path) -> bool:
    files = _dumps(folder)
    return bool(files) and all(begins_with_no_object(one) for one in files)


def _family(folder: Path) -> str | None:
    return "version" if _NUMBER.fullmatch(folder.name) else None


def _kin(folder: Path) -> Path:
    """Where the versions of a training and of its evaluations lie."""
    kind = folder.parent
    return kind.parent if kind.name in (_TRAINING, _VALIDATION) else kind


def _read(path: Path, options: ImportOptions) -> Sequence[CaptureRecord]:
    if options.group_by_position is not None:
        only = ImportOptions(group_by_position=options.group_by_position)
        refuse_statements(only, "a task is a group, and its id is recorded")
    version = int(path.name)
    samples: list[SampleRecord] = []
    notes: dict[str, None] = {}
    for file in _dumps(path):
        before = len(samples)
        for one in objects(file, allow_nan=True):
            samples.append(_sample(one, version, file))
            odd = one.unknown(_NAMES)
            if odd:
                notes[
                    f"{path}: {', '.join(map(read.shown, odd[:5]))} have no column: not taken"
                ] = None
        if len(samples) == before:
            raise DatasetError(f"{file}: no lines, expected one for each sample", path=str(file))
    names = {one.sample_id for one in samples}
    if len(names) != len(samples):
        raise DatasetError(
            f"{path}: {len(samples)} lines of {len(names)} samples, expected one of each",
            hint="The files are not what was written: get them again from where they were logged.",
            path=str(path),
        )
    said = stated(options, _LACKS, grouped=True)
    kind = path.parent
    return [
        CaptureRecord(
            run_id=run_of(options, kind.parent, validation=kind.name == _VALIDATION),
            rollout_id=version,
            step_id=None,
            settings=said.settings,
            samples=tuple(samples),
            stages=said.stages,
            producer=ProducerInfo(
                role="rollout", framework="areal", extra={**_FACTS, **said.facts}
            ),
            notes=tuple(notes),
        )
    ]


def _sample(one: Fields, version: int, file: Path) -> SampleRecord:
    """Read a sample. Its head version is -1: that is how tokens of the prompt are marked."""
    one.get("head_version", read.whole, None)
    found = one.get("tail_version", read.coordinate)
    if found != version:
        raise one.error("tail_version", f"is {found}", f"{version}, as its folder is named")
    task = one.tree.get("task_id")
    if type(task) not in (int, str) or str(task) != file.stem:
        raise one.error("task_id", f"is {read.shown(task)}", f"{file.stem}, as the file is named")
    total, prompt = one.get("seqlen", read.count), one.get("prompt_len", read.count)
    if prompt > total:
        raise one.error("prompt_len", f"is {prompt}", f"at most seqlen = {total}")
    return SampleRecord(
        f"task-{task}/{one.get('sample_idx', read.count)}",
        total - prompt,
        total,
        np.zeros(total - prompt, np.uint8),
        group_id=f"task-{task}",
        raw_reward=one.get("reward", read.number),
        prompt=one.get("prompt", read.text),
        response=one.get("completion", read.text),
    )


AREAL = Importer(
    kind="areal",
    doc="Trajectories that AReaL dumps as text: rollout/<version>/<task>.jsonl.",
    find=_find,
    read=_read,
)
