"""Sources of an import in batches: each written by a worker or here, all published in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from trajreplay.capture.importers.crew import Batch, Crew, named_signal
from trajreplay.capture.importers.publishing import Publishing, discard
from trajreplay.capture.importers.registry import Importer, ImportOptions
from trajreplay.capture.importers.report import ImportedSource
from trajreplay.capture.importers.source import Source
from trajreplay.capture.importers.writing import Written, WrittenSource, written_sources
from trajreplay.schema.identity import CaptureKey
from trajreplay.schema.store import Store
from trajreplay.writer.sharing import FILE_CAPTURES

_AHEAD = 32  # batches that are written and wait for one before them


def import_batches(
    store: Store,
    importer: Importer,
    paths: Sequence[Path],
    options: ImportOptions,
    begun: Callable[[], None],
) -> list[ImportedSource]:
    """Import sources, as if one after the other.

    Args:
        store: The lake.
        importer: The kind.
        paths: The sources.
        options: What is said beside them.
        begun: Called on each that is begun.

    Returns:
        What became of each, in order.
    """
    size = FILE_CAPTURES
    waiting = deque(Batch(paths[at : at + size]) for at in range(0, len(paths), size))
    given: deque[Batch] = deque()
    with Publishing(store) as publishing, ExitStack() as opened:
        opened.callback(_discard, store, given)
        crew = opened.enter_context(Crew(store, importer, options, len(paths), begun))
        one = _Import(store, importer, options, crew.begun)
        while waiting or given:
            is_next = bool(given) and given[0].done
            may_write = bool(waiting) and len(given) < _AHEAD
            crew.listen(wait=not is_next and not may_write)
            if may_write and crew.is_free:
                given.append(waiting.popleft())
                crew.give(given[-1])
            elif is_next:
                one.publish(given[0], publishing)
                given.popleft()
            elif may_write:
                given.append(waiting.popleft())
                one.write(given[-1])
    return [each.source.result for each in one.sources]


def _discard(store: Store, batches: Iterable[Batch]) -> None:
    for batch in batches:
        for written in batch.written:
            discard(store, written)


class _Import:
    """What was imported so far, and how more is."""

    def __init__(
        self,
        store: Store,
        importer: Importer,
        options: ImportOptions,
        begun: Callable[[], None],
    ) -> None:
        self.sources: list[WrittenSource] = []
        self._keys: set[CaptureKey] = set()
        self._store, self._begun = store, begun
        self._importer, self._options = importer, options

    def write(self, batch: Batch) -> None:
        """Write a batch as a worker would."""
        batch.written += self._written(batch.paths)
        batch.done = True

    def publish(self, batch: Batch, publishing: Publishing) -> None:
        """Hand a batch over, and what of it was not written after it is."""
        done = 0
        while batch.written:
            written = batch.written[0]
            if not self._keys.isdisjoint(written.keys):
                break  # what has the same captures was not visible when this was written
            done += len(written.sources)
            self._add(batch.written.popleft(), publishing)
        _discard(self._store, [batch])
        batch.written.clear()
        killed = batch.begun - 1 if batch.killed and done < batch.begun else len(batch.paths)
        while done < len(batch.paths):
            publishing.wait()
            if done == killed:
                refused = _killed(batch.paths[done], self._importer, batch.killed)
                written, killed = Written([refused], []), len(batch.paths)
                done += 1
                self._add(written, publishing)
            for written in self._written(batch.paths[done:killed]):
                done += len(written.sources)
                self._add(written, publishing)

    def _written(self, paths: Sequence[Path]) -> Iterator[Written]:
        return written_sources(self._store, self._importer, paths, self._options, self._begun)

    def _add(self, written: Written, publishing: Publishing) -> None:
        self.sources += written.sources
        self._keys |= written.keys
        publishing.add(written)


def _killed(path: Path, importer: Importer, number: int) -> WrittenSource:
    """A source whose reader was ended."""
    result = ImportedSource(str(path), importer.kind)
    result.problem = f"{path}: the process that read it was ended by {named_signal(number)}"
    result.hint = "Where memory ran out, make room for a source of this size, and import it again."
    return WrittenSource(Source(result))
