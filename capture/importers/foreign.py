"""Importers of other packages: what their code raises, or gives instead of records, is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from trajreplay.schema.bundles.fields import shown
from trajreplay.schema.bundles.record import CaptureRecord, EventLine, EventRecord, Scalars
from trajreplay.schema.contracts import StageContract
from trajreplay.schema.entry import LogProbOrigin
from trajreplay.schema.errors import CaptureError, TrajReplayError
from trajreplay.schema.identity import ParallelCoordinates, ProducerInfo
from trajreplay.schema.policy import Tolerance
from trajreplay.schema.recompute import RecomputeConfig
from trajreplay.schema.records import SampleRecord
from trajreplay.schema.settings import Settings

if TYPE_CHECKING:
    from trajreplay.capture.importers.registry import Importer, ImportOptions

_HINT = "Repair or uninstall the package that has it."
_Check = tuple[Callable[[Any], bool], str]


def _one(expected: str, *types: type) -> _Check:
    return (lambda value: isinstance(value, types) and type(value) is not bool), expected


def _each(expected: str, *types: type) -> _Check:
    def is_one(value: Any) -> bool:
        return isinstance(value, tuple | list) and all(isinstance(one, types) for one in value)

    return is_one, f"a tuple of {expected}"


def _named(expected: str, *types: type) -> _Check:
    def is_one(value: Any) -> bool:
        return isinstance(value, Mapping) and all(
            isinstance(name, str) and isinstance(one, types) for name, one in value.items()
        )

    return is_one, f"{expected} by name"


_OF_BOTH = {
    "run_id": _one("a string", str),
    "rank": _one("an integer", int),
    "expected_ranks": _each("integers", int),
    "producer": _one("a ProducerInfo", ProducerInfo),
    "notes": _each("strings", str),
}
# What the fields of a record are; what lies deeper is checked where it is used.
_FIELDS: dict[type, dict[str, _Check]] = {
    CaptureRecord: {
        **_OF_BOTH,
        "rollout_id": _one("an integer", int),
        "step_id": _one("an integer or None", int, NoneType),
        "settings": _one("a Settings or a RecomputeConfig", Settings, RecomputeConfig),
        "samples": _each("SampleRecord", SampleRecord),
        "tensors": _named("values", object),
        "routes": _named("values", object),
        "scalars": _each("Scalars", Scalars),
        "stages": _each("StageContract", StageContract),
        "tolerances": _named("a Tolerance", Tolerance),
        "origins": _named("a LogProbOrigin", LogProbOrigin),
        "parallel": _one("a ParallelCoordinates", ParallelCoordinates),
        "redaction": _named("a rule", str),
        "reward_dtype": _one("a string", str),
    },
    EventRecord: {**_OF_BOTH, "events": _each("EventLine", EventLine)},
}


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

    return replace(importer, find=find, read=read, origin=origin)


def _check(who: str, record: Any) -> None:
    """Refuse what is no record, or has a field of another type than it says."""
    checks = next((one for kind, one in _FIELDS.items() if isinstance(record, kind)), None)
    if checks is None:
        raise CaptureError(f"{who} gave {shown(record)}, expected records of captures", hint=_HINT)
    for name, (is_one, expected) in checks.items():
        value = getattr(record, name)
        if not is_one(value):
            raise CaptureError(
                f"{who} gave a record of which {name} is {shown(value)}, expected {expected}",
                hint=_HINT,
            )


def unfit(importer: Importer, error: Exception) -> CaptureError:
    """What to raise of a record that is of the right types and still cannot be captured."""
    return _failed(f"a record of the importer {importer.kind!r} from {importer.origin}", error)


def _failed(who: str, error: Exception) -> CaptureError:
    what = f"{type(error).__name__}: {error}".removesuffix(": ")
    return CaptureError(f"{who} failed: {what}", hint=_HINT)
