"""Manifest entries to signed JSON and back; nothing is used before its type is checked."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import fields
from functools import cached_property, lru_cache, partial
from typing import Any, ClassVar, TypeVar

from trajreplay.schema import exact
from trajreplay.schema.canonical import dump_signed, load_signed, parse_verified
from trajreplay.schema.entry import DataFile, Entry
from trajreplay.schema.entry_sections import SECTIONS, read_seals
from trajreplay.schema.errors import DatasetError, SchemaError
from trajreplay.schema.identity import CaptureKey, ParallelCoordinates, ResumePoint
from trajreplay.schema.layout import key_of_entry
from trajreplay.schema.tables import FORMAT_VERSION

STATUSES = ("complete", "dropped")
_FIELDS = tuple(one.name for one in fields(Entry))
_FILE_FIELDS = tuple(one.name for one in fields(DataFile))
_RECURRING = ("contracts", "settings_tree")  # of all captures of a run, mostly
_KEPT_TREES = 256
_PLACE = ("path", "bytes", "footer", "first_row_group", "row_groups", "first_row", "digest")


def dump_entry(entry: Entry) -> bytes:
    """The entry as the bytes of its file."""
    return dump_signed(_tree(entry), _RECURRING)


def same_content(left: Entry, right: Entry) -> bool:
    """Whether a retry: digests, outputs, settings and ranks count, paths and times do not."""
    return _content(left) == _content(right)


def load_entry(data: bytes, path: str) -> Entry:
    """Read the bytes of an entry's file.

    Sections that only few readers need are decoded, and their types checked, when first asked
    for; `decode_all` asks for all of them.

    Raises:
        DatasetError: Damaged, of a newer format, with a field of another type, or not the entry
            that its path names.
    """
    tree = load_signed(data, path)
    version = tree.get("format")
    if type(version) is not int or version > FORMAT_VERSION:
        raise DatasetError(
            f"{path}: format {version!r}, expected at most {FORMAT_VERSION}",
            hint="Upgrade trajreplay to read this lake.",
            path=path,
        )
    key = key_of_entry(path)
    entry = _checked(path, partial(_entry, tree, key, data, path))
    if tree.get("key") != list(key):
        raise DatasetError(
            f"{path}: holds the entry of {tree.get('key')!r}, expected {list(key)!r}",
            hint="The file was renamed or copied; restore the manifest from a copy of the lake.",
            path=path,
        )
    return entry


def decode_all(entry: Entry) -> None:
    """Decode every section of an entry.

    Raises:
        DatasetError: A section is missing or has a field of another type.
    """
    for name in _FIELDS:
        getattr(entry, name)
    for file in entry.files:
        _ = file.columns


def _content(entry: Entry) -> bytes:
    tree = _tree(entry)
    del tree["created_us"], tree["producer"]
    for file in tree["files"]:
        for name in _PLACE:
            del file[name]
    return dump_signed(tree, _RECURRING)


def _tree(entry: Entry) -> dict[str, Any]:
    tree = {name: getattr(entry, name) for name in _FIELDS}
    tree["format"] = FORMAT_VERSION
    tree["key"] = list(entry.key)
    tree["parallel"] = dict(vars(entry.parallel))
    tree["resumed_from"] = entry.resumed_from and list(entry.resumed_from)
    tree["contracts"] = {name: one.to_json() for name, one in entry.contracts.items()}
    tree["tolerances"] = {name: [one.atol, one.rtol] for name, one in entry.tolerances.items()}
    tree["origins"] = {name: vars(one) for name, one in entry.origins.items()}
    tree["files"] = [_file_tree(one) for one in entry.files]
    tree["outputs"] = [
        {name: value for name, value in vars(one).items() if value is not None}
        for one in entry.outputs
    ]
    return tree


def _file_tree(file: DataFile) -> dict[str, Any]:
    tree = {name: getattr(file, name) for name in _FILE_FIELDS}
    tree["columns"] = {name: list(seal) for name, seal in file.columns.items()}
    return tree


_Value = TypeVar("_Value")


def _checked(path: str, read: Callable[[], _Value]) -> _Value:
    """Say where, if what is read has another type or lacks a key."""
    try:
        return read()
    except (KeyError, IndexError, TypeError, ValueError, SchemaError) as error:
        found = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
        raise DatasetError(f"{path}: not a manifest entry: {found}", path=path) from error


def _entry(tree: dict[str, Any], key: CaptureKey, data: bytes, path: str) -> Entry:
    files = exact.array(tree["files"])
    rest = _Rest(data, path, tree)
    entry: Entry = object.__new__(Entry)
    vars(entry).update(
        key=key,
        expected_ranks=tuple(map(exact.rank, exact.array(tree["expected_ranks"]))),
        status=exact.one_of(tree["status"], STATUSES),
        owner=exact.typed(tree["owner"], bool),
        cohort_size=exact.optional(tree["cohort_size"], exact.whole),
        created_us=exact.time_us(tree["created_us"]),
        parallel=_parallel(exact.tree(tree["parallel"])),
        resumed_from=exact.optional(tree["resumed_from"], _resume_point),
        sources=tuple(map(_source, exact.array(tree["sources"]))),
        files=tuple(_file(one, partial(rest.columns, index)) for index, one in enumerate(files)),
        tokens=exact.whole(tree["tokens"]),
        reason=exact.text(tree["reason"]),
        _rest=rest.sections,
    )
    return entry


class _Rest:
    """The verified bytes of an entry, decoded when the first of its deferred fields is read.

    The latest few keep what was parsed, for readers that take one entry after another.
    """

    _latest: ClassVar[deque[_Rest]] = deque()

    def __init__(self, data: bytes, path: str, tree: dict[str, Any]) -> None:
        self._data, self._path = data, path
        self._tree: dict[str, Any] | None = tree
        self._latest.append(self)
        if len(self._latest) > _KEPT_TREES:
            self._latest.popleft()._tree = None

    def sections(self) -> dict[str, Any]:
        """Fields of the entry."""
        return self._decoded[0]

    def columns(self, index: int) -> dict[str, Any]:
        """Fields of one of its files."""
        return self._decoded[1][index]

    @cached_property
    def _decoded(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        tree = self._tree or parse_verified(self._data)
        return _checked(
            self._path,
            lambda: (
                {name: read(tree[name]) for name, read in SECTIONS.items()},
                [{"columns": read_seals(one["columns"])} for one in tree["files"]],
            ),
        )


def _parallel(tree: dict[str, Any]) -> ParallelCoordinates:
    return _coordinates(*((name, exact.whole(tree[name])) for name in sorted(tree)))


@lru_cache(maxsize=1024)
def _coordinates(*items: tuple[str, int]) -> ParallelCoordinates:
    """Entries share them, since a rank has the same ones in all of its captures."""
    return ParallelCoordinates(**dict(items))


def _resume_point(pair: Any) -> ResumePoint:
    return ResumePoint(*map(exact.whole, exact.array(pair)))


def _source(pair: Any) -> tuple[int, int]:
    attempt, rollout_id = map(exact.whole, exact.array(pair))
    return attempt, rollout_id


def _file(tree: Any, rest: Callable[[], dict[str, Any]]) -> DataFile:
    file: DataFile = object.__new__(DataFile)
    vars(file).update(
        table=exact.text(tree["table"]),
        path=exact.text(tree["path"]),
        bytes=exact.whole(tree["bytes"]),
        footer=exact.text(tree["footer"]),
        digest=exact.text(tree["digest"]),
        first_row_group=exact.whole(tree["first_row_group"]),
        row_groups=tuple(map(exact.whole, exact.array(tree["row_groups"]))),
        first_row=exact.whole(tree["first_row"]),
        rows=exact.whole(tree["rows"]),
        _rest=rest,
    )
    return file
