"""Importer of the rollouts that prime-rl hands its trainer as files: packed micro-batches."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trajreplay.capture.importers.json_lines import response_start
from trajreplay.capture.importers.micro_batches import NOT_TAKEN, begins, micro_batches, odd
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
from trajreplay.schema.bundles.record import CaptureRecord
from trajreplay.schema.entry import LogProbOrigin
from trajreplay.schema.identity import ParallelCoordinates, ProducerInfo
from trajreplay.schema.records import SampleRecord

SUFFIX = ".bin"
_COLUMNS = {
    "rollout_log_probs": "inference_logprobs",
    "advantages": "advantages",
    "ref_log_probs": "ref_logprobs",
}
_NO_REWARDS = "rewards are not in these files"
_NO_LOSS = "log-probs of the trainer are not in these files"
_LACKS = {
    "sample": f"nothing can be recomputed from them alone: {_NO_REWARDS}",
    "reward.post_process": _NO_REWARDS,
    "advantage.estimate": _NO_REWARDS,
    "loss.policy": _NO_LOSS,
}


def _find(path: Path) -> Iterable[Path]:
    return step_folders(path, SUFFIX, begins, lambda one: not begins(one))


def _read(path: Path, options: ImportOptions) -> Sequence[CaptureRecord]:
    files = rank_files(path, SUFFIX, whole=True)
    said = stated(options, _LACKS, grouped=False)
    run = run_of(options, run_folder(path, "rollouts"))
    return [
        _record(micro_batches(file), rank, file, step_of(path), tuple(files), run, said)
        for rank, file in files.items()
    ]


def _record(
    batches: Iterator[dict[str, Any]],
    rank: int,
    file: Path,
    step: int,
    ranks: tuple[int, ...],
    run: str,
    said: Any,
) -> CaptureRecord:
    samples: list[SampleRecord] = []
    columns: dict[str, list[Any]] = {name: [] for name in (*_COLUMNS, "tokens")}
    temperatures: set[float] = set()
    names: dict[str, None] = {}
    left: dict[str, None] = {}
    for number, batch in enumerate(batches):
        where = f"{file}, micro-batch {number}"
        left.update(dict.fromkeys(one for one in NOT_TAKEN if batch[one] is not None))
        temperatures.update(np.unique(batch["temperatures"]).tolist())
        names.update(dict.fromkeys(one for one in batch["env_names"] if one))
        start = 0
        for place, length in enumerate(batch["sequence_lengths"].tolist()):
            stop = _unpadded(batch, start, start + length, where)
            begin = start + response_start(batch["loss_mask"][start:stop].astype(np.uint8))
            samples.append(
                SampleRecord(
                    sequence_id(rank, number, place),
                    stop - begin,
                    stop - start,
                    batch["loss_mask"][begin:stop].astype(np.uint8),
                    micro_batch_id=f"rank-{rank}/{number}",
                )
            )
            columns["tokens"].append(batch["input_ids"][start:stop].astype(np.int32))
            for name, of in _COLUMNS.items():
                held = batch[of]
                columns[name].append(None if held is None else held[begin:stop].astype(np.float32))
            start += length
    temperature = temperatures.pop() if len(temperatures) == 1 else None
    facts = {"env_names": json.dumps(sorted(names))} if names else {}
    return CaptureRecord(
        run_id=run,
        rollout_id=step,
        step_id=None,
        rank=rank,
        expected_ranks=ranks,
        settings=said.settings,
        samples=tuple(samples),
        tensors={name: one for name, one in columns.items() if any(v is not None for v in one)},
        stages=said.stages,
        origins={"rollout_log_probs": LogProbOrigin("sampler", temperature)} if samples else {},
        producer=ProducerInfo(role="rollout", framework="prime-rl", extra={**facts, **said.facts}),
        parallel=ParallelCoordinates(data_rank=rank, data_size=len(ranks)),
        notes=tuple(f"{file}: {name} has no column: not taken" for name in left),
    )


def _unpadded(batch: dict[str, Any], start: int, stop: int, where: str) -> int:
    """Where a sequence ends: the packer pads the last one of a micro-batch, without a name."""
    names = batch["env_names"]
    if not names[start:stop] or not names[start]:
        return stop  # of no environment at all
    end = stop
    while not names[end - 1]:
        end -= 1
    if batch["loss_mask"][end:stop].any():
        raise odd(where, f"tokens {end} to {stop} are of no environment and trained on")
    return end


PRIME_RL_ROLLOUT = Importer(
    kind="prime-rl-rollout",
    doc="Rollouts that prime-rl hands over as files: rollouts/step_N with rank_R.bin.",
    find=_find,
    read=_read,
)
