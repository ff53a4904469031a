"""The import: every source read whole, checked, and committed as captures or refused by itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from trajreplay.capture.importers.building import builders_of
from trajreplay.capture.importers.committing import HeldBack, committed
from trajreplay.capture.importers.foreign import unfit
from trajreplay.capture.importers.named import NamedPath, named
from trajreplay.capture.importers.registry import Importer, ImportOptions, refuse_objects
from trajreplay.capture.importers.report import CHECKED, PARTIAL, ImportedSource, ImportReport
from trajreplay.schema.bundles.folder import noting_reads
from trajreplay.schema.bundles.record import CaptureRecord, EventRecord
from trajreplay.schema.errors import CaptureError, TrajReplayError
from trajreplay.schema.identity import CaptureKey
from trajreplay.schema.localstore import LocalStore
from trajreplay.schema.store import Store

_NOWHERE = LocalStore(os.devnull)  # for captures that are checked, and never committed
_AGAIN = "Import it again once the lake can be written: what is there stays, and the rest is added."


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
    again, what is there stays as it is and what is missing is added.

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
    with ExitStack() as opened:
        sources: dict[Path, NamedPath] = {}
        for path in paths:
            place = path if isinstance(path, NamedPath) else opened.enter_context(named(path))
            for source in _found(importer, place):
                sources[source] = place
        for done, (source, place) in enumerate(sources.items(), 1):
            report.sources.append(_import_source(store, importer, source, place, options))
            if progress is not None:
                progress(done, len(sources))
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


def _import_source(
    store: Store | None,
    importer: Importer,
    source: Path,
    place: NamedPath,
    options: ImportOptions,
) -> ImportedSource:
    result = ImportedSource(place.told(str(source)), importer.kind)
    held = HeldBack(_NOWHERE if store is None else store, strict=bool(importer.origin))
    taken: list[tuple[CaptureKey, CaptureRecord | EventRecord]] = []
    try:
        with noting_reads() as files:
            try:
                records = importer.read(source, options)
            finally:
                result.files = [place.told(str(one)) for one in files] or [result.path]
        notes = dict.fromkeys(note for one in records for note in one.notes)
        result.notes = [place.told(one) for one in notes]
        with _refusing_unfit(importer):
            builders = builders_of(held, records, options)
            taken = [(one.key, record) for one, record in zip(builders, records, strict=True)]
            result.status = CHECKED if store is None else committed(held, builders)
    except TrajReplayError as error:
        result.problem, result.hint = place.told(error.message), place.told(error.hint)
    except (OSError, MemoryError, RecursionError) as error:
        what = f"{source} cannot be read: {str(error) or type(error).__name__}"
        result.problem = place.told(what)
    if result.problem:
        taken = [one for one in taken if one[0] in held.published]
        if taken:
            result.status, result.hint = PARTIAL, _AGAIN
    for key, record in taken:
        result.captures.append((key.run_id, key.attempt, key.rollout_id, key.step_id, key.rank))
        if isinstance(record, CaptureRecord):
            result.samples += len(record.samples)
            result.tokens += record.tokens
    return result


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
