"""Tensors, and arrays and numbers of numpy, as a pickle describes them: made of plain bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trajreplay.schema.errors import DatasetError

# torch's storage classes: the numpy dtype of their bytes, and the dtype as torch calls it.
STORAGES = {
    "FloatStorage": ("<f4", "float32"),
    "DoubleStorage": ("<f8", "float64"),
    "HalfStorage": ("<f2", "float16"),
    "BFloat16Storage": ("<u2", "bfloat16"),
    "LongStorage": ("<i8", "int64"),
    "IntStorage": ("<i4", "int32"),
    "ShortStorage": ("<i2", "int16"),
    "CharStorage": ("|i1", "int8"),
    "ByteStorage": ("|u1", "uint8"),
    "BoolStorage": ("|b1", "bool"),
}
_NUMPY_DTYPES = ("f2", "f4", "f8", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "b1")
NUMPY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")


@dataclass(frozen=True)
class TensorValue:
    """A tensor of a file.

    Args:
        values: Its values in its shape; those of bfloat16 as their bits.
        dtype: Its dtype as torch calls it.
    """

    values: np.ndarray[Any, np.dtype[Any]]
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.values.shape)


@dataclass(frozen=True)
class Global:
    """A name of a module, never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True)
class Storage:
    """The values of a storage, and their dtype as torch calls it."""

    values: np.ndarray[Any, np.dtype[Any]]
    dtype: str


@dataclass
class Array:
    """A numpy array before its state is known."""

    values: np.ndarray[Any, np.dtype[Any]] | None = None


@dataclass
class Dtype:
    """A dtype of numpy by its name."""

    name: str


class Maker:
    """Makes what a pickle may hold beside plain values.

    Args:
        where: The file, for messages.
        allow_numpy: Whether scalars and arrays of numpy are taken.
    """

    def __init__(self, where: str, *, allow_numpy: bool = False) -> None:
        self._where = where
        self.allow_numpy = allow_numpy

    def refused(self, what: str) -> DatasetError:
        """What to raise of a pickle that holds something else."""
        return DatasetError(
            f"{self._where} holds {what}, expected tensors, numbers, text, lists and dictionaries",
            hint="Nothing in it was run. Save it again with plain values and tensors only.",
            path=self._where,
        )

    def storage(self, of: Global, data: bytes | memoryview, size: Any) -> Storage:
        """The values of a storage of a class of torch."""
        code, dtype = STORAGES[of.name]
        if type(size) is not int or len(data) != size * np.dtype(code).itemsize:
            raise self.refused(f"a storage of {len(data)} bytes that claims {size!r} values")
        return Storage(np.frombuffer(data, code), dtype)

    def tensor(self, storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> Any:
        """A tensor, only as the whole, contiguous content of a storage or a part of it.

        A tensor may also be a view that repeats values: a few bytes that take any memory.
        """
        whole = (offset, *shape, *stride)
        if not isinstance(storage, Storage) or not all(type(one) is int for one in whole):
            raise ValueError("no tensor")
        expected, size = [], 1
        for length in reversed(shape):
            expected.append(size)
            size *= length
        steps = zip(shape, stride, reversed(expected), strict=True)
        if min(whole) < 0 or any(length > 1 and step != want for length, step, want in steps):
            raise self.refused(
                f"a tensor of shape {shape} with strides {stride}, which is not contiguous"
            )
        if offset + size > len(storage.values):
            raise self.refused(f"a tensor of shape {shape} in {len(storage.values)} values")
        return TensorValue(storage.values[offset : offset + size].reshape(shape), storage.dtype)

    def numpy(self, function: Global, arguments: tuple[Any, ...], ahead: Sequence[Any]) -> Any:
        """What a call of numpy makes; `ahead` is what was made before, and for it."""
        if not self.allow_numpy:
            name = _numpy_name(function, ahead)
            raise DatasetError(
                f"{self._where} holds {name}, expected tensors, numbers, text, lists and "
                "dictionaries",
                hint="Write it again without numpy: tensors, or plain numbers with .item().",
                path=self._where,
                numpy=name,
            )
        if function.name == "dtype":
            name = arguments[0]
            if name not in _NUMPY_DTYPES:
                raise self.refused(f"the numpy dtype {name!r}")
            return Dtype(name)
        if function.name == "scalar":
            dtype, content = arguments
            if not isinstance(dtype, Dtype) or type(content) is not bytes:
                raise ValueError("no scalar")
            (value,) = np.frombuffer(content, f"<{dtype.name}")
            return value.item()
        if function.name == "_reconstruct":
            return Array()
        raise self.refused(f"a call of {function}")

    def set_state(self, target: Any, state: Any) -> None:
        """Give a dtype or an array of numpy what it is made of."""
        if isinstance(target, Dtype):
            if type(state) is not tuple or state[1] not in ("<", "|", "="):
                raise self.refused("a numpy dtype of another byte order")
            return
        if isinstance(target, Array):
            _, shape, dtype, fortran, content = state
            if not isinstance(dtype, Dtype) or type(content) is not bytes or fortran is not False:
                raise self.refused("a numpy array that is no plain block of numbers")
            target.values = np.frombuffer(content, f"<{dtype.name}").reshape(shape)
            return
        if type(target) is dict and not state:  # what torch keeps beside the weights of a module
            return
        raise self.refused(f"the state of a {type(target).__name__}")


def plain(value: Any) -> Any:
    """A value as it is handed out."""
    if isinstance(value, Array):
        if value.values is None:
            raise ValueError("an array without values")
        return TensorValue(value.values, value.values.dtype.name)
    return value


def _numpy_name(function: Global, ahead: Sequence[Any]) -> str:
    """What of numpy is made: its dtype is made before, and for it."""
    named = [one for one in ahead if isinstance(one, Global)]
    of_numpy = [one for one in named if one.module in NUMPY_MODULES]
    return str(of_numpy[-1] if of_numpy else function)
