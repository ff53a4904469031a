"""The files of train dumps: one for all ranks since format 2, before that one of each rank.

Source: slime/utils/train_dump_utils.py, 0.2 and 0.3; relax/utils/training/train_dump_utils.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trajreplay.capture.importers.registry import ImportOptions
from trajreplay.capture.importers.slime.consumed import TrainDump
from trajreplay.capture.importers.slime.contents import (
    TRAIN_BY_SAMPLE,
    content_of,
    files_of_ranks,
)
from trajreplay.capture.importers.slime.shards import Shard, layout_of, without_copies
from trajreplay.capture.importers.torch_dumps import integers, load_fields, scalar
from trajreplay.schema.bundles import fields as read
from trajreplay.schema.bundles.fields import Fields
from trajreplay.schema.bundles.torchhead import head_of
from trajreplay.schema.identity import ParallelCoordinates

_FORMAT = 2


def read_whole(path: Path, options: ImportOptions) -> TrainDump:
    """Read a train dump that holds all ranks.

    Raises:
        DatasetError: It is broken, or a rank is missing.
    """
    dump = load_fields(path, options)
    version = dump.get("format_version", read.count)
    if version != _FORMAT:
        raise dump.error("format_version", f"is {version}", f"{_FORMAT}")
    rows = dump.objects("samples")
    by_position = {one.get("rollout_position", read.count): one for one in rows}
    raw: list[float] | None = dump.get("raw_reward", _numbers, None)
    places = dump.objects("dp_shards")
    taken = [row for one in places for row in one.get("partition", _indices)]
    if len(by_position) < len(rows) or sorted(taken) != sorted(by_position):
        raise dump.error(
            "dp_shards", f"take {len(taken)} samples of {len(rows)}", "each of them once"
        )
    ranks = [one.get("data_parallel_rank", read.count) for one in places]
    if sorted(ranks) != list(range(len(places))):
        raise dump.error("dp_shards", f"are of ranks {ranks}", "every data-parallel rank once")
    processes = [one.get("rank", read.count) for one in places]
    if len(set(processes)) < len(processes):
        raise dump.error("dp_shards", f"are of the processes {processes}", "each process once")
    shards = []
    for one, data_rank, process in zip(places, ranks, processes, strict=True):
        positions = one.get("partition", _indices)
        mine = [by_position[place] for place in positions]
        steps, sizes = layout_of(one, len(mine))
        shard = Shard(
            rank=process,
            where=one.where,
            rows=mine,
            positions=positions,
            indices=[row.get("sample_index", read.coordinate) for row in mine],
            raw_rewards=_chosen(raw, positions),
            steps=steps,
            sizes=sizes,
            parallel=ParallelCoordinates(data_rank=data_rank, data_size=len(places)),
        )
        _check_shard(one, shard)
        shards.append(shard)
    rollout_id = dump.get("rollout_id", read.coordinate)
    return TrainDump(path, rollout_id, shards, "slime", whole=True)


def _check_shard(one: Fields, shard: Shard) -> None:
    """Hold a shard against the samples that it takes."""
    told = one.get("sample_indices", _indices, shard.indices)
    of = {row.get("data_parallel_rank", read.count, None) for row in shard.rows}
    if told != shard.indices or not of <= {None, shard.parallel.data_rank}:
        raise one.error("sample_indices", "are of other samples", "those that partition names")


def read_by_rank(path: Path, options: ImportOptions) -> TrainDump:
    """Read a train dump that is a file for each rank.

    Raises:
        DatasetError: A file is broken, or one is missing that others show to be.
    """
    by_sample = content_of(head_of(path)) == TRAIN_BY_SAMPLE
    shards, rollout_id = [], 0
    for one in files_of_ranks(path):
        dump = load_fields(one, options)
        rollout_id = dump.get("rollout_id", read.coordinate)
        rank = dump.get("rank", read.count)
        where = str(one)
        shards.append(
            _of_samples(dump, rank, where) if by_sample else _of_fields(dump, rank, where)
        )
    return TrainDump(
        path,
        rollout_id,
        without_copies(shards),
        framework="relax" if by_sample else "slime",
        own_ids=any(one.positions is None and one.indices is None for one in shards),
    )


def _of_samples(dump: Fields, rank: int, where: str) -> Shard:
    """The rows of a rank as Relax writes them: counted on each rank from 0."""
    rows = dump.objects("samples")
    known = [one.get("raw_reward", scalar) for one in rows if "raw_reward" in one]
    return Shard(rank, where, rows, raw_rewards=known if len(known) == len(rows) else None)


def _of_fields(dump: Fields, rank: int, where: str) -> Shard:
    """The rows of a rank as slime wrote them before format 2: a list for each field."""
    data = dump.object("rollout_data")
    count = len(data.get("tokens", _list))
    columns = {
        name: value
        for name, value in data.tree.items()
        if type(value) is list and len(value) == count and name != "raw_reward"
    }
    rows = [
        Fields({name: value[row] for name, value in columns.items()}, f"{where}: row {row}")
        for row in range(count)
    ]
    positions: list[int] | None = data.get("partition", _indices, None)
    indices: list[int] | None = data.get("sample_indices", _indices, None)
    for name, found in (("partition", positions), ("sample_indices", indices)):
        if found is not None and len(found) != count:
            raise data.error(name, f"has {len(found)} values", f"{count}, one for each sample")
    raw: list[float] | None = data.get("raw_reward", _numbers, None)
    of_all = raw is not None and (positions is not None or len(raw) != count)
    total = len(raw) if raw is not None and of_all else None
    if raw is not None and positions is None and len(raw) != count:
        raw = None  # which are this rank's is not recorded
    steps, sizes = layout_of(data, count)
    return Shard(
        rank,
        where,
        rows,
        positions,
        indices,
        raw if positions is None else _chosen(raw, positions),
        steps,
        sizes,
        total,
    )


def _chosen(values: list[float] | None, positions: list[int]) -> list[float] | None:
    if values is None or max(positions, default=-1) >= len(values):
        return None
    return [values[place] for place in positions]


def _list(value: Any) -> list[Any]:
    if type(value) is not list:
        raise ValueError("a list with a value for each sample")
    return value


def _numbers(value: Any) -> list[float]:
    return [scalar(one) for one in _list(value)]


def _indices(value: Any) -> list[int]:
    found: list[int] = integers(value).tolist()
    if min(found, default=0) < 0:
        raise ValueError("integers from 0 on")
    return found
