"""Manifest entries to signed JSON and back; nothing is used before its type is checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar

from trajreplay.schema.canonical import dump_signed, load_signed, read_float
from trajreplay.schema.contracts import StageContract
from trajreplay.schema.entry import (
    REDUCTIONS,
    SCOPES,
    ColumnSeal,
    DataFile,
    Entry,
    LogProbOrigin,
    Output,
)
from trajreplay.schema.errors import DatasetError, SchemaError
from trajreplay.schema.identity import CaptureKey, ParallelCoordinates, ResumePoint
from trajreplay.schema.layout import key_of_entry
from trajreplay.schema.policy import Tolerance
from trajreplay.schema.tables import FORMAT_VERSION

STATUSES = ("complete", "dropped")
_FIELDS = tuple(one.name for one in fields(Entry))
_FILE_FIELDS = tuple(one.name for one in fields(DataFile))
_SEAL_FIELDS = tuple(one.name for one in fields(ColumnSeal))
_PLACE = ("path", "bytes", "first_row_group", "row_groups", "first_row")


def dump_entry(entry: Entry) -> bytes:
    """The entry as the bytes of its file."""
    return dump_signed(_tree(entry))


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
    entry = _checked(path, partial(_entry, tree, key, path))
    if tree["key"] != list(key):
        raise DatasetError(
            f"{path}: holds the entry of {tree['key']!r}, expected {list(key)!r}",
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
    return dump_signed(tree)


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
    tree["columns"] = {
        name: [getattr(seal, one) for one in _SEAL_FIELDS] for name, seal in file.columns.items()
    }
    return tree


_Value = TypeVar("_Value")


def _checked(path: str, read: Callable[[], _Value]) -> _Value:
    """Say where, if what is read has another type or lacks a key."""
    try:
        return read()
    except (KeyError, IndexError, TypeError, ValueError, SchemaError) as error:
        found = getattr(error, "message", None) or f"{type(error).__name__}: {error}"
        raise DatasetError(f"{path}: not a manifest entry: {found}", path=path) from error


def _entry(tree: dict[str, Any], key: CaptureKey, path: str) -> Entry:
    resumed = tree["resumed_from"]
    entry: Entry = object.__new__(Entry)
    vars(entry).update(
        key=key,
        expected_ranks=tuple(map(_whole, _list(tree["expected_ranks"]))),
        status=_one_of(tree["status"], STATUSES),
        owner=_typed(tree["owner"], bool),
        cohort_size=_optional(tree["cohort_size"], _whole),
        created_us=_whole(tree["created_us"]),
        resumed_from=None if resumed is None else ResumePoint(*map(_whole, _list(resumed))),
        sources=tuple((_whole(one[0]), _whole(one[1])) for one in _list(tree["sources"])),
        files=tuple(_file(one, path) for one in _list(tree["files"])),
        tokens=_whole(tree["tokens"]),
        reason=_text(tree["reason"]),
        _pending={
            name: partial(_checked, path, partial(_section, read, tree, name))
            for name, read in _SECTIONS.items()
        },
    )
    return entry


def _section(read: Callable[[Any], Any], tree: dict[str, Any], name: str) -> Any:
    return read(tree[name])


def _dict(value: Any) -> dict[str, Any]:
    return _typed(value, dict)


def _file(tree: Any, path: str) -> DataFile:
    file: DataFile = object.__new__(DataFile)
    vars(file).update(
        table=_text(tree["table"]),
        path=_text(tree["path"]),
        bytes=_whole(tree["bytes"]),
        first_row_group=_whole(tree["first_row_group"]),
        row_groups=tuple(map(_whole, _list(tree["row_groups"]))),
        first_row=_whole(tree["first_row"]),
        rows=_whole(tree["rows"]),
        _pending={"columns": partial(_checked, path, partial(_section, _seals, tree, "columns"))},
    )
    return file


def _seals(tree: Any) -> dict[str, ColumnSeal]:
    return {name: _seal(*_list(one)) for name, one in _dict(tree).items()}


def _seal(digest: Any, values: Any, nulls: Any, non_finite: Any, source_dtype: Any) -> ColumnSeal:
    return ColumnSeal(
        digest=_text(digest),
        values=_whole(values),
        nulls=_whole(nulls),
        non_finite=_optional(non_finite, _whole),
        source_dtype=_optional(source_dtype, _text),
    )


def _outputs(trees: Any) -> tuple[Output, ...]:
    return tuple(_output(one) for one in _list(trees))


def _output(tree: Any) -> Output:
    get = _dict(tree).get
    values = get("values")
    by_row = get("scope") == "sample"
    if (values is None) == by_row or (get("value") is None) != by_row:
        raise ValueError("an output has either one value or, at scope sample, one per row")
    return Output(
        stage=_text(tree["stage"]),
        field=_text(tree["field"]),
        value=_optional(get("value"), read_float),
        values=None if values is None else tuple(map(read_float, _list(values))),
        scope=_optional(get("scope"), partial(_one_of, allowed=SCOPES)),
        reduction=_optional(get("reduction"), partial(_one_of, allowed=REDUCTIONS)),
        micro_batch_id=_optional(get("micro_batch_id"), _text),
        numerator=_optional(get("numerator"), read_float),
        denominator=_optional(get("denominator"), read_float),
        scale=read_float(tree["scale"]),
    )


def _contracts(tree: Any) -> dict[str, StageContract]:
    return {name: StageContract(name, **_texts(one)) for name, one in _dict(tree).items()}


def _tolerances(tree: Any) -> dict[str, Tolerance]:
    return {name: Tolerance(*map(read_float, _list(one))) for name, one in _dict(tree).items()}


def _origins(tree: Any) -> dict[str, LogProbOrigin]:
    return {
        name: LogProbOrigin(
            _text(one["source"]),
            _optional(one["temperature"], read_float),
            _optional(one["weight_version"], _whole),
        )
        for name, one in _dict(tree).items()
    }


def _parallel(tree: Any) -> ParallelCoordinates:
    return ParallelCoordinates(**_dict(tree))


def _texts(tree: Any) -> dict[str, Any]:
    return {name: _text(value) for name, value in _dict(tree).items()}


_SECTIONS: Mapping[str, Callable[[Any], Any]] = {
    "producer": _dict,
    "parallel": _parallel,
    "settings_tree": _dict,
    "contracts": _contracts,
    "tolerances": _tolerances,
    "origins": _origins,
    "redaction": _texts,
    "outputs": _outputs,
}


def _typed(value: Any, kind: type[_Value]) -> _Value:
    if type(value) is not kind:
        raise ValueError(f"{value!r} is of type {type(value).__name__}, expected {kind.__name__}")
    return value


def _text(value: Any) -> str:
    return _typed(value, str)


def _list(value: Any) -> list[Any]:
    return _typed(value, list)


def _whole(value: Any) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no non-negative integer")
    return value


def _one_of(value: Any, allowed: tuple[str, ...]) -> str:
    if type(value) is not str or value not in allowed:
        raise ValueError(f"{value!r}, expected one of {', '.join(allowed)}")
    return value


def _optional(value: Any, read: Callable[[Any], _Value]) -> _Value | None:
    return None if value is None else read(value)
