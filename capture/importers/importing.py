"""The import: every source read whole, checked, and committed as captures or refused by itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from trajreplay.capture.importers.batches import import_batches
from trajreplay.capture.importers.named import NamedPath, named
from trajreplay.capture.importers.registry import Importer, ImportOptions, refuse_objects
from trajreplay.capture.importers.report import ImportedSource, ImportReport
from trajreplay.capture.importers.source import check_source
from trajreplay.schema.errors import CaptureError
from trajreplay.schema.localstore import LocalStore
from trajreplay.schema.store import Store

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
    again, what is there stays as it is and what is missing is added. While some are read, those
    before them become visible by a thread; many are read by processes on the other cores too.

    Args:
        store: The lake; None to read and check without writing.
        importer: The kind.
        paths: Files and folders, or those that are open already.
        options: What is said beside the files.
        progress: Called with the sources begun and all of them.

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
        begun = _Counting(progress, len(sources))
        if store is None:
            for path in sources:
                begun()
                report.sources.append(check_source(_NOWHERE, importer, path, options).result)
        else:
            report.sources += import_batches(store, importer, list(sources), options, begun)
    for place, result in zip(sources.values(), report.sources, strict=True):
        _tell(result, place)
    if progress is not None:
        progress(len(sources), len(sources))
    return report


class _Counting:
    """Tells the progress when a source is begun."""

    def __init__(self, progress: Callable[[int, int], None] | None, total: int) -> None:
        self._progress, self._total, self._begun = progress, total, 0

    def __call__(self) -> None:
        if self._progress is not None and 0 < self._begun < self._total:
            self._progress(self._begun, self._total)
        self._begun += 1


def _found(importer: Importer, place: NamedPath) -> Iterator[Path]:
    found = list(importer.find(place.inside))
    if not found:
        refuse_objects(place.inside)
        raise CaptureError(
            f"{place.path}: nothing of the kind {importer.kind} is at or below it",
            hint=f"It reads: {importer.doc}",
        )
    return iter(found)


def _tell(result: ImportedSource, place: NamedPath) -> None:
    """Name the files of an archive by their place in it."""
    for name in ("path", "problem", "hint"):
        setattr(result, name, place.told(getattr(result, name)))
    for name in ("files", "notes"):
        setattr(result, name, [place.told(one) for one in getattr(result, name)])
