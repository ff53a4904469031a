"""The import: every source read whole, checked, and committed as captures or refused by itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

from trajreplay.capture.importers.behind import CommittingBehind
from trajreplay.capture.importers.building import EventBlock, builders_of
from trajreplay.capture.importers.foreign import unfit
from trajreplay.capture.importers.named import NamedPath, named
from trajreplay.capture.importers.registry import Importer, ImportOptions, refuse_objects
from trajreplay.capture.importers.report import CHECKED, ImportedSource, ImportReport
from trajreplay.capture.importers.source import Source
from trajreplay.schema.bundles.folder import noting_reads
from trajreplay.schema.bundles.record import CaptureRecord, EventRecord
from trajreplay.schema.entry_codec import decode_all, load_entry
from trajreplay.schema.errors import CaptureError, TrajReplayError
from trajreplay.schema.layout import entry_path
from trajreplay.schema.localstore import LocalStore
from trajreplay.schema.store import Store
from trajreplay.writer import CaptureBuilder
from trajreplay.writer.commit import Prepared, entry_bytes

_NOWHERE = LocalStore(os.devnull)  # for captures that are checked, and never committed


def import_files(
    store: Store | None,
    importer: Importer,
    paths: Sequence[Path | NamedPath],
    options: ImportOptions | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> ImportReport:
    """Import what is at or below some paths.

    Every source is read and checked whole, and its data is in place, before the first of its
    captures is visible; one that is refused leaves nothing, and the others are imported. Done
    again, what is there stays as it is and what is missing is added. While one is read, those
    before it are written by a thread.

    Args:
        store: The lake; None to read and check without writing.
        importer: The kind.
        paths: Files and folders, or those that are open already.
        options: What is said beside the files.
        progress: Called with the sources done and all of them.

    Raises:
        CaptureError: A path is not there, or nothing of this kind is at or below it.
        DatasetError: A path is a file of objects, or an archive that is broken.
    """
    options = options or ImportOptions()
    report = ImportReport()
    sources: dict[Path, NamedPath] = {}
    with ExitStack() as opened:
        for path in paths:
            place = path if isinstance(path, NamedPath) else opened.enter_context(named(path))
            for source in _found(importer, place):
                sources[source] = place
        behind = None if store is None else opened.enter_context(CommittingBehind(store))
        for done, (path, place) in enumerate(sources.items()):
            if progress is not None and done:
                progress(done, len(sources))
            one = _read(store, importer, path, place, options)
            report.sources.append(one.result)
            if behind is not None and not one.result.problem:
                behind.add(one)
    for place, result in zip(sources.values(), report.sources, strict=True):
        result.problem, result.hint = place.told(result.problem), place.told(result.hint)
    if progress is not None:
        progress(len(sources), len(sources))
    return report


def _found(importer: Importer, place: NamedPath) -> Iterator[Path]:
    found = list(importer.find(place.inside))
    if not found:
        refuse_objects(place.inside)
        raise CaptureError(
            f"{place.path}: nothing of the kind {importer.kind} is at or below it",
            hint=f"It reads: {importer.doc}",
        )
    return iter(found)


def _read(
    store: Store | None,
    importer: Importer,
    path: Path,
    place: NamedPath,
    options: ImportOptions,
) -> Source:
    """Read one source and check it whole; without captures where it is refused."""
    result = ImportedSource(place.told(str(path)), importer.kind)
    source = Source(result)
    try:
        with noting_reads() as files:
            try:
                records = importer.read(path, options)
            finally:
                result.files = [place.told(str(one)) for one in files] or [result.path]
        notes = dict.fromkeys(note for one in records for note in one.notes)
        result.notes = [place.told(one) for one in notes]
        with _refusing_unfit(importer):
            builders = builders_of(_NOWHERE if store is None else store, records, options)
        source.prepare = partial(_prepared, importer, builders)
        source.counts = {
            one.key: _counted(record) for one, record in zip(builders, records, strict=True)
        }
    except TrajReplayError as error:
        result.problem, result.hint = error.message, error.hint
    except (OSError, MemoryError, RecursionError) as error:
        result.problem = f"{path} cannot be read: {str(error) or type(error).__name__}"
    else:
        if store is None:
            result.status = CHECKED
            source.tell()
    return source


def _prepared(
    importer: Importer, builders: Sequence[CaptureBuilder | EventBlock]
) -> list[Prepared]:
    """The captures of a source, in the order in which they become visible."""
    ordered = sorted(builders, key=lambda one: (one.key.rank, one.key))
    with _refusing_unfit(importer):
        captures = [one.prepare() for one in ordered]
        for one in captures if importer.origin else ():
            # Records of another package may hold what no reader takes.
            decode_all(load_entry(entry_bytes(one.entry), entry_path(one.entry.key)))
    return captures


def _counted(record: CaptureRecord | EventRecord) -> tuple[int, int]:
    """Samples and tokens of a record."""
    if isinstance(record, EventRecord):
        return 0, 0
    return len(record.samples), record.tokens


@contextmanager
def _refusing_unfit(importer: Importer) -> Iterator[None]:
    """Refuse the source of which a record of another package fails us: it may hold anything."""
    try:
        yield
    except (TrajReplayError, OSError, MemoryError, RecursionError):
        raise
    except Exception as error:
        if not importer.origin:
            raise
        raise unfit(importer, error) from error
