"""A DuckDB connection that can read the tables of a lake and nothing else."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trajreplay.query.tables.dataset import lake_tables
from trajreplay.query.tables.visible import Visible
from trajreplay.schema.errors import QueryError

if TYPE_CHECKING:
    import duckdb

MEMORY_BYTES = 2 << 30
SPILL_BYTES = 16 << 30
TIME_LIMIT_S = 3600.0
_MOST_THREADS = 1024
_INTERRUPT_AGAIN_S = 0.05

Run = Callable[[Callable[[], Any]], Any]


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
        with interruptible(connection) as run:
            for name, table in lake_tables(visible).items():
                run(partial(connection.register, name, table))
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
        QueryError: There is no such folder, or no database with so much memory or so many threads.
    """
    import duckdb

    if threads is not None and not 1 <= threads <= _MOST_THREADS:
        raise QueryError(f"found {threads} threads, expected 1 to {_MOST_THREADS}")
    limit_ms = max(1, round(time_limit_s * 1000))
    try:
        with interrupts_heard():
            instance = _instance(os.getpid(), _outside(root), memory_bytes, threads, limit_ms)
    except (duckdb.Error, OSError) as error:
        raise QueryError(
            f"no statement can run: {error}",
            hint="Ask for memory that a machine can have, and set TMPDIR to a folder that can be "
            "written.",
        ) from error
    connection = instance.cursor()
    try:
        yield connection
    finally:
        connection.close()
        del connection


@contextmanager
def interruptible(connection: duckdb.DuckDBPyConnection) -> Iterator[Run]:
    """Give a way to run work of DuckDB that Ctrl-C ends: in a thread of its own.

    Python hears of Ctrl-C between two steps of its own in the main thread, and to it a statement is
    one long step.

    Args:
        connection: What the work uses.

    Yields:
        A function that does work, a call without arguments, and returns its result.
    """
    with ThreadPoolExecutor(1, "statement") as pool:
        pool.submit(int).result()  # starts the thread: an interrupt must not come between

        def run(work: Callable[[], Any]) -> Any:
            found: Future[Any] = Future()
            try:
                pool.submit(_into, found, work)
                return found.result()
            finally:
                while not found.cancel() and not found.done():
                    with suppress(KeyboardInterrupt):  # one is on its way already
                        connection.interrupt()
                        wait([found], _INTERRUPT_AGAIN_S)

        yield run


@contextmanager
def interrupts_heard() -> Iterator[None]:
    """Let an interrupt that comes while this thread is in DuckDB be one: it makes another error."""
    try:
        yield
    except RuntimeError as error:
        if str(error) != "Query interrupted":
            raise
        raise KeyboardInterrupt from error


def _into(found: Future[Any], work: Callable[[], Any]) -> None:
    if found.set_running_or_notify_cancel():
        try:
            found.set_result(work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            found.set_exception(error)


@cache
def _instance(
    process: int, folder: str, memory_bytes: int, threads: int | None, limit_ms: int
) -> duckdb.DuckDBPyConnection:
    """An empty locked database; opening one takes longer than most queries, so it is kept."""
    import duckdb

    spill = tempfile.mkdtemp(prefix=f"trajreplay-{process}-", dir=folder)
    config: dict[str, Any] = {
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
    try:
        instance = duckdb.connect(config=config)
    except BaseException:
        shutil.rmtree(spill, ignore_errors=True)
        raise
    atexit.register(_close, process, instance, spill)
    # Last, since they keep the others from being set.
    instance.execute("SET enable_external_access = false")
    instance.execute("SET lock_configuration = true")
    return instance


def _close(process: int, instance: duckdb.DuckDBPyConnection, spill: str) -> None:
    """Close a database: one that is open when the interpreter exits crashes it."""
    if os.getpid() == process:
        with suppress(KeyboardInterrupt):
            try:
                instance.close()
            finally:
                shutil.rmtree(spill, ignore_errors=True)


def _outside(root: Path | None) -> str:
    folder = Path(tempfile.gettempdir()).resolve()
    if root is not None and folder.is_relative_to(root):
        folder = root.parent
    try:
        str(folder).encode()
    except UnicodeError as error:
        raise QueryError(
            f"temporary files would be in {str(folder)!r}, expected a folder whose name is UTF-8",
            hint="Set TMPDIR to another folder.",
        ) from error
    if not folder.is_dir() or folder == root:
        raise QueryError(
            f"no folder for temporary files outside the lake {root}",
            hint="Set TMPDIR to a folder that is not inside the lake.",
        )
    return str(folder)
