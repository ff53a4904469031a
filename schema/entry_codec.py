"""Manifest entries to signed JSON and back; nothing is used before its type is checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar

from trajreplay.schema import exact
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
    entry: Entry = object.__new__(Entry)
    vars(entry).update(
        key=key,
        expected_ranks=tuple(map(exact.whole, exact.array(tree["expected_ranks"]))),
        status=exact.one_of(tree["status"], STATUSES),
        owner=exact.typed(tree["owner"], bool),
        cohort_size=exact.optional(tree["cohort_size"], exact.whole),
        created_us=exact.whole(tree["created_us"]),
        resumed_from=exact.optional(tree["resumed_from"], _resume_point),
        sources=tuple(map(_source, exact.array(tree["sources"]))),
        files=tuple(_file(one, path) for one in exact.array(tree["files"])),
        tokens=exact.whole(tree["tokens"]),
        reason=exact.text(tree["reason"]),
        _pending={
            name: partial(_checked, path, partial(_section, read, tree, name))
            for name, read in _SECTIONS.items()
        },
    )
    return entry


def _section(read: Callable[[Any], Any], tree: dict[str, Any], name: str) -> Any:
    return read(tree[name])


def _resume_point(pair: Any) -> ResumePoint:
    return ResumePoint(*map(exact.whole, exact.array(pair)))


def _source(pair: Any) -> tuple[int, int]:
    attempt, rollout_id = map(exact.whole, exact.array(pair))
    return attempt, rollout_id


def _file(tree: Any, path: str) -> DataFile:
    file: DataFile = object.__new__(DataFile)
    vars(file).update(
        table=exact.text(tree["table"]),
        path=exact.text(tree["path"]),
        bytes=exact.whole(tree["bytes"]),
        first_row_group=exact.whole(tree["first_row_group"]),
        row_groups=tuple(map(exact.whole, exact.array(tree["row_groups"]))),
        first_row=exact.whole(tree["first_row"]),
        rows=exact.whole(tree["rows"]),
        _pending={"columns": partial(_checked, path, partial(_section, _seals, tree, "columns"))},
    )
    return file


def _seals(tree: Any) -> dict[str, ColumnSeal]:
    return {name: _seal(*exact.array(one)) for name, one in exact.tree(tree).items()}


def _seal(digest: Any, values: Any, nulls: Any, non_finite: Any, source_dtype: Any) -> ColumnSeal:
    return ColumnSeal(
        digest=exact.text(digest),
        values=exact.whole(values),
        nulls=exact.whole(nulls),
        non_finite=exact.optional(non_finite, exact.whole),
        source_dtype=exact.optional(source_dtype, exact.text),
    )


def _outputs(trees: Any) -> tuple[Output, ...]:
    return tuple(_output(one) for one in exact.array(trees))


def _output(tree: Any) -> Output:
    get = exact.tree(tree).get
    values = get("values")
    by_row = get("scope") == "sample"
    if (values is None) == by_row or (get("value") is None) != by_row:
        raise ValueError("an output has either one value or, at scope sample, one per row")
    return Output(
        stage=exact.text(tree["stage"]),
        field=exact.text(tree["field"]),
        value=exact.optional(get("value"), read_float),
        values=None if values is None else tuple(map(read_float, exact.array(values))),
        scope=exact.optional(get("scope"), partial(exact.one_of, allowed=SCOPES)),
        reduction=exact.optional(get("reduction"), partial(exact.one_of, allowed=REDUCTIONS)),
        micro_batch_id=exact.optional(get("micro_batch_id"), exact.text),
        numerator=exact.optional(get("numerator"), read_float),
        denominator=exact.optional(get("denominator"), read_float),
        scale=read_float(tree["scale"]),
    )


def _contracts(tree: Any) -> dict[str, StageContract]:
    return {name: StageContract(name, **_texts(one)) for name, one in exact.tree(tree).items()}


def _tolerances(tree: Any) -> dict[str, Tolerance]:
    return {
        name: Tolerance(*map(read_float, exact.array(one)))
        for name, one in exact.tree(tree).items()
    }


def _origins(tree: Any) -> dict[str, LogProbOrigin]:
    return {
        name: LogProbOrigin(
            exact.text(one["source"]),
            exact.optional(one["temperature"], read_float),
            exact.optional(one["weight_version"], exact.whole),
        )
        for name, one in exact.tree(tree).items()
    }


def _parallel(tree: Any) -> ParallelCoordinates:
    return ParallelCoordinates(**exact.tree(tree))


def _texts(tree: Any) -> dict[str, Any]:
    return {name: exact.text(value) for name, value in exact.tree(tree).items()}


_SECTIONS: Mapping[str, Callable[[Any], Any]] = {
    "producer": exact.tree,
    "parallel": _parallel,
    "settings_tree": exact.tree,
    "contracts": _contracts,
    "tolerances": _tolerances,
    "origins": _origins,
    "redaction": _texts,
    "outputs": _outputs,
}
