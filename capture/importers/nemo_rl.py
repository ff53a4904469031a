"""Importer of the batches that NeMo-RL logs: `train_data_step*.jsonl` and `val_data_step*.jsonl`.

Source: the logging block of nemo_rl/algorithms/grpo.py and Logger.log_batched_dict_as_jsonl, 0.6.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from trajreplay.capture.importers.json_lines import (
    begins_with_no_object,
    bits,
    first_names,
    float32s,
    objects,
    response_start,
    token_ids,
)
from trajreplay.capture.importers.places import below_or_damaged, is_plain_file, run_of
from trajreplay.capture.importers.registry import Importer, ImportOptions
from trajreplay.capture.importers.stating import groups_by_position, stated, trivial
from trajreplay.schema.bundles import fields as read
from trajreplay.schema.bundles.fields import Fields
from trajreplay.schema.bundles.record import CaptureRecord
from trajreplay.schema.entry import LogProbOrigin
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import ProducerInfo
from trajreplay.schema.records import SampleRecord

_NAME = re.compile(r"(train|val)_data_step(0|[1-9][0-9]{0,17})\.jsonl")
_Value = TypeVar("_Value")
# Column: the field that it comes from.
_COLUMNS = {
    "rollout_log_probs": "generation_logprobs",
    "old_log_probs": "prev_logprobs",
    "advantages": "advantages",
}
_PLACING = ("input_lengths", "token_loss_mask")
_KNOWN = (
    *("rewards", "filtered_rewards", "idx", "content", "token_ids", "sample_loss_mask"),
    *(*_COLUMNS.values(), *_PLACING, "agent_ref"),
)
_ORIGINS = {
    "rollout_log_probs": LogProbOrigin("sampler"),
    "old_log_probs": LogProbOrigin("trainer"),
}
_NO_LOSS = "neither log-probs of the current policy nor a loss are recorded"
_OF_ADVANTAGES = "the reward of a sample is read from its advantages, which then prove nothing"
_UNEQUAL = "advantages differ from token to token, so that no reward of a sample is recorded"
_NO_ADVANTAGES = "neither processed rewards nor advantages are recorded"
_NO_GROUPS = "groups are not recorded: state their size with --group-by-position"


@dataclass(frozen=True)
class _Line:
    """One sample of a file, without its group."""

    record: SampleRecord
    columns: dict[str, Any] = field(default_factory=dict)


def _find(path: Path) -> Iterable[Path]:
    def wanted(one: Path) -> bool:
        return bool(
            _NAME.fullmatch(one.name) and is_plain_file(one) and _is_batch(first_names(one))
        )

    return below_or_damaged(path, wanted, begins_with_no_object, _family)


def _family(path: Path) -> str | None:
    return "" if _NAME.fullmatch(path.name) else None


def _is_batch(names: Collection[str]) -> bool:
    """Whether these are names of a logged batch; a long text may come before the others."""
    return bool({"rewards", "content", "agent_ref"} & set(names)) and "score" not in names


def _read(path: Path, options: ImportOptions) -> Sequence[CaptureRecord]:
    found = _NAME.fullmatch(path.name)
    assert found is not None
    kind, step = found.groups()
    lines: list[_Line] = []
    names: set[str] = set()
    for one in objects(path, allow_nan=True):
        if lines and set(one) != names:
            odd = sorted(names ^ set(one))
            raise DatasetError(
                f"{one.where}: {', '.join(odd[:5])} is in this line or in the first, expected in "
                "both",
                hint="The file is not what was written: get it again from where it was logged.",
            )
        names = set(one)
        lines.append(_line(one, len(lines)))
    if not lines:
        raise DatasetError(f"{path}: no lines, expected one for each sample", path=str(path))
    if kind == "val":  # never normalised, so that it has no groups
        options = replace(options, group_by_position=None)
    groups = groups_by_position(options, len(lines), str(path))
    records = [replace(one.record, group_id=of) for one, of in zip(lines, groups, strict=True)]
    said = stated(options, _claims(lines, names, groups), grouped=groups[0] is not None)
    return [
        CaptureRecord(
            run_id=run_of(options, path.parent, validation=kind == "val"),
            rollout_id=int(step),
            step_id=None,
            settings=said.settings,
            samples=tuple(records),
            tensors={
                name: [one.columns[name] for one in lines] for name in sorted(lines[0].columns)
            },
            stages=said.stages,
            origins={name: one for name, one in _ORIGINS.items() if name in lines[0].columns},
            producer=ProducerInfo(role="driver", framework="nemo-rl", extra=said.facts),
            notes=tuple(_notes(path, names, kind)),
        )
    ]


def _line(one: Fields, place: int) -> _Line:
    """Read a sample; every value but `idx` is wrapped in a list of one."""
    index = one.get("idx", read.count)
    if index != place:
        raise one.error("idx", f"is {index}", f"{place}, as the lines before it are counted")
    # Of a batch that was filtered, `rewards` are those before the filter, and of other samples.
    name = "filtered_rewards" if "filtered_rewards" in one else "rewards"
    reward = one.get(name, _only(read.number))
    if any(name not in one for name in _PLACING):
        return _Line(SampleRecord(f"s-{place}", 0, 0, [], raw_reward=reward))
    total = one.get("input_lengths", _only(read.count))
    mask = _padded(one, "token_loss_mask", bits, total)
    start = response_start(mask)
    kept = one.get("sample_loss_mask", _only(read.number), 1.0)
    if kept not in (0.0, 1.0):
        raise one.error("sample_loss_mask", f"is {kept}", "0 or 1")
    columns = {
        column: _padded(one, source, float32s, total)[start:]
        for column, source in _COLUMNS.items()
        if source in one
    }
    score = None
    if "advantages" in columns:
        score = _one_value(_padded(one, "advantages", float32s, total))
    if "token_ids" in one:
        columns["tokens"] = _padded(one, "token_ids", token_ids, total)
    record = SampleRecord(
        f"s-{place}",
        total - start,
        total,
        mask[start:] * np.uint8(kept),
        raw_reward=reward,
        reward=score,
    )
    return _Line(record, columns)


def _padded(one: Fields, name: str, take: Callable[[Any], Any], total: int) -> Any:
    """A field with a value for each token of the padded sequence, cut to its real length."""
    values = one.get(name, _only(take))
    if len(values) < total:
        raise one.error(name, f"has {len(values)} values", f"at least input_lengths = {total}")
    return values[:total].copy()


def _only(take: Callable[[Any], _Value]) -> Callable[[Any], _Value]:
    """Reads a value out of the list of one that the writer wraps it in."""

    def taken(value: Any) -> _Value:
        if type(value) is not list or len(value) != 1:
            raise ValueError("a list of one value, in which the writer wraps it")
        return take(value[0])

    return taken


def _one_value(values: Any) -> float | None:
    """The value that all of them have, if they have one."""
    if not len(values) or not np.array_equal(values, np.full_like(values, values[0])):
        return None
    return float(values[0])


def _claims(
    lines: Sequence[_Line], names: Collection[str], groups: Sequence[str | None]
) -> dict[str, str]:
    """What each stage lacks to be recomputed."""
    if "advantages" not in names:
        lack = _NO_ADVANTAGES
    elif any(one.record.reward is None for one in lines):
        lack = _UNEQUAL
    else:
        lack = "" if groups[0] is not None else _NO_GROUPS
    return {
        **trivial(lack),
        "reward.post_process": lack,
        "advantage.estimate": _OF_ADVANTAGES if "advantages" in names else _NO_ADVANTAGES,
        "loss.policy": _NO_LOSS,
    }


def _notes(path: Path, names: Collection[str], kind: str) -> list[str]:
    odd = sorted(set(names) - set(_KNOWN))
    notes = (
        [f"{path}: {', '.join(map(read.shown, odd[:5]))} is not known: not taken"] if odd else []
    )
    if kind == "train" and not set(_PLACING) <= set(names):
        notes.append(
            f"{path}: without {' and '.join(_PLACING)} it cannot be told where responses begin: "
            "no value of a token is taken"
        )
    return notes


NEMO_RL = Importer(
    kind="nemo-rl",
    doc="Batches that NeMo-RL logs: train_data_step*.jsonl and val_data_step*.jsonl.",
    find=_find,
    read=_read,
)
