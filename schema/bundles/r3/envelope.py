"""Routed experts as one string, the form in which NeMo-RL hands them from server to server.

    nrlre1:<dtype>:<S>x<L>x<K>:<base64 of the array's bytes, row-major, little-endian>

Source: NVIDIA NeMo-RL, `nemo_rl/utils/routed_experts_codec.py`, as of mid 2026.
"""

from __future__ import annotations

import base64
import binascii
import math
import re
from typing import Any

import numpy as np

from trajreplay.schema.errors import SchemaError
from trajreplay.schema.tables import MAX_CHOICES

MAGIC = "nrlre1"
DTYPES = ("int8", "int16", "int32")
_HEAD = re.compile(r"([^:]{0,16}):([^:]{0,16}):([0-9]{1,10})x([0-9]{1,10})x([0-9]{1,10}):")

Routes = np.ndarray[Any, np.dtype[np.signedinteger[Any]]]


def encode_envelope(routes: Routes) -> str:
    """Put (tokens, layers, top_k) routes into an envelope.

    Raises:
        SchemaError: They have another number of dimensions, or another dtype.

    >>> encode_envelope(np.array([[[0, 1]], [[2, 3]]], np.int16))
    'nrlre1:int16:2x1x2:AAABAAIAAwA='
    """
    if routes.ndim != 3 or routes.dtype.name not in DTYPES:
        raise SchemaError(
            f"routes are {routes.dtype.name} of shape {routes.shape}, expected three dimensions of "
            f"{', '.join(DTYPES)}"
        )
    shape = "x".join(map(str, routes.shape))
    content = np.ascontiguousarray(routes.astype(routes.dtype.newbyteorder("<")))
    packed = base64.b64encode(content.tobytes()).decode()
    return f"{MAGIC}:{routes.dtype.name}:{shape}:{packed}"


def decode_envelope(text: str) -> Routes:
    """Take (tokens, layers, top_k) routes out of an envelope.

    Args:
        text: The envelope.

    Raises:
        SchemaError: It is none, or its bytes are not those of its shape.

    >>> decode_envelope("nrlre1:int16:2x1x2:AAABAAIAAwA=").tolist()
    [[[0, 1]], [[2, 3]]]
    """
    head = _HEAD.match(text)
    if head is None or head[1] != MAGIC:
        raise SchemaError(
            f"an envelope of routes begins with {text[:40]!r}, expected {MAGIC}:DTYPE:SxLxK:"
        )
    dtype, shape = head[2], tuple(int(one) for one in head.groups()[2:])
    if dtype not in DTYPES:
        raise SchemaError(f"an envelope of routes holds {dtype!r}, expected {', '.join(DTYPES)}")
    if math.prod(shape[1:]) > MAX_CHOICES:
        raise SchemaError(
            f"an envelope of routes has {shape[1]} layers of {shape[2]} choices, expected at most "
            f"{MAX_CHOICES} choices of a token"
        )
    packed = text[head.end() :]
    expected = math.prod(shape) * np.dtype(dtype).itemsize
    if len(packed) != -(-expected // 3) * 4:
        raise SchemaError(
            f"an envelope of routes of shape {'x'.join(map(str, shape))} has {len(packed)} "
            f"characters, expected those of {expected} bytes"
        )
    try:
        content = base64.b64decode(packed, validate=True)
    except (binascii.Error, ValueError) as error:
        raise SchemaError(f"an envelope of routes is no base64: {error}") from error
    if len(content) != expected:
        raise SchemaError(
            f"an envelope of routes holds {len(content)} bytes, expected {expected} of shape "
            f"{'x'.join(map(str, shape))}"
        )
    little = np.dtype(dtype).newbyteorder("<")
    return np.frombuffer(content, little).astype(dtype).reshape(shape)
