"""A DuckDB connection that can read the tables of a lake and nothing else."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TypeVar

import duckdb

from trajreplay.query.dataset import lake_tables
from trajreplay.query.visible import Visible
from trajreplay.schema.errors import QueryError

MEMORY_BYTES = 2 << 30
SPILL_BYTES = 16 << 30
TIME_LIMIT_S = 3600.0
_INTERRUPT_AGAIN_S = 0.05
_Result = TypeVar("_Result")


@contextmanager
def connect(
    visible: Visible,
    *,
    memory_bytes: int = MEMORY_BYTES,
    threads: int | None = None,
    time_limit_s: float = TIME_LIMIT_S,
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a locked connection to the tables of a lake.

    Args:
        visible: What the tables show.
        memory_bytes: What DuckDB may take; batches on their way to it come on top.
        threads: Threads of DuckDB; all cores if omitted. Sums of floats depend on the order in
            which threads finish: give 1 where the last bit matters.
        time_limit_s: When a statement is interrupted.

    Raises:
        QueryError: There is no folder for temporary files outside the lake.
    """
    with connect_empty(
        visible.catalog.store.folder, memory_bytes, threads, time_limit_s
    ) as connection:
        for name, table in lake_tables(visible).items():
            connection.register(name, table)
        yield connection


@contextmanager
def connect_empty(
    root: Path | None,
    memory_bytes: int = MEMORY_BYTES,
    threads: int | None = None,
    time_limit_s: float = TIME_LIMIT_S,
) -> Iterator[duckdb.DuckDBPyConnection]:
    """Open a connection without any table, locked.

    It opens no file, loads no extension, sees no Python variable, and its configuration cannot be
    changed. What it spills goes to a folder of its own outside the lake at `root`.

    Raises:
        QueryError: There is no such folder.
    """
    limit_ms = max(1, round(time_limit_s * 1000))
    instance = _instance(os.getpid(), _outside(root), memory_bytes, threads, limit_ms)
    connection = instance.cursor()
    try:
        yield connection
    finally:
        connection.close()
        del connection


def interruptible(connection: duckdb.DuckDBPyConnection, work: Callable[[], _Result]) -> _Result:
    """Do work of DuckDB in a thread of its own, so that an interrupt reaches this one and ends it.

    Python hears of Ctrl-C between two steps of its own in the main thread, and a statement is one
    long step.

    Args:
        connection: What the work uses.
        work: What to do.

    Returns:
        Its result.
    """
    with ThreadPoolExecutor(1, "statement") as pool:
        running = pool.submit(work)
        try:
            return running.result()
        finally:
            while not running.done():  # an interrupt before the statement began is lost
                connection.interrupt()
                wait([running], _INTERRUPT_AGAIN_S)


@cache
def _instance(
    process: int, folder: str, memory_bytes: int, threads: int | None, limit_ms: int
) -> duckdb.DuckDBPyConnection:
    """An empty locked database; opening one takes longer than most queries, so it is kept."""
    spill = tempfile.mkdtemp(prefix=f"trajreplay-{process}-", dir=folder)
    instance = duckdb.connect(
        config={
            "allow_community_extensions": False,
            "allow_persistent_secrets": False,
            "arrow_large_buffer_size": True,
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "max_execution_time": limit_ms,
            "max_temp_directory_size": f"{SPILL_BYTES} bytes",
            "memory_limit": f"{memory_bytes} bytes",
            "python_enable_replacements": False,
            "temp_directory": spill,
            **({} if threads is None else {"threads": threads}),
        }
    )
    # Last, since they keep the others from being set.
    instance.execute("SET enable_external_access = false")
    instance.execute("SET lock_configuration = true")
    atexit.register(_close, process, instance, spill)
    return instance


def _close(process: int, instance: duckdb.DuckDBPyConnection, spill: str) -> None:
    """Close a database: one that is open when the interpreter exits crashes it."""
    if os.getpid() == process:
        instance.close()
        shutil.rmtree(spill, ignore_errors=True)


def _outside(root: Path | None) -> str:
    folder = Path(tempfile.gettempdir()).resolve()
    if root is not None and folder.is_relative_to(root):
        folder = root.parent
    if not folder.is_dir() or folder == root:
        raise QueryError(
            f"no folder for temporary files outside the lake {root}",
            hint="Set TMPDIR to a folder that is not inside the lake.",
        )
    return str(folder)
