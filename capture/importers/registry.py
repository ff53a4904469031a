"""The kinds of files that can be imported: those of this package, and those of entry points."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trajreplay.capture.importers.foreign import guarded
from trajreplay.schema.bundles.record import CaptureRecord, EventRecord
from trajreplay.schema.bundles.torchhead import head_of
from trajreplay.schema.errors import CaptureError, DatasetError, TrajReplayError
from trajreplay.schema.identity import BY_RANK

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "trajreplay.importers"
_PLAIN_ONLY = (
    "Save what its objects hold, as dictionaries of tensors, numbers and text, with torch.save."
)
_HARMLESS = ("torch._utils.", "collections.")  # what tensors and plain containers are made by
# Kind: where its importer is; loaded when it is asked for.
BUILT_IN = {
    "relax-bundle": "trajreplay.capture.importers.bundles:RELAX_BUNDLE",
    "relax-dump": "trajreplay.capture.importers.slime:RELAX_DUMP",
    "slime": "trajreplay.capture.importers.slime:SLIME",
    "nemo-gym": "trajreplay.capture.importers.nemo_gym:NEMO_GYM",
    "nemo-rl-r3": "trajreplay.capture.importers.nemo_r3:NEMO_RL_R3",
    "nemo-rl": "trajreplay.capture.importers.nemo_rl:NEMO_RL",
    "prime-rl-export": "trajreplay.capture.importers.prime_rl:PRIME_RL_EXPORT",
    "prime-rl-rollout": "trajreplay.capture.importers.prime_rl_transport:PRIME_RL_ROLLOUT",
    "verl": "trajreplay.capture.importers.verl:VERL",
    "trl": "trajreplay.capture.importers.trl:TRL",
    "openrlhf": "trajreplay.capture.importers.openrlhf:OPENRLHF",
    "areal": "trajreplay.capture.importers.areal:AREAL",
}


@dataclass(frozen=True)
class ImportOptions:
    """What a user says beside the files.

    Args:
        run: The run that the captures are of; what the files say, else the importer's choice.
        attempt: The attempt that they are of.
        ids: What sample, group and micro-batch ids are local to: `rank` or `global`.
        allow_numpy: Whether numbers and arrays of numpy are taken from files of `torch.save`.
        group_by_position: Where files say nothing of groups, this many samples in the order of
            the file are one.
        profile: The framework whose settings made the files, by `name` or `name@version`.
        changes: Settings that differ from it, by `section.field`.
        redaction: What is kept of each text field: hash, keyed-hash, truncate[:N] or drop (the
            default).
    """

    run: str | None = None
    attempt: int = 0
    ids: str = BY_RANK
    allow_numpy: bool = False
    group_by_position: int | None = None
    profile: str | None = None
    changes: Mapping[str, Any] = field(default_factory=dict)
    redaction: Mapping[str, str] = field(default_factory=dict)

    def said(self) -> list[str]:
        """The names of what is said: all that is not left as it is by default."""
        return [name for name, value in vars(self).items() if value != getattr(_NOTHING, name)]


_NOTHING = ImportOptions()


@dataclass(frozen=True)
class Importer:
    """How one kind of files is read.

    Args:
        kind: Its name on the command line.
        doc: What it reads, as one sentence.
        find: The sources at or below a path: files or folders that are read each by itself.
            Nothing for a path that is not of this kind; it opens no more than it needs to tell.
        read: The captures of one source: all that belong together, or an error.
        origin: The entry point of another package that it is from; empty of this one's own.
    """

    kind: str
    doc: str
    find: Callable[[Path], Iterable[Path]]
    read: Callable[[Path, ImportOptions], Sequence[CaptureRecord | EventRecord]]
    origin: str = ""


def kinds() -> list[str]:
    """Every kind that there is, those of entry points last."""
    return [*BUILT_IN, *sorted(set(_entry_points()) - set(BUILT_IN))]


def importer_of(kind: str) -> Importer:
    """Load the importer of a kind.

    Raises:
        CaptureError: There is none, it cannot be loaded, or it is no importer.
    """
    if kind in BUILT_IN:
        module, _, name = BUILT_IN[kind].partition(":")
        found = getattr(importlib.import_module(module), name)
        assert isinstance(found, Importer)
        return found
    points = _entry_points()
    if kind not in points:
        raise CaptureError(
            f"unknown kind {kind!r}, expected one of {', '.join(kinds())}",
            hint=f"Another is added by an entry point of the group {GROUP}.",
        )
    origin = points[kind].value
    try:
        loaded = points[kind].load()
    except Exception as error:  # the code of another package may fail in any way
        raise CaptureError(
            f"the importer {kind!r} from {origin} cannot be loaded: {error}",
            hint="Repair or uninstall the package that has it.",
        ) from error
    if not isinstance(loaded, Importer) or loaded.kind != kind:
        raise CaptureError(
            f"the entry point {kind!r} is {origin}, expected an Importer of that kind",
            hint="Let it name an object Importer(kind=..., doc=..., find=..., read=...).",
        )
    return guarded(loaded, origin)


def recognise(paths: Sequence[Path]) -> Importer:
    """Find out what is at or below some paths.

    Raises:
        CaptureError: A path is not there, or they are of no kind that is known, or of several.
        DatasetError: A path is a file of objects.
    """
    found: list[str] = []
    for path in paths:
        refuse_objects(path)
        if not path.exists():
            raise CaptureError(f"{path} is not there", hint="Name files or folders to read.")
        found += _kinds_at(path)
    distinct = sorted(set(found))
    if len(distinct) > 1:
        raise CaptureError(
            f"{', '.join(map(str, paths))}: files of several kinds: {', '.join(distinct)}",
            hint="Name those of one kind, or import each kind: trajreplay import KIND PATH...",
        )
    return importer_of(distinct[0])


def _kinds_at(path: Path) -> list[str]:
    """The kinds that a path is of; one of another package that fails counts where no other does."""
    there: list[str] = []
    failed: list[TrajReplayError] = []
    for kind in kinds():
        try:
            if any(True for _ in importer_of(kind).find(path)):
                there.append(kind)
        except TrajReplayError as error:
            if kind in BUILT_IN:
                raise
            failed.append(error)
    if there:
        return there
    nothing = f"{path}: nothing at or below it is of a kind that can be read"
    if failed:
        raise CaptureError(
            f"{nothing}, as far as can be told: {'; '.join(one.message for one in failed)}",
            hint=failed[0].hint,
        ) from failed[0]
    raise CaptureError(
        f"{nothing}: {', '.join(kinds())}",
        hint="A lake is named with --lake; another kind is added by an entry point of the "
        f"group {GROUP}.",
    )


def refuse_objects(path: Path, remedy: str = _PLAIN_ONLY) -> None:
    """Refuse a file of objects, which nothing can read without running what is in it.

    Args:
        path: The file.
        remedy: How to save it otherwise.

    Raises:
        DatasetError: It is one: verl's `DataProto.save_to_disk`, OpenRLHF's `list[Experience]`.
    """
    head = head_of(path) if path.is_file() else None
    if head is None or not head.type or head.type.startswith(_HARMLESS):
        return
    raise DatasetError(
        f"{path} holds {'a list of objects' if head.listed else 'an object'} of the type "
        f"{head.type}, expected tensors, numbers, text, lists and dictionaries",
        hint=f"Nothing in it was run: to read such a file is to run it. {remedy}",
        path=str(path),
        type=head.type,
    )


def _entry_points() -> Mapping[str, EntryPoint]:
    from importlib.metadata import entry_points  # not needed for what is built in

    return {one.name: one for one in entry_points(group=GROUP)}
