"""A folder of router-replay traces: one file a process, read line by line."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trajreplay.schema.bundles.r3.fields import RecordError
from trajreplay.schema.bundles.r3.line import MAX_LINE_BYTES, parse_record
from trajreplay.schema.bundles.r3.records import Origin, TraceRecord
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.localstore import LocalStore

MAX_FILES = 100_000
MAX_RECORDS = 20_000_000


@dataclass(frozen=True)
class TraceProblem:
    """A line that is no record; `is_json` where it is JSON at least."""

    file: str
    line: int
    message: str
    is_json: bool


@dataclass
class Others:
    """Where the records of a trace folder come from that are not kept.

    Args:
        records: How many there are.
        first, last: Seconds since the epoch, of the earliest and the latest.
        processes: Who wrote them, as `host:pid`.
    """

    records: int = 0
    first: float = math.inf
    last: float = -math.inf
    processes: dict[str, None] = field(default_factory=dict)

    def add(self, origin: Origin) -> None:
        """Take note of one."""
        self.records += 1
        self.first, self.last = min(self.first, origin.time), max(self.last, origin.time)
        self.processes[origin.process] = None


@dataclass
class TraceFolder:
    """What the files of a trace folder hold.

    Args:
        records: In the order of each file, files by name.
        problems: Lines that are no records.
        files: Names of the files.
        left_out: Lines that belong to processes or times other than those asked for, or are of
            events that are ignored.
        others: Those of them that are records.
    """

    records: list[TraceRecord] = field(default_factory=list)
    problems: list[TraceProblem] = field(default_factory=list)
    files: tuple[str, ...] = ()
    left_out: int = 0
    others: Others = field(default_factory=Others)


def read_trace_folder(
    folder: str | os.PathLike[str],
    *,
    keep: Callable[[Origin], bool] = lambda _: True,
    ignore: Collection[str] = (),
) -> TraceFolder:
    """Read every `*.jsonl` of a folder.

    Args:
        folder: The folder; files of other names and folders inside it are not looked at.
        keep: Which records to keep, by where they come from; the others are counted.
        ignore: Events that are not known here and are left out, and counted.

    Raises:
        DatasetError: It is no folder, a trace in it is a link or no regular file, or there are
            more than `MAX_FILES` files or `MAX_RECORDS` records.
    """
    if not Path(folder).is_dir():
        raise DatasetError(
            f"{folder} is no folder, expected one that holds *.jsonl trace files",
            hint="NRL_R3_TRACE_DIR names it in the training job; its default is logs/r3_trace.",
        )
    store = LocalStore(folder)
    names = sorted(one.name for one in store.folder.iterdir() if one.suffix == ".jsonl")
    if len(names) > MAX_FILES:
        raise DatasetError(f"{folder} has {len(names)} traces, expected at most {MAX_FILES}")
    found = TraceFolder(files=tuple(names))
    seen: dict[Any, Any] = {}
    for name in names:
        _read_file(store, name, keep, ignore, found, seen)
    return found


def _read_file(
    store: LocalStore,
    name: str,
    keep: Callable[[Origin], bool],
    ignore: Collection[str],
    found: TraceFolder,
    seen: dict[Any, Any],
) -> None:
    """Read one file; a line that is no record counts unless what lies around it is left out."""
    kept_before = True  # nothing before the first line says that it belongs elsewhere
    any_before = False
    waiting: list[TraceProblem] = []
    for number, line in trace_lines(store, name):
        try:
            record = parse_record(line, name, number, seen)
        except RecordError as error:
            if error.event in ignore:
                found.left_out += 1
                continue
            waiting.append(TraceProblem(name, number, str(error), error.is_json))
            continue
        kept = keep(record.origin)
        if waiting:
            _settle(waiting, kept or (kept_before and any_before), found)
        kept_before, any_before = kept, True
        if not kept:
            found.left_out += 1
            found.others.add(record.origin)
            continue
        found.records.append(record)
        if len(found.records) > MAX_RECORDS:
            raise DatasetError(
                f"{store}: more than {MAX_RECORDS} records",
                hint="Trace fewer steps: NRL_R3_TRACE_STEPS.",
            )
    _settle(waiting, kept_before, found)


def _settle(waiting: list[TraceProblem], counts: bool, found: TraceFolder) -> None:
    if counts:
        found.problems += waiting
    else:
        found.left_out += len(waiting)
    waiting.clear()


def trace_lines(store: LocalStore, name: str) -> Iterator[tuple[int, bytes]]:
    """Each line of a trace with its number, from 1; of one that is too long as much as shows it.

    Args:
        store: Its folder.
        name: The file.

    Raises:
        DatasetError: It is a link, or no regular file.
    """
    with os.fdopen(store.open(name), "rb") as file:
        number = 0
        while line := file.readline(MAX_LINE_BYTES + 2):
            number += 1
            yield number, line.rstrip(b"\n")
            while not line.endswith(b"\n") and (line := file.readline(MAX_LINE_BYTES)):
                pass
