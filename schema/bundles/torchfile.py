"""Files of `torch.save`: the archive checked, its pickle read as data, tensors as numpy arrays."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from trajreplay.schema.bundles.plain_zip import plain_members
from trajreplay.schema.bundles.tensors import TensorValue
from trajreplay.schema.bundles.unpickle import Unpickler
from trajreplay.schema.errors import DatasetError

_Content = bytes | memoryview
_MAX_PICKLE_BYTES = 1 << 30
_MAX_MEMBERS = 1_000_000
_HEADER_BYTES = 30
_SINGLE = frozenset((int, float, bool, type(None)))
_KNOWN_PICKLES, _KNOWN_PICKLE_BYTES = 256, 4096
_VALUES_PER_BYTE = 8  # a file that holds each value once has fewer than one a byte
_CHARACTERS_PER_VALUE = 8  # samples of one prompt share its text


def read_torch(data: bytes, where: str, *, allow_numpy: bool = False) -> Any:
    """Read what `torch.save` wrote.

    No torch is needed, and nothing in the file is run: it may come from anyone. Memory is bounded
    by the size of the file, since nothing in it may be compressed, overlap or repeat itself.

    Args:
        data: The file.
        where: Its name, for messages.
        allow_numpy: Whether scalars and arrays of numpy are taken.

    Returns:
        Dictionaries, lists, tuples, text, numbers, None and `TensorValue`.

    Raises:
        DatasetError: It is no such file, or holds anything else.
    """
    return _read(_members(data, where), len(data), where, [], allow_numpy=allow_numpy)


def _read(
    members: Mapping[str, _Content],
    size: int,
    where: str,
    used: list[str],
    *,
    allow_numpy: bool = False,
) -> Any:
    """Read the members of a file of some size; the keys of the storages are added to `used`."""
    name = _pickle(members, where)
    folder = name.removesuffix("data.pkl")
    if len(members[name]) > _MAX_PICKLE_BYTES:
        raise _broken(where, "a pickle of more than 1 GiB")

    def storage(key: str) -> _Content:
        used.append(key)
        return members[f"{folder}data/{key}"]

    found = Unpickler(where, storage, allow_numpy=allow_numpy).load(bytes(members[name]))
    if _values_of(found, _VALUES_PER_BYTE * size) > _VALUES_PER_BYTE * size:
        raise _broken(where, "the same values again and again: it unpacks to far more than it is")
    return found


def _pickle(members: Mapping[str, _Content], where: str) -> str:
    """The name of the one pickle of an archive."""
    pickles = [name for name in members if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise _broken(where, f"{len(pickles)} pickles, expected one")
    order = members.get(f"{pickles[0].removesuffix('data.pkl')}byteorder", b"little")
    if order != b"little":
        raise _broken(where, f"the byte order {bytes(order[:20])!r}, expected 'little'")
    return pickles[0]


def read_tensor(data: bytes, where: str) -> TensorValue:
    """Read a file that holds one tensor and nothing else.

    Raises:
        DatasetError: It does not.
    """
    members = _members(data, where)
    name = _pickle(members, where)
    pickle, folder = bytes(members[name]), name.removesuffix("data.pkl")
    known = _known.get(pickle)
    content = members.get(f"{folder}data/{known.key}") if known else None
    if known is not None and content is not None and len(content) == known.size_bytes:
        return TensorValue(np.frombuffer(content, known.code).reshape(known.shape), known.dtype)
    used: list[str] = []
    found = _read(members, len(data), where, used)
    if not isinstance(found, TensorValue):
        raise _broken(where, f"a {type(found).__name__}, expected one tensor")
    values, size = found.values, len(members[f"{folder}data/{used[0]}"])
    if len(used) == 1 and values.nbytes == size and len(pickle) <= _KNOWN_PICKLE_BYTES:
        if len(_known) >= _KNOWN_PICKLES:
            _known.clear()
        _known[pickle] = _Layout(used[0], values.dtype.str, found.dtype, found.shape, size)
    return found


@dataclass(frozen=True)
class _Layout:
    """A tensor that is the whole of the one storage that its pickle names."""

    key: str
    code: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


# The pickles of tensors of one dtype and shape are equal, byte for byte, and so is what they say.
_known: dict[bytes, _Layout] = {}


def _values_of(found: Any, limit: int) -> int:
    """The values in a tree, those that are in it twice counted twice; no more than past a limit.

    Text and bytes count by their length, since a reference to them is a few bytes of any pickle.
    """
    total, ahead = 0, [found]
    while ahead and total <= limit:
        one = ahead.pop()
        if isinstance(one, TensorValue):
            total += one.values.size
        elif isinstance(one, str | bytes):
            total += len(one) // _CHARACTERS_PER_VALUE
        elif isinstance(one, dict | list | tuple):
            total += len(one)
            ahead += [item for item in one if type(item) not in _SINGLE]
            if isinstance(one, dict):
                ahead += [item for item in one.values() if type(item) not in _SINGLE]
    return total


def _members(data: bytes, where: str) -> Mapping[str, _Content]:
    """The members of an archive by name."""
    if not data.startswith(b"PK\x03\x04"):
        kind = "a bare pickle" if data[:1] == b"\x80" else "no archive"
        raise _broken(
            where, f"{kind}, expected the archive that torch.save writes since version 1.6"
        )
    plain = plain_members(data)
    if plain is not None:
        return plain
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            found = archive.infolist()
            _check_archive(found, len(data), where)
            return {one.filename: archive.read(one) for one in found}
    except (zipfile.BadZipFile, EOFError, OSError, ValueError, NotImplementedError) as error:
        raise _broken(where, f"an archive that is broken: {error}") from error
    except (RuntimeError, KeyError, IndexError, UnicodeDecodeError) as error:
        raise _broken(where, "an archive that is broken or locked") from error


def _check_archive(found: list[zipfile.ZipInfo], size: int, where: str) -> None:
    """Refuse an archive that unpacks to more than it is."""
    names = {one.filename for one in found}
    packed = [one for one in found if one.compress_type != zipfile.ZIP_STORED]
    if packed:
        raise _broken(where, f"{packed[0].filename!r} compressed, expected plain bytes")
    if len(names) < len(found) or len(found) > _MAX_MEMBERS:
        raise _broken(where, "members of the same name")
    total = 0
    for one in found:
        total += one.file_size + _HEADER_BYTES + len(one.filename)
        if one.file_size != one.compress_size or total > size:
            raise _broken(where, "members that overlap or are larger than the file")


def _broken(where: str, what: str) -> DatasetError:
    return DatasetError(
        f"{where} holds {what}",
        hint="Nothing in it was run. Get the file again from where it was written.",
        path=where,
    )
