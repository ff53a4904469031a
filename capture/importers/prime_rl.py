"""Importer of the token exports of prime-rl: what its trainer computed of each sequence of a step.

Source: TokenExporter of src/prime_rl/trainer/rl/train.py, 0.8, schema version 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trajreplay.capture.importers.json_lines import (
    Float32s,
    begins_with_no_object,
    bits,
    first_names,
    float32s,
    objects,
    response_start,
    token_ids,
)
from trajreplay.capture.importers.places import run_of
from trajreplay.capture.importers.rank_files import (
    rank_files,
    run_folder,
    sequence_id,
    step_folders,
    step_of,
)
from trajreplay.capture.importers.registry import Importer, ImportOptions
from trajreplay.capture.importers.stating import stated
from trajreplay.schema.bundles import fields as read
from trajreplay.schema.bundles.fields import Fields
from trajreplay.schema.bundles.record import CaptureRecord
from trajreplay.schema.entry import LogProbOrigin
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import ParallelCoordinates, ProducerInfo
from trajreplay.schema.records import SampleRecord

SUFFIX = ".jsonl"
STABLE = "STABLE"
_SCHEMA_VERSION = 1
# Column: the field that it comes from.
_COLUMNS = {
    "rollout_log_probs": "inference_logprobs",
    "log_probs": "trainer_logprobs",
    "entropy": "entropy",
    "advantages": "advantages",
}
_WEIGHTS = ("rl_weights", "ce_weights", "ref_kl_weights")
_ULP = 2.0**-23
_FAR = 80.0  # from here on the exponential of a log-ratio may leave float32
_NO_REWARDS = "rewards are not in these files"
_CLAIMS = {
    "sample": "",
    "reward.post_process": _NO_REWARDS,
    "advantage.estimate": _NO_REWARDS,
    "loss.policy": "",  # its inputs are there: what is missing is the loss to hold it against
}


@dataclass(frozen=True)
class _Line:
    record: SampleRecord
    columns: dict[str, Any]


def _find(path: Path) -> Iterable[Path]:
    return step_folders(path, SUFFIX, _begins, begins_with_no_object)


def _begins(path: Path) -> bool:
    return {"trainer_logprobs", "inference_logprobs"} <= first_names(path)


def _read(path: Path, options: ImportOptions) -> Sequence[CaptureRecord]:
    if not (path / STABLE).is_file():
        raise DatasetError(
            f"{path}: no {STABLE}: not every rank has written its file",
            hint="Wait for the other ranks, or get the whole folder again.",
            path=str(path),
        )
    files = rank_files(path, SUFFIX, whole=True)
    said = stated(options, _CLAIMS, grouped=False)
    step, run = step_of(path), run_of(options, run_folder(path, "token_exports"))
    records = []
    for rank, file in files.items():
        lines = [_line(one, step, rank) for one in objects(file)]
        weighed = sorted({name for one in lines for name in one.columns if name in _WEIGHTS})
        records.append(
            CaptureRecord(
                run_id=run,
                rollout_id=step,
                step_id=0,
                rank=rank,
                expected_ranks=tuple(files),
                settings=said.settings,
                samples=tuple(one.record for one in lines),
                tensors={
                    name: [one.columns[name] for one in lines]
                    for name in (*_COLUMNS, "tokens")
                    if lines
                },
                stages=said.stages,
                origins={
                    "rollout_log_probs": LogProbOrigin("sampler"),
                    "log_probs": LogProbOrigin("trainer"),
                },
                producer=ProducerInfo(framework="prime-rl", extra=said.facts),
                parallel=ParallelCoordinates(data_rank=rank, data_size=len(files)),
                notes=tuple(f"{file}: {name} has no column: not taken" for name in weighed),
            )
        )
    return records


def _line(one: Fields, step: int, rank: int) -> _Line:
    """Read one sequence; its arrays go over prompt and response, without padding."""
    for name, expected in (("schema_version", _SCHEMA_VERSION), ("step", step), ("rank", rank)):
        found = one.get(name, read.coordinate)
        if found != expected:
            raise one.error(name, f"is {found}", f"{expected}")
    tokens = one.get("token_ids", token_ids)
    mask = _aligned(one, "loss_mask", one.get("loss_mask", bits), len(tokens))
    start = response_start(mask)
    values = {
        name: _aligned(one, name, one.get(name, float32s), len(tokens))
        for name in (*_COLUMNS.values(), "log_importance_ratio", "mismatch_kl")
    }
    _check_derived(one, values)
    columns: dict[str, Any] = {name: values[of][start:] for name, of in _COLUMNS.items()}
    columns["tokens"] = tokens
    for name in _WEIGHTS:
        if name in one and not np.isnan(one.get(name, float32s)).all():
            columns[name] = None  # stated for some token: it is said that it is not taken
    batch, place = (one.get(name, read.count) for name in ("micro_step", "micro_sequence_idx"))
    record = SampleRecord(
        sequence_id(rank, batch, place),
        len(tokens) - start,
        len(tokens),
        mask[start:],
        micro_batch_id=f"rank-{rank}/{batch}",
    )
    return _Line(record, columns)


def _aligned(one: Fields, name: str, values: Any, tokens: int) -> Any:
    if len(values) != tokens:
        raise one.error(name, f"has {len(values)} values", f"{tokens}, one for each of token_ids")
    return values


def _check_derived(one: Fields, values: dict[str, Float32s]) -> None:
    """Hold what the trainer derived from its log-probs against them.

    Raises:
        DatasetError: They are not of these log-probs.
    """
    trainer, sampler = values["trainer_logprobs"], values["inference_logprobs"]
    with np.errstate(invalid="ignore", over="ignore"):
        ratio = trainer.astype(np.float64) - sampler
        scale = np.abs(trainer) + np.abs(sampler)
        _hold(one, "log_importance_ratio", values, ratio, _ULP * scale)
        held = values["log_importance_ratio"].astype(np.float64)
        grown = np.exp(held)
        kl = np.where(np.abs(held) < _FAR, grown - 1 - held, np.nan)
        _hold(one, "mismatch_kl", values, kl, 4 * _ULP * (grown + 1 + np.abs(held)))


def _hold(one: Fields, name: str, values: dict[str, Float32s], expected: Any, slack: Any) -> None:
    found = values[name]
    both = np.isfinite(found) == np.isfinite(expected)
    same = np.abs(found - expected) <= slack
    odd = np.flatnonzero(~np.where(np.isfinite(expected), both & same, True))
    if len(odd):
        at = int(odd[0])
        raise one.error(
            name,
            f"is {found[at]:.9g} at token {at}",
            f"{expected[at]:.9g}, of trainer_logprobs and inference_logprobs",
        )


PRIME_RL_EXPORT = Importer(
    kind="prime-rl-export",
    doc="Token exports of prime-rl: token_exports/step_N with a file for each rank.",
    find=_find,
    read=_read,
)
