"""The beginning of a torch file or pickle: what it is a file of, told without reading all of it."""

from __future__ import annotations

import itertools
import os
import pickletools
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from trajreplay.schema.errors import DatasetError
from trajreplay.schema.localstore import LocalStore

_LOOKED_AT_BYTES = 1 << 20
_MOST_INSTRUCTIONS = 200  # the plain values that come first are few
_MEMBER = struct.Struct("<4s22xHH")  # a local header of a zip archive: sizes of name and extra
_TEXT = re.compile(rb"X(.)\x00\x00\x00|\x8c(.)", re.DOTALL)  # with its length in one byte
_NAME = re.compile(rb"[A-Za-z_][A-Za-z0-9_]{0,63}")
_MOST_TEXTS = 4096
_PLAIN = ("BININT", "BININT1", "BININT2", "BINFLOAT", "LONG1")
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_TEXTS = ("BINUNICODE", "SHORT_BINUNICODE")
_END: tuple[str, Any] = ("", None)
_SILENT = ("PROTO", "FRAME", "MARK", "BINPUT", "LONG_BINPUT", "MEMOIZE")


@dataclass(frozen=True)
class Head:
    """What a file begins with.

    Args:
        archive: Whether it is an archive of `torch.save`, and no bare pickle.
        listed: Whether it holds a list; what follows is then of its first item.
        type: The type of the object that it holds; empty for a dictionary and whatever else.
        values: The plain values of the dictionary before the first that is none.
        nested: The name of that one.
        names: Names that occur near the beginning, of dictionaries inside too.
    """

    archive: bool
    listed: bool = False
    type: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    nested: str = ""
    names: frozenset[str] = frozenset()


def head_of(path: Path) -> Head | None:
    """Look at the first megabyte of a file; None for one that is no torch file and no pickle.

    Nothing in it is run, and nothing is trusted: whether it is what it seems to be shows when it
    is read.
    """
    try:
        status = path.lstat()
        return _head_of(path, status.st_size, status.st_mtime_ns)
    except (OSError, DatasetError):
        return None


@lru_cache(maxsize=4096)
def _head_of(path: Path, _size: int, _changed: int) -> Head | None:
    """One look at each state of a file, however many kinds ask."""
    with os.fdopen(LocalStore(path.parent).open(path.name), "rb") as file:
        start = file.read(_MEMBER.size)
        if start[:1] == b"\x80":
            return _parsed(start + file.read(_LOOKED_AT_BYTES), archive=False)
        if len(start) < _MEMBER.size or start[:4] != b"PK\x03\x04":
            return None
        _, name, extra = _MEMBER.unpack(start)
        if not file.read(name).endswith(b"/data.pkl"):
            return None
        file.seek(extra, os.SEEK_CUR)
        return _parsed(file.read(_LOOKED_AT_BYTES), archive=True)


def _parsed(data: bytes, *, archive: bool) -> Head:
    names = frozenset(_names(data))
    instructions = _instructions(data)
    code, argument = next(instructions, _END)
    listed = code == "EMPTY_LIST"
    if listed:
        code, argument = next(instructions, _END)
    texts = []
    while code in _TEXTS:  # the module and the name of a global, since protocol 4
        texts.append(argument)
        code, argument = next(instructions, _END)
    if code == "STACK_GLOBAL" and len(texts) == 2:
        return Head(archive, listed, ".".join(texts), names=names)
    if code == "GLOBAL":
        return Head(archive, listed, argument.replace(" ", "."), names=names)
    if code != "EMPTY_DICT":
        return Head(archive, listed, names=names)
    values, nested = _plain_values(instructions)
    return Head(archive, listed, "", values, nested, names)


def _names(data: bytes) -> Iterator[str]:
    """Short texts that may be the names of fields."""
    for one in itertools.islice(_TEXT.finditer(data), _MOST_TEXTS):
        size = (one[1] or one[2])[0]
        text = data[one.end() : one.end() + size]
        if _NAME.fullmatch(text):
            yield text.decode()


def _plain_values(instructions: Iterator[tuple[str, Any]]) -> tuple[dict[str, Any], str]:
    """The values of a dictionary before the first that is not plain, and the name of that one."""
    values: dict[str, Any] = {}
    for code, name in instructions:
        if code not in _TEXTS:
            break
        kind, value = next(instructions, _END)
        if kind not in _PLAIN and kind not in _TEXTS and kind not in _CONSTANTS:
            return values, name
        values[name] = _CONSTANTS.get(kind, value)
    return values, ""


def _instructions(data: bytes) -> Iterator[tuple[str, Any]]:
    """The instructions of a pickle that may end anywhere, without those that change nothing here.

    A text that occurred before is fetched by its place and is given as the text again.
    """
    memo: dict[int, Any] = {}
    last: Any = None
    try:
        place: int
        argument: Any
        for place, (code, argument, _) in enumerate(pickletools.genops(data)):
            if place > _MOST_INSTRUCTIONS:
                return
            if code.name in ("BINPUT", "LONG_BINPUT", "MEMOIZE"):
                memo[len(memo) if argument is None else argument] = last
            last = argument if code.name in _TEXTS else None
            if code.name in ("BINGET", "LONG_BINGET") and type(memo.get(argument)) is str:
                yield "BINUNICODE", memo[argument]
            elif code.name not in _SILENT:
                yield code.name, argument
    except ValueError:
        return
