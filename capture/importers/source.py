"""One source of an import: read, checked whole, and laid out as captures."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from trajreplay.capture.importers.building import EventBlock, builders_of
from trajreplay.capture.importers.foreign import unfit
from trajreplay.capture.importers.registry import Importer, ImportOptions
from trajreplay.capture.importers.report import CHECKED, ImportedSource
from trajreplay.schema.bundles.folder import noting_reads
from trajreplay.schema.bundles.record import CaptureRecord, EventRecord
from trajreplay.schema.entry_codec import decode_all, load_entry
from trajreplay.schema.errors import CaptureError, TrajReplayError
from trajreplay.schema.identity import CaptureKey
from trajreplay.schema.layout import entry_path
from trajreplay.schema.store import Store
from trajreplay.writer import CaptureBuilder
from trajreplay.writer.commit import Prepared, entry_bytes


@dataclass
class Source:
    """What became of a source so far.

    Args:
        result: What the report will say of it.
        counts: Samples and tokens of each of its captures.
    """

    result: ImportedSource
    counts: dict[CaptureKey, tuple[int, int]] = field(default_factory=dict)

    def tell(self, keys: Collection[CaptureKey] | None = None) -> None:
        """Say in the report which captures were taken: all of them, or those given."""
        result = self.result
        for key, (samples, tokens) in self.counts.items():
            if keys is None or key in keys:
                place = key.run_id, key.attempt, key.rollout_id, key.step_id, key.rank
                result.captures.append(place)
                result.samples += samples
                result.tokens += tokens

    def fail(self, error: TrajReplayError | OSError, store: Store) -> None:
        """Say in the report why nothing of it was taken."""
        told = _not_writable(store, error) if isinstance(error, OSError) else error
        self.result.problem, self.result.hint = told.message, told.hint


def check_source(store: Store, importer: Importer, path: Path, options: ImportOptions) -> Source:
    """Read a source and check it whole, and lay nothing out."""
    source, builders = _read(store, importer, path, options)
    if builders is not None:
        source.result.status = CHECKED
        source.tell()
    return source


def read_source(
    store: Store, importer: Importer, path: Path, options: ImportOptions
) -> tuple[Source, list[Prepared]]:
    """Read a source, check it whole and lay it out.

    Args:
        store: The lake.
        importer: The kind.
        path: The source.
        options: What is said beside it.

    Returns:
        The source, and its captures in the order in which they become visible: none of one that is
        refused, whose report says why.
    """
    source, builders = _read(store, importer, path, options)
    captures: list[Prepared] = []
    try:
        if builders is not None:
            captures = _laid_out(importer, builders)
    except (TrajReplayError, OSError) as error:
        source.fail(error, store)
    except (MemoryError, RecursionError) as error:
        source.result.problem = _unreadable(path, error)
    return source, captures


def _read(
    store: Store, importer: Importer, path: Path, options: ImportOptions
) -> tuple[Source, list[CaptureBuilder | EventBlock] | None]:
    """Read one source and check it whole; without captures where it is refused."""
    result = ImportedSource(str(path), importer.kind)
    source = Source(result)
    try:
        with noting_reads() as files:
            try:
                records = importer.read(path, options)
            finally:
                result.files = [str(one) for one in files] or [result.path]
        result.notes = list(dict.fromkeys(note for one in records for note in one.notes))
        with _refusing_unfit(importer):
            builders = builders_of(store, records, options)
        source.counts = {
            one.key: _counted(record) for one, record in zip(builders, records, strict=True)
        }
    except TrajReplayError as error:
        result.problem, result.hint = error.message, error.hint
    except (OSError, MemoryError, RecursionError) as error:
        result.problem = _unreadable(path, error)
    else:
        return source, builders
    return source, None


def _laid_out(
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


def _unreadable(path: Path, error: BaseException) -> str:
    return f"{path} cannot be read: {str(error) or type(error).__name__}"


def _not_writable(store: Store, error: OSError) -> CaptureError:
    """What to say where a lake cannot be written."""
    return CaptureError(
        f"{store} cannot be written: {error}",
        hint="Make room, or make the folder writable, and import it again.",
    )
