"""The samples that the ranks of a train dump held: their ids, groups, rewards and masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trajreplay.capture.importers.registry import ImportOptions
from trajreplay.capture.importers.slime.rollouts import (
    RolloutDump,
    execution_of,
    is_shared,
    load_rollout,
    sample_ids,
)
from trajreplay.capture.importers.slime.shards import Shard
from trajreplay.capture.importers.torch_dumps import integers, scalar
from trajreplay.schema.bundles import fields as read
from trajreplay.schema.bundles.fields import Fields
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import rank_prefix
from trajreplay.schema.records import SampleRecord


@dataclass(frozen=True)
class TrainDump:
    """The train dump of one rollout, over all ranks.

    Args:
        path: Its file, or the first of them.
        rollout_id: The rollout.
        shards: What each rank held.
        framework: Who wrote it.
        own_ids: Whether samples are numbered by rank, so that no id is one of the rollout's.
        whole: Whether it says itself that all ranks are in it.
    """

    path: Path
    rollout_id: int
    shards: Sequence[Shard]
    framework: str
    own_ids: bool = False
    whole: bool = False

    @property
    def owners(self) -> list[Shard]:
        """The ranks whose samples count; the others hold copies of theirs."""
        return [one for one in self.shards if not one.parallel.tensor_rank]


def rollout_beside(dump: TrainDump, options: ImportOptions) -> RolloutDump | None:
    """The rollout dump that `--dump-details` puts beside a train dump."""
    path = dump.path.parent.parent / "rollout_data" / f"{dump.rollout_id}.pt"
    if not path.is_file():
        return None
    found = load_rollout(path, options)
    if found.rollout_id != dump.rollout_id:
        raise broken(dump, f"{path} is of rollout {found.rollout_id}, expected the same")
    return found


def missing_ranks(dump: TrainDump, rollout: RolloutDump | None) -> str:
    """Why nothing shows that the files of all ranks are there; empty where something does.

    A schedule does, which says how many samples each step took over all ranks, or as many samples
    as the rollout had. A schedule counts executions of an agent where these are told: it does not
    show samples of one that lie on several ranks. The numbers of the files alone show no rank
    after the last.
    """
    scheduled = all(one.steps is not None and one.sizes is not None for one in dump.shards)
    if rollout is not None:
        by_sample = all(one.trajectory_id is None for one in rollout.samples)
    else:
        by_sample = all(execution(row) is None for one in dump.owners for row in one.rows)
    if dump.whole or (scheduled and by_sample):
        return ""
    taken = sum(len(one.rows) for one in dump.owners)
    totals = {one.total for one in dump.shards if one.total is not None}
    totals |= set() if rollout is None else {len(rollout.samples)}
    if not totals:
        return (
            f"{dump.path.name}: files by rank do not record how many ranks there were, and no "
            "rollout dump is beside them: ranks may be missing"
        )
    if totals != {taken}:
        return (
            f"{dump.path.name}: the ranks took {taken} samples of {max(totals)}, and nothing says "
            "that the others were left out: ranks may be missing"
        )
    return ""


def consumed_samples(
    dump: TrainDump, rollout: RolloutDump | None, options: ImportOptions
) -> dict[int, list[SampleRecord]]:
    """The samples of each rank, before they are told apart by step and micro-batch.

    A copy has the ids of its owner, and all else as its own file says: where that differs shows
    when the two are compared.
    """
    places = _places(dump, rollout)
    shared = is_shared(execution(row) for one in dump.owners for row in one.rows)
    found: dict[int, list[SampleRecord]] = {}
    owners = {one.parallel.data_rank: one for one in dump.owners}
    for one in dump.shards:
        owner = owners[one.parallel.data_rank]
        if (one.positions, one.indices) != (owner.positions, owner.indices):
            raise broken(
                dump, f"rank {one.rank} holds the samples of rank {owner.rank} by other numbers"
            )
        prefix = rank_prefix(owner.rank) if dump.own_ids else ""
        samples = []
        for row, (name, place) in enumerate(places[owner.rank]):
            record = _record(one, row, prefix + name, shared=shared)
            record = replace(record, **_group(rollout, options, place, prefix))
            samples.append(replace(record, source_rollout_id=dump.rollout_id))
        found[one.rank] = samples
    return found


def _places(
    dump: TrainDump, rollout: RolloutDump | None
) -> dict[int, list[tuple[str, int | None]]]:
    """The id of each row of each rank, and its place in the rollout where that is known."""
    owners = dump.owners
    if rollout is not None:
        names = [one.sample_id for one in rollout.samples]
        by_index = {index: place for place, index in enumerate(rollout.indices)}
        if len(by_index) < len(names):
            by_index = {}
        found: dict[int, list[tuple[str, int | None]]] = {}
        for one in owners:
            places = one.positions or [by_index.get(index, -1) for index in one.indices or ()]
            for row, place in enumerate(places):
                index = one.indices[row] if one.indices else None
                if not 0 <= place < len(names) or index not in (None, rollout.indices[place]):
                    raise broken(dump, f"row {row} of rank {one.rank} is no sample of the rollout")
            found[one.rank] = [(names[place], place) for place in places]
        return found
    if all(one.positions is not None and one.indices is not None for one in owners):
        order = sorted(
            (place, index)
            for one in owners
            for place, index in zip(one.positions or (), one.indices or (), strict=True)
        )
        ids = sample_ids([index for _, index in order])
        named = {place: name for (place, _), name in zip(order, ids, strict=True)}
        return {
            one.rank: [(named[place], place) for place in one.positions or ()] for one in owners
        }
    return {
        one.rank: [(f"p-{place}", place) for place in one.positions]
        if one.positions and not one.indices
        else [(f"s-{index}", index) for index in one.indices or range(len(one.rows))]
        for one in owners
    }


def _group(
    rollout: RolloutDump | None, options: ImportOptions, place: int | None, prefix: str
) -> dict[str, Any]:
    """The group of a sample: as its rollout says, else as the user states, else none."""
    if rollout is not None and rollout.grouped:
        assert place is not None
        one = rollout.samples[place]
        return {"group_id": one.group, "group_size": one.group_size}
    size = options.group_by_position
    if size is None or place is None:
        return {}
    return {"group_id": f"{prefix}g-{place // size}", "group_size": size}


def _record(shard: Shard, row: int, name: str, *, shared: bool) -> SampleRecord:
    one = shard.rows[row]
    length = one.get("response_lengths", read.count)
    mask = one.get("loss_masks", integers)
    if len(mask) != length:
        raise one.error("loss_masks", f"has {len(mask)} values", f"response_lengths = {length}")
    part = execution(one) if shared else None
    return SampleRecord(
        sample_id=name,
        response_length=length,
        total_length=one.get("total_lengths", read.count),
        loss_mask=mask,
        raw_reward=None if shard.raw_rewards is None else shard.raw_rewards[row],
        reward=one.get("rewards", scalar, None),
        rollout_partition_id=f"dp-{shard.parallel.data_rank}",
        trajectory_id=None if part is None else f"r-{part}",
        truncated=one.get("truncated", _flag, None),
    )


def execution(row: Fields) -> int | None:
    """The execution of the agent that a row is of."""
    return execution_of(row, "rollout_ids")


def _flag(value: Any) -> bool:
    if value not in (0, 1):
        raise ValueError("0 or 1")
    return bool(value)


def broken(dump: TrainDump, what: str) -> DatasetError:
    """What to raise of ranks, or a rollout dump, that do not fit together."""
    return DatasetError(
        f"{dump.path}: {what}",
        hint="Get the files of all ranks, and the rollout dump, of one training again.",
        path=str(dump.path),
    )
