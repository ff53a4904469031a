"""Canonical signed JSON: sorted keys, exact floats, and at the end the digest of its own bytes."""

from __future__ import annotations

import json
import marshal
import math
import struct
from collections.abc import Collection, Mapping
from typing import Any

from trajreplay.schema.errors import DatasetError
from trajreplay.schema.filedigest import bytes_digest

MAX_BYTES = 1 << 20
PLAIN_MARSHAL = 2  # without references between equal objects: equal trees become equal bytes
MAX_DEPTH = 16
_EXACT = ("0x", "-0x", "inf", "-inf")
_SEAL = b',"~blake3":"'
_SEAL_BYTES = len(_SEAL) + 64 + len(b'"}')


def dump_signed(tree: Mapping[str, Any], recurring: Collection[str] = ()) -> bytes:
    """Encode an object and append the digest of its bytes as the last key.

    Args:
        tree: The object.
        recurring: Keys of objects of plain values which are those of another tree, mostly: their
            text is kept.
    """
    texts = (
        f"{_ENCODER.encode(key)}:{_kept_text(value) if key in recurring else _text(value)}"
        for key, value in sorted(tree.items())
    )
    body = f"{{{','.join(texts)}".encode()
    return body + _SEAL + bytes_digest(body).encode() + b'"}'


def _text(value: Any) -> str:
    return _ENCODER.encode(_exact(value))


_texts: dict[bytes, str] = {}
_KEPT_TEXTS = 256


def _kept_text(value: Any) -> str:
    try:
        content = marshal.dumps(value, PLAIN_MARSHAL)
    except ValueError:
        return _text(value)
    found = _texts.get(content)
    if found is None:
        if len(_texts) >= _KEPT_TEXTS:
            _texts.clear()
        found = _texts[content] = _text(value)
    return found


def load_signed(data: bytes, where: str) -> dict[str, Any]:
    """Decode what `dump_signed` made; floats stay text, see `read_float`.

    Raises:
        DatasetError: The digest does not match, or it is not standard JSON of a bounded size and
            depth without duplicate keys.
    """
    if len(data) > MAX_BYTES:
        raise DatasetError(f"{where}: {len(data)} bytes, expected at most {MAX_BYTES}", path=where)
    body, seal = data[:-_SEAL_BYTES], data[-_SEAL_BYTES:]
    if seal != _SEAL + bytes_digest(body).encode() + b'"}':
        raise DatasetError(
            f"{where}: its bytes do not have the digest that it ends with: truncated or changed",
            hint="Restore the file from a copy of the lake; it is not written twice.",
            path=where,
        )
    try:
        text = (body + b"}").decode()
        tree = _DECODER.decode(text)
        keys, depth = _measure(tree)
        if keys != body.count(b'":') or any(space in body for space in _LOOSE):
            tree = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{where}: not standard JSON: {error}", path=where) from error
    if not isinstance(tree, dict) or depth > MAX_DEPTH:
        raise DatasetError(f"{where}: expected an object at most {MAX_DEPTH} deep", path=where)
    return tree


def parse_verified(data: bytes) -> dict[str, Any]:
    """Decode again what `load_signed` has accepted."""
    tree: dict[str, Any] = _DECODER.decode(data.decode())
    return tree


def write_float(value: float) -> str:
    """A float as exact text: hexadecimal digits, or the bits of a NaN.

    >>> write_float(0.5), write_float(float("inf")), read_float("nan:7ff8000000000000")
    ('0x1.0000000000000p-1', 'inf', nan)
    """
    if math.isnan(value):
        return f"nan:{struct.unpack('>Q', struct.pack('>d', value))[0]:016x}"
    return value.hex() if math.isfinite(value) else ("inf" if value > 0 else "-inf")


def read_float(text: object) -> float:
    """The float that `write_float` wrote; integers are taken as they are.

    Raises:
        ValueError: It is neither.
    """
    if isinstance(text, str) and text.startswith("nan:"):
        bits = bytes.fromhex(text[4:])
        value = struct.unpack(">d", bits)[0] if len(bits) == 8 else 0.0
        if not math.isnan(value):
            raise ValueError(f"{text!r} is no NaN")
        return float(value)
    try:
        if isinstance(text, (int, float)) and not isinstance(text, bool):
            return float(text)
        if isinstance(text, str) and text.startswith(_EXACT):  # "10" would be sixteen
            return float.fromhex(text)
    except OverflowError as error:
        raise ValueError(f"{text!r} is too large for a float") from error
    raise ValueError(f"{text!r} is no number")


_ENCODER = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
)
_AS_THEY_ARE = frozenset((str, int, bool, type(None)))


def _exact(value: Any) -> Any:
    if type(value) in _AS_THEY_ARE:
        return value
    if isinstance(value, float):
        return write_float(value)
    if isinstance(value, dict):
        return {key: _exact(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_exact(item) for item in value]
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    tree = dict(pairs)
    if len(tree) != len(pairs):
        raise ValueError("an object has the same key twice")
    return tree


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not standard JSON")


# A key that occurs twice in an object is lost in parsing, so that the text shows more keys than
# the tree has. Counting is several times cheaper than a hook for every object; where the text
# makes the count uncertain, the hook decides.
_DECODER = json.JSONDecoder(parse_constant=_no_constant)
_LOOSE = (b'" ', b"\n", b"\r", b"\t")


def _measure(tree: Any) -> tuple[int, int]:
    """Keys of all objects of a tree, and how deep it nests; no deeper than the limit is told."""
    keys = 0
    level = [tree]
    for depth in range(MAX_DEPTH + 1):
        below: list[Any] = []
        nested = 0
        for one in level:
            kind = type(one)
            if kind is dict:
                nested = 1
                keys += len(one)
                below += one.values()
            elif kind is list:
                nested = 1
                below += one
        if not below:
            return keys, depth + nested
        level = below
    return keys, MAX_DEPTH + 1
