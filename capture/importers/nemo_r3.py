"""Importer of router-replay traces of NeMo-RL: every line an event of the rank that wrote it.

Source: NVIDIA NeMo-RL, `nemo_rl/utils/r3_trace.py`, as of mid 2026.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from trajreplay.capture.importers.places import below, is_plain_file, run_of
from trajreplay.capture.importers.registry import Importer, ImportOptions
from trajreplay.schema.bundles.folder import note_read
from trajreplay.schema.bundles.r3 import RecordError, parse_record, trace_lines
from trajreplay.schema.bundles.r3.records import PayloadSample, TraceRecord
from trajreplay.schema.bundles.record import EventLine, EventRecord
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import ProducerInfo
from trajreplay.schema.localstore import LocalStore

MAX_RECORDS = 2_000_000
MAX_RANKS = 1 << 20  # more than any job has
_SHOWN = 10
_PATTERN = "r3_trace_*.jsonl"
_SECOND_US = 1_000_000


def _traces(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.glob(_PATTERN) if is_plain_file(one))


def _find(path: Path) -> Iterable[Path]:
    return below(path, lambda one: one.is_dir() and not one.is_symlink() and bool(_traces(one)))


def _read(path: Path, options: ImportOptions) -> Sequence[EventRecord]:
    run_id = run_of(options, path)
    events: dict[int, list[EventLine]] = defaultdict(list)
    world = 0
    for count, (record, line) in enumerate(_records(path), 1):
        if count > MAX_RECORDS:
            raise DatasetError(
                f"{path}: more than {MAX_RECORDS:,} records",
                hint="Trace fewer steps or micro-batches: NRL_R3_TRACE_STEPS.",
                path=str(path),
            )
        rank = record.origin.rank or 0
        world = max(world, record.origin.world_size or 0, rank + 1)
        if world > MAX_RANKS:
            raise DatasetError(
                f"{path / record.origin.file}, line {record.origin.line}: is of {world:,} ranks, "
                f"expected at most {MAX_RANKS:,}",
                hint="rank or world_size is no number of processes: get the traces again.",
                path=str(path / record.origin.file),
            )
        events[rank].append(_event(record, line))
    if not events:
        raise DatasetError(f"{path}: no records in its traces", path=str(path))
    ranks = tuple(range(world))
    missing = [rank for rank in ranks if rank not in events]
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    listed = ", ".join(map(str, missing[:_SHOWN]))
    notes = (f"{path}: no record of ranks {listed}{more}",) if missing else ()
    return [
        EventRecord(
            run_id=run_id,
            events=tuple(events[rank]),
            rank=rank,
            expected_ranks=ranks,
            producer=ProducerInfo(role="train", framework="nemo-rl"),
            notes=notes,
        )
        for rank in sorted(events)
    ]


def _records(folder: Path) -> Iterator[tuple[TraceRecord, bytes]]:
    store = LocalStore(folder)
    seen: dict[Any, Any] = {}
    for name in _traces(folder):
        note_read(folder / name)
        for number, line in trace_lines(store, name):
            try:
                yield parse_record(line, name, number, seen), line
            except RecordError as error:
                raise DatasetError(
                    f"{folder / name}, line {number}: {error}",
                    hint="What is wrong with the traces: trajreplay routes FOLDER --contract ...",
                    path=str(folder / name),
                ) from error


def _event(record: TraceRecord, line: bytes) -> EventLine:
    """A line as it is, but for what has a column; and where it stands."""
    tree = json.loads(line)
    event = tree.pop("event")
    del tree["time"]
    tree |= {"file": record.origin.file, "line": record.origin.line}
    detail = json.dumps(tree, sort_keys=True, separators=(",", ":"), allow_nan=False)
    sample_id = record.key if isinstance(record, PayloadSample) else None
    return EventLine(event, detail, sample_id, round(record.origin.time * _SECOND_US))


NEMO_RL_R3 = Importer(
    kind="nemo-rl-r3",
    doc="Folders of router-replay traces of NeMo-RL, r3_trace_*.jsonl, as events of each rank.",
    find=_find,
    read=_read,
)
