"""Importers of other packages: what their code raises, or gives instead of records, is refused."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trajreplay.schema.bundles.fields import shown
from trajreplay.schema.bundles.record import CaptureRecord, EventRecord
from trajreplay.schema.errors import CaptureError, TrajReplayError
from trajreplay.schema.records import SampleRecord

if TYPE_CHECKING:
    from trajreplay.capture.importers.registry import Importer, ImportOptions

_HINT = "Repair or uninstall the package that has it."


def guarded(importer: Importer, origin: str) -> Importer:
    """An importer whose faults are errors that name it, and none of which gets into a lake.

    Args:
        importer: The importer of another package.
        origin: Its entry point.
    """
    who = f"the importer {importer.kind!r} from {origin}"

    def find(path: Path) -> Iterable[Path]:
        try:
            found = list(importer.find(path))
        except TrajReplayError:
            raise
        except Exception as error:  # the code of another package may fail in any way
            raise _failed(who, error) from error
        for one in found:
            if not isinstance(one, Path):
                raise CaptureError(f"{who} found {shown(one)}, expected paths", hint=_HINT)
        return found

    def read(path: Path, options: ImportOptions) -> Sequence[CaptureRecord | EventRecord]:
        try:
            found = list(importer.read(path, options))
        except (TrajReplayError, OSError, MemoryError, RecursionError):
            raise
        except Exception as error:  # the code of another package may fail in any way
            raise _failed(who, error) from error
        if not found:
            raise CaptureError(f"{who} gave no record of {path}", hint=_HINT)
        for one in found:
            _check(who, one)
        return found

    return replace(importer, find=find, read=read)


def _check(who: str, record: Any) -> None:
    """Refuse what is no record, as far as the writer does not."""
    if isinstance(record, EventRecord):
        return
    if not isinstance(record, CaptureRecord):
        raise CaptureError(f"{who} gave {shown(record)}, expected records of captures", hint=_HINT)
    for sample in record.samples:
        if not isinstance(sample, SampleRecord):
            raise CaptureError(f"{who} gave {shown(sample)}, expected a SampleRecord", hint=_HINT)


def _failed(who: str, error: Exception) -> CaptureError:
    what = f"{type(error).__name__}: {error}".removesuffix(": ")
    return CaptureError(f"{who} failed: {what}", hint=_HINT)
