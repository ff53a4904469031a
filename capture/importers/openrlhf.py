"""Importer of OpenRLHF's experiences, saved as the dictionaries that they are: `vars(experience)`.

OpenRLHF writes none itself. A list of its objects is a pickle that only running it reads.

Source: openrlhf/trainer/ppo_utils/experience.py and samples_generator.py, 0.11.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajreplay.capture.importers.places import below_or_damaged, is_plain_file, run_of
from trajreplay.capture.importers.registry import Importer, ImportOptions, refuse_objects
from trajreplay.capture.importers.stating import stated, trivial
from trajreplay.capture.importers.texts import grouped_texts
from trajreplay.capture.importers.torch_dumps import load_dump
from trajreplay.schema.bundles import fields as read
from trajreplay.schema.bundles.fields import Fields
from trajreplay.schema.bundles.record import CaptureRecord
from trajreplay.schema.bundles.tensors import TensorValue
from trajreplay.schema.bundles.torchhead import head_of
from trajreplay.schema.entry import LogProbOrigin
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import ProducerInfo
from trajreplay.schema.records import SampleRecord

_Numbers = npt.NDArray[Any]
_TYPE = re.compile(r"openrlhf\..*Experience")
_MARKS = {"sequences", "action_mask"}
_NUMBER = re.compile(r"([0-9]{1,18})(?=[^0-9]*$)")
_COLUMNS = {
    "old_log_probs": "action_log_probs",
    "ref_log_probs": "base_action_log_probs",
    "rollout_log_probs": "rollout_log_probs",
    "values": "values",
    "returns": "returns",
    "advantages": "advantages",
    "kl": "kl",
}
_NAMES = {*_MARKS, *_COLUMNS.values(), "attention_mask", "rewards", "truncated", "prompts"}
_ORIGINS = {
    "old_log_probs": LogProbOrigin("trainer"),
    "rollout_log_probs": LogProbOrigin("sampler"),
}
_NO_REWARDS = "an experience holds the rewards before they were processed, and no others"
_NO_LOSS = "an experience holds neither the loss nor the log-probs of the policy that is trained"


def _find(path: Path) -> Iterable[Path]:
    return below_or_damaged(path, _is_experience, _is_damaged, _family)


def _is_experience(path: Path) -> bool:
    head = head_of(path) if is_plain_file(path) else None
    if head is None:
        return False
    return bool(_TYPE.fullmatch(head.type)) or (head.archive and head.names >= _MARKS)


def _is_damaged(path: Path) -> bool:
    """Whether a file begins as nothing that torch saves, or with some names of an experience."""
    head = head_of(path)
    return head is None or not head.names or not head.names.isdisjoint(_NAMES)


def _family(path: Path) -> str | None:
    """The name of a file without its number."""
    return _NUMBER.sub("", path.name) if _NUMBER.search(path.stem) else None


def _read(path: Path, options: ImportOptions) -> Sequence[CaptureRecord]:
    refuse_objects(path, "Save it again so: torch.save([vars(one) for one in experiences], path)")
    loaded = load_dump(path, options)
    parts = loaded if type(loaded) is list else [loaded]
    batches = [Fields(one, f"{path}: [{place}]") for place, one in enumerate(parts)]
    samples: list[SampleRecord] = []
    prompts: list[str] = []
    columns: dict[str, list[Any]] = {}
    for one in batches:
        held = [name for name, source in _COLUMNS.items() if source in one]
        if samples and set(held) | {"tokens"} != set(columns):
            raise one.error("its tensors", f"are {', '.join(held)}", f"{', '.join(columns)}")
        for record, tokens in _rows(one, held, len(samples)):
            samples.append(record)
            for name, values in tokens.items():
                columns.setdefault(name, []).append(values)
        prompts += _prompts(one, len(samples) - len(prompts))
    if not samples:
        raise DatasetError(f"{path}: no samples, expected at least one", path=str(path))
    facts: dict[str, str] = {}
    grouped = tuple(samples)
    if all(prompts) or options.group_by_position is not None:
        grouped, facts = grouped_texts(samples, prompts, options, str(path))
    kl = "kl" in columns and {"old_log_probs", "ref_log_probs"} <= set(columns)
    stages = {
        **trivial("" if kl else _NO_REWARDS),
        "reward.post_process": _NO_REWARDS,
        **({"advantage.kl": ""} if kl else {}),
        "advantage.estimate": _NO_REWARDS,
        "loss.policy": _NO_LOSS,
    }
    said = stated(options, stages, grouped=grouped[0].group is not None)
    number = _NUMBER.search(path.stem)
    return [
        CaptureRecord(
            run_id=run_of(options, path.parent),
            rollout_id=int(number[1]) if number else 0,
            step_id=None,
            settings=said.settings,
            samples=grouped,
            tensors=columns,
            stages=said.stages,
            origins={name: one for name, one in _ORIGINS.items() if name in columns},
            producer=ProducerInfo(framework="openrlhf", extra=facts | said.facts),
            notes=tuple(_notes(path, batches)),
        )
    ]


def _rows(
    one: Fields, held: Sequence[str], before: int
) -> Iterator[tuple[SampleRecord, dict[str, Any]]]:
    """The samples of a batch: rows padded on the right, where a value is of the token after it."""
    sequences = one.get("sequences", _matrix).values
    rows, width = sequences.shape
    attended = one.get("attention_mask", _mask)
    mask = one.get("action_mask", _mask)
    tensors = {name: one.get(_COLUMNS[name], _matrix) for name in held}
    if attended.shape != (rows, width):
        raise one.error("attention_mask", f"is of shape {attended.shape}", f"{(rows, width)}")
    shapes = {_COLUMNS[name]: values.shape for name, values in tensors.items()}
    for name, shape in {"action_mask": mask.shape, **shapes}.items():
        if shape != (rows, width - 1):
            raise one.error(
                name, f"is of shape {shape}", f"{(rows, width - 1)}, all tokens but the first"
            )
    rewards: _Numbers | None = one.get("rewards", _numbers, None)
    truncated: _Numbers | None = one.get("truncated", _flags, None)
    for row in range(rows):
        total = int(np.count_nonzero(attended[row]))
        actions = np.flatnonzero(mask[row])
        start = int(actions[0]) if len(actions) else max(total - 1, 0)
        if not attended[row][:total].all() or (len(actions) and actions[-1] >= total - 1):
            raise one.error(
                "attention_mask", f"of row {row} leaves out tokens", "padding on the right only"
            )
        stop = max(total - 1, 0)
        record = SampleRecord(
            f"s-{before + row}",
            stop - start,
            total,
            mask[row][start:stop],
            raw_reward=None if rewards is None else _of(one, "rewards", rewards, row),
            truncated=None if truncated is None else bool(_of(one, "truncated", truncated, row)),
        )
        values = {
            name: TensorValue(found.values[row][start:stop], found.dtype)
            for name, found in tensors.items()
        }
        yield record, {"tokens": sequences[row][:total], **values}


def _matrix(value: Any) -> TensorValue:
    """A tensor with a row for each sample; that of one sample may lack the dimension."""
    if not isinstance(value, TensorValue) or value.values.ndim not in (1, 2):
        raise ValueError("a tensor of one or two dimensions")
    return TensorValue(np.atleast_2d(value.values), value.dtype)


def _mask(value: Any) -> _Numbers:
    """Which tokens count: 0 and 1 in any type."""
    return _zeros_and_ones(_matrix(value))


def _flags(value: Any) -> _Numbers:
    return _zeros_and_ones(TensorValue(_numbers(value), value.dtype))


def _zeros_and_ones(found: TensorValue) -> _Numbers:
    if found.dtype == "bfloat16" or not np.isin(found.values, (0, 1)).all():
        raise ValueError("a tensor of 0 and 1")
    return found.values.astype(np.uint8)


def _numbers(value: Any) -> _Numbers:
    if not isinstance(value, TensorValue) or value.dtype == "bfloat16":
        raise ValueError("a tensor with a number for each sample")
    return value.values.reshape(-1)


def _of(one: Fields, name: str, values: _Numbers, row: int) -> float:
    if row >= len(values):
        raise one.error(name, f"has {len(values)} values", "one for each sample")
    return float(values[row])


def _prompts(one: Fields, count: int) -> list[str]:
    """What tells the prompts of a batch apart; empty text where that is not recorded."""
    prompts: list[str] = one.get("prompts", read.texts, [])
    if prompts and len(prompts) != count:
        raise one.error("prompts", f"are {len(prompts)}", f"{count}, one for each sample")
    return prompts or [""] * count


def _notes(path: Path, batches: Sequence[Fields]) -> Iterator[str]:
    if not _NUMBER.search(path.stem):
        yield f"{path}: its name has no number: taken as rollout 0"
    empty = ("response_length", "total_length", "index")  # said by the masks, or of no sample
    odd = sorted(
        {name for one in batches for name in one.unknown((*_NAMES, *empty)) if name in one}
    )
    if odd:
        yield f"{path}: not taken: {', '.join(map(read.shown, odd[:8]))}"


OPENRLHF = Importer(
    kind="openrlhf",
    doc="Experiences of OpenRLHF, saved as dictionaries: [vars(one) for one in experiences].",
    find=_find,
    read=_read,
)
