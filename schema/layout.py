"""Where things lie in a lake: keys to names and back."""

from __future__ import annotations

import uuid
from functools import lru_cache
from urllib.parse import quote, unquote

from trajreplay.schema.errors import DatasetError, SchemaError
from trajreplay.schema.identity import DATA, DROPPED, CaptureKey, check_id, make_key

LAKE_FILE = "lake.json"
ENTRIES = "_manifest/entries"
ATTEMPTS = "_manifest/attempts"
SNAPSHOTS = "_manifest/snapshots"
SEGMENTS = f"{SNAPSHOTS}/segments"
DATA_ROOT = "data"
PACKED = "packed"
TEMPORARY = "_tmp"
_NONE = "-"
_UNRESERVED = "-_.~"


def quoted(value: str) -> str:
    """An id as one path component: percent-encoded, unreserved characters kept.

    >>> quoted("a/b c")
    'a%2Fb%20c'
    """
    return quote(value, safe=_UNRESERVED)


def _text(number: int | None) -> str:
    return _NONE if number is None else str(number)


def entry_folder(run_id: str, attempt: int, rollout_id: int | None) -> str:
    """Folder of the entries of one rollout of one attempt."""
    return f"{ENTRIES}/run_id={quoted(run_id)}/attempt={attempt}/rollout_id={_text(rollout_id)}"


def entry_path(key: CaptureKey) -> str:
    """Path of a capture's manifest entry."""
    return f"{entry_folder(key.run_id, key.attempt, key.rollout_id)}/{_entry_name(key)}"


def _entry_name(key: CaptureKey) -> str:
    return f"{key.kind}.{_text(key.step_id)}.{key.rank}.{key.part}.json"


def data_path(key: CaptureKey, table: str) -> str:
    """A new path for a data file of a capture; never the same twice."""
    step = "" if key.step_id is None else f"/step_id={key.step_id}"
    return (
        f"{DATA_ROOT}/{table}/run_id={quoted(key.run_id)}/attempt={key.attempt}"
        f"/rollout_id={_text(key.rollout_id)}{step}/rank={key.rank}/{uuid.uuid4()}.parquet"
    )


def packed_path(run_id: str, attempt: int, table: str) -> str:
    """A new path for a data file of several captures of an attempt; never the same twice."""
    where = f"{DATA_ROOT}/{table}/run_id={quoted(run_id)}/attempt={attempt}"
    return f"{where}/{PACKED}/{uuid.uuid4()}.parquet"


def attempt_path(run_id: str, attempt: int) -> str:
    """Path of the record of an attempt."""
    return f"{ATTEMPTS}/run_id={quoted(run_id)}/{attempt}.json"


def root_path(number: int) -> str:
    """Path of the root of a snapshot."""
    return f"{SNAPSHOTS}/{number}.json"


def segment_path() -> str:
    """A new path for a segment of snapshots; never the same twice."""
    return f"{SEGMENTS}/{uuid.uuid4()}.parquet"


def number_of_root(path: str) -> int:
    """The number of the snapshot whose root a path is.

    Raises:
        DatasetError: The path is not one that `root_path` makes.
    """
    name = path.removeprefix(SNAPSHOTS + "/").removesuffix(".json")
    if not name.isdecimal() or root_path(int(name)) != path:
        raise DatasetError(
            f"{path}: no snapshot has this name, expected {SNAPSHOTS}/NUMBER.json",
            hint="Move the file out of the manifest.",
            path=path,
        )
    return int(name)


def key_of_entry(path: str) -> CaptureKey:
    """The key that an entry's path stands for.

    Raises:
        DatasetError: The path is not one that `entry_path` makes.
    """
    folder, _, name = path.rpartition("/")
    try:
        run_id, attempt, rollout_id = _rollout_of_folder(folder)
        kind, step, rank, part, suffix = name.split(".")
        key = make_key(
            run_id,
            attempt,
            kind,  # type: ignore[arg-type]
            rollout_id,
            _number(step),
            int(rank),
            part,
        )
    except (ValueError, SchemaError) as error:
        raise _misnamed(path) from error
    if suffix != "json" or part not in (DATA, DROPPED) or _entry_name(key) != name:
        raise _misnamed(path)
    return key


@lru_cache(maxsize=1024)
def _rollout_of_folder(folder: str) -> tuple[str, int, int | None]:
    """The run, attempt and rollout whose entries a folder holds; a listing asks for it often."""
    run, attempt, rollout = folder.removeprefix(ENTRIES + "/").split("/")
    found = (
        check_id("run_id", unquote(_after("run_id=", run), errors="strict")),
        int(_after("attempt=", attempt)),
        _number(_after("rollout_id=", rollout)),
    )
    if entry_folder(*found) != folder:
        raise ValueError(folder)
    return found


def run_of_attempt(path: str) -> tuple[str, int]:
    """The run and attempt that an attempt record's path stands for.

    Raises:
        DatasetError: The path is not one that `attempt_path` makes.
    """
    try:
        run, name = path.removeprefix(ATTEMPTS + "/").split("/")
        found = unquote(_after("run_id=", run), errors="strict"), int(name.removesuffix(".json"))
    except ValueError as error:
        raise _misnamed(path) from error
    if attempt_path(*found) != path:
        raise _misnamed(path)
    return found


def _after(prefix: str, text: str) -> str:
    if not text.startswith(prefix):
        raise ValueError(text)
    return text[len(prefix) :]


def _number(text: str) -> int | None:
    return None if text == _NONE else int(text)


def _misnamed(path: str) -> DatasetError:
    return DatasetError(
        f"{path}: no capture has this name, expected "
        f"{ENTRIES}/run_id=RUN/attempt=N/rollout_id=N/KIND.STEP.RANK.PART.json",
        hint="Move the file out of the manifest; captures are only added by the writer.",
        path=path,
    )
