"""Importer of the rollouts that verl dumps as text: `<global_step>.jsonl` of either trainer.

Source: _log_rollout_data and _dump_generations of verl/trainer/ppo/ray_trainer.py, 0.9.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from trajreplay.capture.importers.json_lines import begins_with_no_object, first_names, objects
from trajreplay.capture.importers.places import below_or_damaged, is_plain_file, run_of
from trajreplay.capture.importers.registry import Importer, ImportOptions
from trajreplay.capture.importers.stating import stated
from trajreplay.capture.importers.texts import NO_TOKENS, TEXT_ALONE, grouped_texts
from trajreplay.schema.bundles import fields as read
from trajreplay.schema.bundles.fields import Fields
from trajreplay.schema.bundles.record import CaptureRecord
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import ProducerInfo
from trajreplay.schema.records import SampleRecord

_NAME = re.compile(r"(0|[1-9][0-9]{0,17})\.jsonl")
_VALIDATION = re.compile(r"(^|[^a-z])val(id|idation)?([^a-z]|$)", re.IGNORECASE)
_NAMES = ("input", "output", "gts", "score", "step")
_IDS = ("uid", "request_id")
_LACKS = dict.fromkeys(
    ("sample", "reward.raw", "reward.post_process", "advantage.estimate", "loss.policy"), NO_TOKENS
)


def _find(path: Path) -> Iterable[Path]:
    def wanted(one: Path) -> bool:
        named = _NAME.fullmatch(one.name) is not None and is_plain_file(one)
        return named and set(_NAMES) - {"gts"} <= first_names(one)

    return below_or_damaged(path, wanted, begins_with_no_object, _family)


def _family(path: Path) -> str | None:
    return "" if _NAME.fullmatch(path.name) else None


def _read(path: Path, options: ImportOptions) -> Sequence[CaptureRecord]:
    step = int(path.stem)
    samples: list[SampleRecord] = []
    prompts: list[str] = []
    seen: set[str] = set()
    others: dict[str, None] = {}
    trained = False
    for one in objects(path, allow_nan=True):
        if one.get("step", read.coordinate) != step:
            raise one.error("step", f"is {one.tree['step']}", f"{step}, as the file is named")
        name = next((one.get(key, read.identifier) for key in _IDS if key in one), None)
        trained = trained or "request_id" in one
        name = name or f"s-{len(samples)}"
        if name in seen:
            raise one.error("the id", f"{name!r} is there twice", "one sample a line")
        seen.add(name)
        text = one.get("input", read.text)
        prompts.append(_prompt(one, text))
        others.update(dict.fromkeys(one.unknown((*_NAMES, *_IDS))))
        label = one.tree.get("gts")
        samples.append(
            SampleRecord(
                name,
                0,
                0,
                [],
                raw_reward=one.get("score", read.number),
                prompt=text,
                response=one.get("output", read.text),
                label=label if type(label) is str else None,
            )
        )
    if not samples:
        raise DatasetError(f"{path}: no lines, expected one for each sample", path=str(path))
    named, facts = grouped_texts(samples, prompts, options, str(path))
    said = stated(options, _LACKS, grouped=True)
    validation = not trained and _VALIDATION.search(path.parent.name) is not None
    notes = []
    if others:
        listed = ", ".join(map(read.shown, list(others)[:8]))
        notes.append(f"{path}: {listed} have no column: not taken")
    return [
        CaptureRecord(
            run_id=run_of(options, path.parent, validation=validation),
            rollout_id=step,
            step_id=None,
            settings=said.settings,
            samples=named,
            stages=said.stages,
            producer=ProducerInfo(
                role="driver", framework="verl", extra={**TEXT_ALONE, **facts, **said.facts}
            ),
            notes=tuple(notes),
        )
    ]


def _prompt(one: Fields, text: str) -> str:
    """What tells prompts apart: the text, or what a uid names, `{prompt}_{rollout}_{output}`."""
    if "uid" not in one:
        return text
    parts = one.get("uid", read.text).rsplit("_", 2)
    return parts[0] if len(parts) == 3 else text


VERL = Importer(
    kind="verl",
    doc="Rollouts and validations that verl dumps as text: <global_step>.jsonl.",
    find=_find,
    read=_read,
)
