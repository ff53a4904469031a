"""Dumps that `torch.save` wrote, read as data; values of samples and tokens in any plain form."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trajreplay.capture.importers.registry import ImportOptions
from trajreplay.schema.bundles.fields import Fields
from trajreplay.schema.bundles.folder import Folder
from trajreplay.schema.bundles.tensors import TensorValue
from trajreplay.schema.bundles.torchfile import read_torch
from trajreplay.schema.errors import DatasetError

MAX_DUMP_BYTES = 8 << 30
ROUTES = "rollout_routed_experts"  # as slime and Relax call the sampler's choices of experts
_LARGEST = 2.0**63
_ALLOW = "Numbers and arrays of numpy are taken with --allow-numpy; nothing in the file is run."


def load_dump(path: Path, options: ImportOptions) -> Any:
    """Read a file of `torch.save`, on whatever device its tensors were.

    Raises:
        DatasetError: It is none, is too large, or holds what is no plain value or tensor.
    """
    content = Folder(path.parent).read(path.name, MAX_DUMP_BYTES)
    try:
        return read_torch(content, str(path), allow_numpy=options.allow_numpy)
    except DatasetError as error:
        if "numpy" in error.facts:
            raise DatasetError(error.message, hint=_ALLOW, **error.facts) from error
        raise


def load_fields(path: Path, options: ImportOptions) -> Fields:
    """Read a file of one dictionary.

    Raises:
        DatasetError: It is none.
    """
    return Fields(load_dump(path, options), str(path))


def scalar(value: Any) -> float:
    """A number, or a tensor of one."""
    if isinstance(value, TensorValue) and value.values.size == 1 and value.dtype != "bfloat16":
        value = value.values.item()
    if type(value) not in (int, float):
        raise ValueError("a number")
    return float(value)


def vector(value: Any) -> TensorValue | list[float]:
    """Numbers of the tokens of one sample, with their dtype if they have one."""
    if isinstance(value, TensorValue):
        if value.values.ndim != 1:
            raise ValueError("a tensor of one dimension")
        return value
    if type(value) is not list or not set(map(type, value)) <= {int, float}:
        raise ValueError("a tensor of one dimension or a list of numbers")
    return value


def integers(value: Any) -> npt.NDArray[np.int64]:
    """Integers, as a tensor or list; floats that are whole are taken too."""
    if isinstance(value, TensorValue) and value.dtype != "bfloat16":
        value = vector(value)
        assert isinstance(value, TensorValue)
        found = value.values
    elif type(value) is list and set(map(type, value)) <= {int, float, bool}:
        found = np.array(value or [], dtype=None if value else np.int64)
    else:
        raise ValueError("integers, as a list or a tensor of one dimension")
    if found.dtype == object or not (np.abs(found.astype(np.float64)) < _LARGEST).all():
        raise ValueError("whole numbers that fit 64 bits")
    whole = found.astype(np.int64)
    if not np.array_equal(whole, found):
        raise ValueError("whole numbers")
    return whole


def routes_of(rows: Sequence[Fields]) -> dict[str, list[Any]]:
    """The sampler's choices of experts, as `routes` of a capture record.

    Each is (tokens, layers, top_k) of integers. Nothing where no sample has them, or any has them
    in another form: they are then left where what is not taken is named.
    """
    found = [None if (value := one.tree.get(ROUTES)) is None else _choices(value) for one in rows]
    known = all(one is None or (one.ndim == 3 and one.dtype.kind in "iu") for one in found)
    held = known and any(one is not None for one in found)
    return {"rollout_experts": found} if held else {}


def _choices(value: Any) -> npt.NDArray[Any]:
    if isinstance(value, TensorValue):
        return value.values if value.dtype != "bfloat16" else np.empty(0)
    try:
        return np.array(value) if type(value) is list else np.empty(0)
    except ValueError:  # a ragged one
        return np.empty(0)
