"""Train dumps of slime and Relax as captures of the optimizer steps that consumed the samples.

A train dump holds what the loss is made from, up to the advantages, and neither the loss nor the
log-probs of the policy that is trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from trajreplay.capture.importers.registry import ImportOptions
from trajreplay.capture.importers.slime.consumed import (
    TrainDump,
    broken,
    consumed_samples,
    execution,
    missing_ranks,
    rollout_beside,
)
from trajreplay.capture.importers.slime.rollouts import run_of_dump
from trajreplay.capture.importers.slime.shards import Shard
from trajreplay.capture.importers.stating import stated
from trajreplay.capture.importers.torch_dumps import ROUTES, routes_of, vector
from trajreplay.capture.slime.rollouts import COLUMNS
from trajreplay.schema.bundles import fields as read
from trajreplay.schema.bundles.record import CaptureRecord
from trajreplay.schema.entry import LogProbOrigin
from trajreplay.schema.identity import BY_RANK, IDS, UNPROVEN, ProducerInfo
from trajreplay.schema.records import SampleRecord

_TENSORS = {**COLUMNS, "teacher_log_probs": "teacher_log_probs"}
_ORIGINS = {
    "old_log_probs": LogProbOrigin("trainer"),
    "rollout_log_probs": LogProbOrigin("sampler"),
}
_NO_LOSS = "a train dump holds neither the loss nor the log-probs of the current policy"
_NO_GROUPS = (
    "a train dump holds no groups: keep rollout_data beside train_data, or state their size with "
    "--group-by-position"
)
_NO_RAW = "the dump does not say which raw reward is whose"
_NO_REWARD = "the dump holds no processed rewards"
_CUT = "some of its groups have samples that other steps or no step consumed"
STEPS = "steps"  # fact of a producer
NO_STEPS = "unstated: all samples of the rollout are under step 0"
_TAKEN = (
    *("data_parallel_rank", "sample_index", "rollout_position", "response_lengths", "rewards"),
    *("truncated", "rollout_ids", "loss_masks", "rollout_mask_sums", "total_lengths"),
    *("raw_reward", "source_names", "decoded_tokens", "sample_indices", *_TENSORS.values()),
)


def captures_of(dump: TrainDump, options: ImportOptions) -> list[CaptureRecord]:
    """A capture for each step and rank.

    Raises:
        DatasetError: The ranks do not fit together, or not with their rollout dump.
    """
    rollout = rollout_beside(dump, options)
    doubt = missing_ranks(dump, rollout)
    if dump.own_ids:
        rollout = None
    if rollout is not None and rollout.grouped:
        options = replace(options, group_by_position=None)
    counts = {len(one.steps or [()]) for one in dump.shards}
    if len(counts) > 1:
        raise broken(dump, f"its ranks have {sorted(counts)} steps, expected as many everywhere")
    records = consumed_samples(dump, rollout, options)
    doubts = {UNPROVEN: doubt} if doubt else {}
    return [
        one
        for step in range(counts.pop())
        for one in _of_step(dump, step, records, options, doubts)
    ]


def _of_step(
    dump: TrainDump,
    step: int,
    records: Mapping[int, list[SampleRecord]],
    options: ImportOptions,
    doubts: Mapping[str, str],
) -> Iterator[CaptureRecord]:
    """The capture of each rank of one step."""
    chosen = {one.rank: _rows_of(one, step) for one in dump.shards}
    _check_size(dump, step, chosen)
    samples = {
        rank: [replace(records[rank][row], micro_batch_id=batch) for row, batch in rows.items()]
        for rank, rows in chosen.items()
    }
    owned = [one for shard in dump.owners for one in samples[shard.rank]]
    columns = _columns(dump)
    routed = bool(routes_of([row for one in dump.shards for row in one.rows]))
    grouped = all(one.group is not None for one in owned)
    said = stated(options, _stages(owned, columns), grouped=grouped)
    for shard in dump.shards:
        rows = [shard.rows[row] for row in chosen[shard.rank]]
        yield CaptureRecord(
            run_id=run_of_dump(options, dump.path),
            rollout_id=dump.rollout_id,
            step_id=step,
            rank=shard.rank,
            expected_ranks=tuple(sorted(chosen)),
            settings=said.settings,
            samples=tuple(samples[shard.rank]),
            tensors={
                name: [row.get(_TENSORS[name], vector, None) for row in rows] for name in columns
            },
            routes=routes_of(rows) if routed else {},
            stages=said.stages,
            origins={name: one for name, one in _ORIGINS.items() if name in columns},
            producer=ProducerInfo(
                framework=dump.framework, extra={**said.facts, **_facts(dump, shard), **doubts}
            ),
            parallel=shard.parallel,
            notes=(
                *_notes(dump, {*_TAKEN, ROUTES} if routed else set(_TAKEN)),
                *doubts.values(),
            ),
        )


def _rows_of(shard: Shard, step: int) -> dict[int, str | None]:
    """The rows of a step in the order of its micro-batches, with the id of the micro-batch."""
    if shard.steps is None:
        return dict.fromkeys(range(len(shard.rows)))
    before = sum(map(len, shard.steps[:step]))
    return {
        row: f"mb-{shard.parallel.data_rank}-{before + number}"
        for number, batch in enumerate(shard.steps[step])
        for row in batch
    }


def _check_size(dump: TrainDump, step: int, chosen: Mapping[int, Mapping[int, Any]]) -> None:
    """Hold what a step took over all ranks against what each rank says that it took."""
    parts = [execution(one.rows[row]) for one in dump.owners for row in chosen[one.rank]]
    taken = len(parts) if None in parts else len(set(parts))
    for one in dump.shards:
        if one.sizes is None or one.steps is None:
            continue
        if len(one.sizes) != len(one.steps) or one.sizes[step] != taken:
            raise broken(
                dump,
                f"rank {one.rank} says that its steps took {read.shown(one.sizes)} rollouts, and "
                f"step {step} has {taken}",
            )


def _columns(dump: TrainDump) -> list[str]:
    return [
        name
        for name, source in _TENSORS.items()
        if any(source in row for one in dump.shards for row in one.rows)
    ]


def _stages(samples: Sequence[SampleRecord], columns: Sequence[str]) -> dict[str, str]:
    """What each stage lacks to be recomputed."""
    raw = "" if all(one.raw_reward is not None for one in samples) else _NO_RAW
    reward = "" if all(one.reward is not None for one in samples) else _NO_REWARD
    counts = Counter(one.group for one in samples)
    sizes = {one.group: one.group_size for one in samples}
    cut = any(sizes[name] not in (None, count) for name, count in counts.items())
    grouped = _NO_GROUPS if None in counts else _CUT if cut else ""
    stages = {"sample": "", "reward.raw": raw, "reward.post_process": raw or reward or grouped}
    if "kl" in columns:
        lacking = [one for one in ("old_log_probs", "ref_log_probs") if one not in columns]
        stages["advantage.kl"] = f"the dump holds no {' and '.join(lacking)}" if lacking else ""
    if "advantages" in columns:
        stages["advantage.estimate"] = reward
    return {**stages, "loss.policy": _NO_LOSS}


def _facts(dump: TrainDump, shard: Shard) -> dict[str, str]:
    facts = {} if shard.steps is not None else {STEPS: NO_STEPS}
    return facts | ({IDS: BY_RANK} if dump.own_ids else {})


def _notes(dump: TrainDump, taken: set[str]) -> Iterator[str]:
    if any(one.steps is None for one in dump.shards):
        yield (
            f"{dump.path}: it is not recorded which optimizer step took which sample: all of the "
            "rollout are under step 0"
        )
    odd = sorted({name for one in dump.shards for row in one.rows for name in row.unknown(taken)})
    if odd:
        yield f"{dump.path}: not taken: {', '.join(map(read.shown, odd[:8]))}"
