"""The import: every source read whole, checked, and committed as captures or refused by itself."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from trajreplay.capture.importers.registry import Importer, ImportOptions, refuse_objects
from trajreplay.schema.bundles.archive import unpacked
from trajreplay.schema.bundles.record import CaptureRecord, EventRecord
from trajreplay.schema.bundles.tensors import TensorValue
from trajreplay.schema.errors import CaptureError, TrajReplayError
from trajreplay.schema.identity import make_key
from trajreplay.schema.layout import entry_path
from trajreplay.schema.localstore import LocalStore
from trajreplay.schema.store import Store
from trajreplay.writer import CaptureBuilder, Event, commit_events

_NOWHERE = LocalStore(os.devnull)  # for captures that are checked, and never committed
IMPORTED, UNCHANGED, REFUSED, CHECKED = "imported", "unchanged", "refused", "checked"


@dataclass
class ImportedSource:
    """What became of one source.

    Args:
        path: The file or folder.
        kind: What it was read as.
        status: imported, unchanged (all of it was there), checked (nothing was written), refused.
        captures: Its captures as (run, attempt, rollout, step, rank); events are of no rollout.
        samples: Samples in them.
        tokens: Response tokens in them.
        problem: Why it was refused.
        hint: What to do about it.
        notes: What it holds that was not taken, or that was read with a remark.
    """

    path: str
    kind: str
    status: str = REFUSED
    captures: list[tuple[str, int, int | None, int | None, int]] = field(default_factory=list)
    samples: int = 0
    tokens: int = 0
    problem: str = ""
    hint: str = ""
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """All facts as JSON values."""
        names = ("run_id", "attempt", "rollout_id", "step_id", "rank")
        captures = [dict(zip(names, one, strict=True)) for one in self.captures]
        return {**vars(self), "captures": captures}


@dataclass
class ImportReport:
    """What became of every source of an import."""

    sources: list[ImportedSource] = field(default_factory=list)

    @property
    def refused(self) -> list[ImportedSource]:
        """The sources that were refused."""
        return [one for one in self.sources if one.status == REFUSED]

    @property
    def exit_code(self) -> int:
        """3 if anything was refused, else 0."""
        return 3 if self.refused else 0

    def to_json(self) -> dict[str, Any]:
        """The stable JSON form."""
        return {"format": 1, "sources": [one.to_json() for one in self.sources]}


def import_files(
    store: Store | None,
    importer: Importer,
    paths: Sequence[Path],
    options: ImportOptions | None = None,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> ImportReport:
    """Import what is at or below some paths.

    Every source is read and checked whole before its first capture is committed; one that is
    refused leaves nothing, and the others are imported. Done again, what is there stays as it is
    and what is missing is added.

    Args:
        store: The lake; None to read and check without writing.
        importer: The kind.
        paths: Files and folders.
        options: What is said beside the files.
        progress: Called with the sources done and all of them.

    Raises:
        CaptureError: A path is not there, or nothing of this kind is at or below it.
        DatasetError: A path is a file of objects.
    """
    options = options or ImportOptions()
    report = ImportReport()
    with ExitStack() as open_archives:
        sources: dict[Path, str] = {}
        for path in paths:
            inside = open_archives.enter_context(_opened(path))
            for source in _found(importer, inside, path):
                sources[source] = _shown(source, inside, path)
        for done, (source, name) in enumerate(sources.items(), 1):
            report.sources.append(_import_source(store, importer, source, name, options))
            if progress is not None:
                progress(done, len(sources))
    return report


def _opened(path: Path) -> AbstractContextManager[Path]:
    if not path.exists():
        raise CaptureError(f"{path} is not there", hint="Name the files or folders to import.")
    return unpacked(path)


def _shown(source: Path, inside: Path, path: Path) -> str:
    """A source as the report names it: one of an archive by its place there."""
    return str(source) if inside == path else f"{path}:{source.relative_to(inside.absolute())}"


def _found(importer: Importer, path: Path, named: Path) -> Iterator[Path]:
    found = list(importer.find(path))
    if not found:
        refuse_objects(path)
        raise CaptureError(
            f"{named}: nothing of the kind {importer.kind} is at or below it",
            hint=f"It reads: {importer.doc}",
        )
    return iter(found)


def _import_source(
    store: Store | None, importer: Importer, source: Path, name: str, options: ImportOptions
) -> ImportedSource:
    result = ImportedSource(name, importer.kind)
    try:
        records = importer.read(source, options)
        result.notes = list(dict.fromkeys(note for one in records for note in one.notes))
        builders = _builders(_NOWHERE if store is None else store, records, options)
        result.status = CHECKED if store is None else _commit(store, builders)
    except TrajReplayError as error:
        result.problem, result.hint = error.message, error.hint
        return result
    except (OSError, MemoryError, RecursionError) as error:
        result.problem = f"{source} cannot be read: {str(error) or type(error).__name__}"
        return result
    for one in records:
        place = (None, None) if isinstance(one, EventRecord) else (one.rollout_id, one.step_id)
        result.captures.append((one.run_id, options.attempt, *place, one.rank))
        if isinstance(one, CaptureRecord):
            result.samples += len(one.samples)
            result.tokens += one.tokens
    return result


def _builders(
    store: Store, records: Sequence[CaptureRecord | EventRecord], options: ImportOptions
) -> list[CaptureBuilder | _EventBlock]:
    """The captures of one source, all of them known to be whole."""
    builders: list[CaptureBuilder | _EventBlock] = []
    for record in records:
        if isinstance(record, EventRecord):
            builders.append(_EventBlock(store, record, options.attempt))
            continue
        builder = _builder(store, record, options)
        _fill(builder, record)
        builder.check()
        builders.append(builder)
    _check_keys(builders)
    return builders


def _check_keys(builders: Sequence[CaptureBuilder | _EventBlock]) -> None:
    """Refuse captures of one source of which one would be committed in the place of another."""
    counts = Counter(one.key for one in builders)
    twice = [f"{count} captures of {key}" for key, count in counts.items() if count > 1]
    if twice:
        more = f" and {len(twice) - 10} more" if len(twice) > 10 else ""
        raise CaptureError(
            f"{'; '.join(twice[:10])}{more}: expected one of each",
            hint="Ranks that say the same of themselves are not told apart: nothing is imported.",
        )


def _commit(store: Store, builders: Sequence[CaptureBuilder | _EventBlock]) -> str:
    """Commit the captures of one source, those that are there first.

    Where one of these holds other content that is refused before another is committed: the blocks
    are left in the opposite order.
    """
    there = {one.key: store.exists(entry_path(one.key)) for one in builders}
    with ExitStack() as blocks:
        for one in sorted(builders, key=lambda one: there[one.key]):
            blocks.enter_context(one)
    return UNCHANGED if all(there.values()) else IMPORTED


class _EventBlock:
    """A block that commits the events of one rank when it is left, as a builder does samples."""

    def __init__(self, store: Store, record: EventRecord, attempt: int) -> None:
        self.key = make_key(record.run_id, attempt, "events", None, None, record.rank)
        self._store, self._record = store, record

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            commit_events(
                self._store,
                self.key,
                [Event(**vars(one)) for one in self._record.events],
                expected_ranks=self._record.expected_ranks,
                producer=self._record.producer,
            )


def _builder(store: Store, record: CaptureRecord, options: ImportOptions) -> CaptureBuilder:
    return CaptureBuilder(
        store,
        run_id=record.run_id,
        rollout_id=record.rollout_id,
        step_id=record.step_id,
        rank=record.rank,
        expected_ranks=record.expected_ranks,
        settings=record.settings,
        attempt=options.attempt,
        producer=record.producer,
        stages=record.stages,
        redaction={**options.redaction, **record.redaction},
        parallel=record.parallel,
        tolerances=record.tolerances,
    )


def _fill(builder: CaptureBuilder, record: CaptureRecord) -> None:
    builder.samples(record.samples, reward_dtype=record.reward_dtype)
    for name, values in record.tensors.items():
        origin = record.origins.get(name)
        about = vars(origin) if origin is not None else {}
        builder.tensor(name, _tensor(values), **about)
    for name, values in record.routes.items():
        builder.routes(name, values)
    for one in record.scalars:
        builder.expected(
            one.stage,
            scope=one.scope,
            reduction=one.reduction,
            scale=one.scale,
            denominator=one.denominator,
            micro_batch_id=one.micro_batch_id,
            **one.fields,
        )


def _tensor(values: Any) -> Any:
    """Values as the builder takes them; only torch has a dtype for the bits of bfloat16."""
    if isinstance(values, list | tuple):
        return [None if one is None else _tensor(one) for one in values]
    if not isinstance(values, TensorValue):
        return values
    if values.dtype != "bfloat16":
        return values.values
    import torch

    return torch.from_numpy(values.values.copy()).view(torch.bfloat16)
