"""A process that reads and writes sources for an import, and leaves it to that to publish them.

    python -m trajreplay.capture.importers.worker

It ends when the import does: at the end of its input, or when it is told to, and then it removes
what it has not handed over.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, NoReturn

from trajreplay.capture.importers.publishing import discard
from trajreplay.capture.importers.registry import ImportOptions, importer_of
from trajreplay.capture.importers.wire import packed, receive, send
from trajreplay.capture.importers.writing import Written, written_sources
from trajreplay.schema.localstore import LocalStore
from trajreplay.schema.store import Store


def main() -> None:
    """Serve the import at the other end of the standard streams."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the import is told too, and ends this
    signal.signal(signal.SIGTERM, _end)
    # What is printed by anything else is no message.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    serve(sys.stdin.buffer, answers)


def serve(tasks: BinaryIO, answers: BinaryIO) -> None:
    """Write the sources of each task, and say so."""
    first = receive(tasks)
    if first is None:
        return
    setup: dict[str, Any] = first[0]
    store, importer = LocalStore(setup["lake"]), importer_of(setup["kind"])
    options = ImportOptions(**setup["options"])
    gc.freeze()  # what was loaded stays: no collection has to look at it
    send(answers, {"is": "ready"})
    while (task := receive(tasks)) is not None:
        paths = [Path(one) for one in task[0]["paths"]]
        for written in written_sources(
            store, importer, paths, options, lambda: send(answers, {"is": "begun"})
        ):
            _hand_over(store, answers, written)
        send(answers, {"is": "done"})


def _hand_over(store: Store, answers: BinaryIO, written: Written) -> None:
    """Leave written sources to the import, whole or not at all."""
    message, content = packed(written)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    try:
        send(answers, {"is": "written", **message}, content)
    except OSError:  # the import is gone
        discard(store, written)
        raise
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    raise SystemExit(0)


if __name__ == "__main__":
    main()
