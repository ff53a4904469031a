"""Files of `torch.save`: the archive checked, its pickle read as data, tensors as numpy arrays."""

from __future__ import annotations

import io
import zipfile
from typing import Any

from trajreplay.schema.bundles.unpickle import TensorValue, Unpickler
from trajreplay.schema.errors import DatasetError

_MAX_PICKLE_BYTES = 1 << 30
_MAX_MEMBERS = 1_000_000
_HEADER_BYTES = 30
_NESTED = (dict, list, tuple, TensorValue)
_VALUES_PER_BYTE = 8  # a file that holds each value once has fewer than one a byte


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
    members = _members(data, where)
    pickles = [name for name in members if name.endswith("/data.pkl")]
    if len(pickles) != 1:
        raise _broken(where, f"{len(pickles)} pickles, expected one")
    folder = pickles[0].removesuffix("data.pkl")
    order = members.get(f"{folder}byteorder", b"little")
    if order != b"little":
        raise _broken(where, f"the byte order {order[:20]!r}, expected 'little'")
    if len(members[pickles[0]]) > _MAX_PICKLE_BYTES:
        raise _broken(where, "a pickle of more than 1 GiB")

    def storage(key: str) -> bytes:
        return members[f"{folder}data/{key}"]

    found = Unpickler(where, storage, allow_numpy=allow_numpy).load(members[pickles[0]])
    if _values_of(found, _VALUES_PER_BYTE * len(data)) > _VALUES_PER_BYTE * len(data):
        raise _broken(where, "the same values again and again: it unpacks to far more than it is")
    return found


def read_tensor(data: bytes, where: str) -> TensorValue:
    """Read a file that holds one tensor and nothing else.

    Raises:
        DatasetError: It does not.
    """
    found = read_torch(data, where)
    if not isinstance(found, TensorValue):
        raise _broken(where, f"a {type(found).__name__}, expected one tensor")
    return found


def _values_of(found: Any, limit: int) -> int:
    """The values in a tree, those that are in it twice counted twice; no more than past a limit."""
    total, ahead = 0, [found] if isinstance(found, _NESTED) else []
    while ahead and total <= limit:
        one = ahead.pop()
        if isinstance(one, TensorValue):
            total += one.values.size
            continue
        inside = one.values() if isinstance(one, dict) else one
        total += len(inside)
        ahead += [item for item in inside if isinstance(item, _NESTED)]
    return total


def _members(data: bytes, where: str) -> dict[str, bytes]:
    """The members of an archive by name."""
    if not data.startswith(b"PK\x03\x04"):
        kind = "a bare pickle" if data[:1] == b"\x80" else "no archive"
        raise _broken(
            where, f"{kind}, expected the archive that torch.save writes since version 1.6"
        )
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
