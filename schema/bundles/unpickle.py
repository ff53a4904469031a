"""A pickle read as data: a machine that knows the few instructions of tensor files and runs none.

Nothing is imported, called or built but what this module names. Whatever else a pickle asks for,
by a global name or an instruction, is refused with that name.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from trajreplay.schema.errors import DatasetError

MAX_INSTRUCTIONS = 50_000_000
_MAX_LONG_BYTES = 16
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
_NUMPY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")


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
class _Global:
    """A name of a module, never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True)
class _Storage:
    values: np.ndarray[Any, np.dtype[Any]]
    dtype: str


class _Mark:
    """The place on the stack where a sequence begins."""


@dataclass
class _Array:
    """A numpy array before its state is known."""

    values: np.ndarray[Any, np.dtype[Any]] | None = None


@dataclass
class _Dtype:
    name: str


class Unpickler:
    """The machine.

    Args:
        where: The file, for messages.
        storage: The bytes of a storage by its key.
        allow_numpy: Whether scalars and arrays of numpy are taken.
    """

    def __init__(
        self, where: str, storage: Callable[[str], bytes], *, allow_numpy: bool = False
    ) -> None:
        self._where = where
        self._storage = storage
        self._allow_numpy = allow_numpy
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def load(self, data: bytes) -> Any:
        """Read a pickle.

        Returns:
            Dictionaries, lists, tuples, text, numbers, None and `TensorValue`.

        Raises:
            DatasetError: It holds anything else.
        """
        try:
            for place, (code, argument, _) in enumerate(pickletools.genops(data)):
                if place > MAX_INSTRUCTIONS:
                    raise self._refused("more instructions than any tensor file has")
                if code.name == "STOP":
                    return self._result()
                step = _STEPS.get(code.name)
                if step is None:
                    raise self._refused(self._what_is_made(code.name))
                step(self, argument)
        except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
            raise self._refused(f"a pickle that is broken ({type(error).__name__})") from error
        raise self._refused("a pickle without an end")

    def _result(self) -> Any:
        (found,) = self._stack
        if isinstance(found, _Global | _Storage | _Dtype | _Mark):
            raise self._refused(f"{found}")
        return _plain(found)

    def _refused(self, what: str) -> DatasetError:
        return DatasetError(
            f"{self._where} holds {what}, expected tensors, numbers, text, lists and dictionaries",
            hint="Nothing in it was run. Save it again with plain values and tensors only.",
            path=self._where,
        )

    def _what_is_made(self, instruction: str) -> str:
        """What an instruction that is not known would have made."""
        named = [one for one in self._stack if isinstance(one, _Global)]
        made = instruction in ("NEWOBJ", "NEWOBJ_EX", "OBJ", "INST") and named
        return f"an object of the type {named[-1]}" if made else f"the instruction {instruction}"

    def _since_mark(self) -> list[Any]:
        stack = self._stack
        place = len(stack) - 1
        while not isinstance(stack[place], _Mark):
            place -= 1
            if place < 0:
                raise ValueError("no mark")
        items = stack[place + 1 :]
        del stack[place:]
        return items

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _tuple(self, size: int | None) -> None:
        items = self._since_mark() if size is None else self._popped(size)
        self._push(tuple(map(_plain, items)))

    def _popped(self, size: int) -> list[Any]:
        if not size:
            return []
        items = self._stack[-size:]
        if len(items) < size:
            raise ValueError("the stack is empty")
        del self._stack[-size:]
        return items

    def _append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise ValueError("no list")
        target += map(_plain, items)

    def _set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise ValueError("no dictionary")
        for name, value in zip(items[::2], items[1::2], strict=True):
            if type(name) not in (str, int):
                raise ValueError("a key that is neither text nor number")
            target[name] = _plain(value)

    def _global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._push(_Global(module, name))

    def _stack_global(self) -> None:
        module, name = self._popped(2)
        if type(module) is not str or type(name) is not str:
            raise ValueError("a name that is no text")
        self._push(_Global(module, name))

    def _persistent(self) -> None:
        """A storage, named by its class, key, device and number of values."""
        kind, of, key, _, size = self._stack.pop()
        if kind != "storage" or not isinstance(of, _Global) or type(key) is not str:
            raise ValueError("no storage")
        if of.module != "torch" or of.name not in STORAGES:
            raise self._refused(f"a storage of the type {of}")
        code, dtype = STORAGES[of.name]
        data = self._storage(key)
        if type(size) is not int or len(data) != size * np.dtype(code).itemsize:
            raise self._refused(f"a storage of {len(data)} bytes that claims {size!r} values")
        self._push(_Storage(np.frombuffer(data, code), dtype))

    def _reduce(self) -> None:
        function, arguments = self._popped(2)
        if not isinstance(function, _Global) or type(arguments) is not tuple:
            raise ValueError("no call")
        if function == _Global("torch._utils", "_rebuild_tensor_v2"):
            self._push(self._tensor(*arguments))
        elif function == _Global("collections", "OrderedDict") and not arguments:
            self._push({})
        elif function.module in _NUMPY_MODULES or function.module == "numpy":
            self._push(self._numpy(function, arguments))
        elif function == _Global("_codecs", "encode") and self._allow_numpy:
            content, encoding = arguments
            if type(content) is not str or encoding != "latin1":
                raise ValueError("no bytes")
            self._push(content.encode("latin1"))
        else:
            raise self._refused(f"a call of {function}")

    def _tensor(self, storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> Any:
        """A tensor, only as the whole, contiguous content of a storage or a part of it.

        A tensor may also be a view that repeats values: a few bytes that take any memory.
        """
        whole = (offset, *shape, *stride)
        if not isinstance(storage, _Storage) or not all(type(one) is int for one in whole):
            raise ValueError("no tensor")
        expected, size = [], 1
        for length in reversed(shape):
            expected.append(size)
            size *= length
        steps = zip(shape, stride, reversed(expected), strict=True)
        if min(whole) < 0 or any(length > 1 and step != want for length, step, want in steps):
            raise self._refused(
                f"a tensor of shape {shape} with strides {stride}, which is not contiguous"
            )
        if offset + size > len(storage.values):
            raise self._refused(f"a tensor of shape {shape} in {len(storage.values)} values")
        return TensorValue(storage.values[offset : offset + size].reshape(shape), storage.dtype)

    def _numpy(self, function: _Global, arguments: tuple[Any, ...]) -> Any:
        if not self._allow_numpy:
            name = self._numpy_name(function)
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
                raise self._refused(f"the numpy dtype {name!r}")
            return _Dtype(name)
        if function.name == "scalar":
            dtype, content = arguments
            if not isinstance(dtype, _Dtype) or type(content) is not bytes:
                raise ValueError("no scalar")
            (value,) = np.frombuffer(content, f"<{dtype.name}")
            return value.item()
        if function.name == "_reconstruct":
            return _Array()
        raise self._refused(f"a call of {function}")

    def _numpy_name(self, function: _Global) -> str:
        """What of numpy is made: its dtype is made before, and for it."""
        ahead = [one for one in self._stack if isinstance(one, _Global)]
        of_numpy = [one for one in ahead if one.module in _NUMPY_MODULES]
        return str(of_numpy[-1] if of_numpy else function)

    def _build(self) -> None:
        target, state = self._stack[-2], self._stack[-1]
        self._stack.pop()
        if isinstance(target, _Dtype):
            if type(state) is not tuple or state[1] not in ("<", "|", "="):
                raise self._refused("a numpy dtype of another byte order")
            return
        if isinstance(target, _Array):
            _, shape, dtype, fortran, content = state
            if not isinstance(dtype, _Dtype) or type(content) is not bytes or fortran is not False:
                raise self._refused("a numpy array that is no plain block of numbers")
            target.values = np.frombuffer(content, f"<{dtype.name}").reshape(shape)
            return
        if type(target) is dict and not state:  # what torch keeps beside the weights of a module
            return
        raise self._refused(f"the state of a {type(target).__name__}")

    def _get(self, place: int) -> None:
        self._push(self._memo[place])

    def _put(self, place: int) -> None:
        self._memo[place] = self._stack[-1]

    def _long(self, value: int) -> None:
        if value.bit_length() > 8 * _MAX_LONG_BYTES:
            raise ValueError("a number of too many digits")
        self._push(value)


def _plain(value: Any) -> Any:
    """A value as it is handed out."""
    if isinstance(value, _Array):
        if value.values is None:
            raise ValueError("an array without values")
        return TensorValue(value.values, value.values.dtype.name)
    return value


_Step = Callable[[Unpickler, Any], None]
_ARGUMENT = ("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "BINFLOAT")
_BYTES = ("BINBYTES", "SHORT_BINBYTES")
_STEPS: dict[str, _Step] = {
    "PROTO": lambda machine, _: None,
    "FRAME": lambda machine, _: None,
    "MARK": lambda machine, _: machine._push(_Mark()),
    "NONE": lambda machine, _: machine._push(None),
    "NEWTRUE": lambda machine, _: machine._push(True),
    "NEWFALSE": lambda machine, _: machine._push(False),
    "EMPTY_LIST": lambda machine, _: machine._push([]),
    "EMPTY_DICT": lambda machine, _: machine._push({}),
    "EMPTY_TUPLE": lambda machine, _: machine._push(()),
    "TUPLE": lambda machine, _: machine._tuple(None),
    "TUPLE1": lambda machine, _: machine._tuple(1),
    "TUPLE2": lambda machine, _: machine._tuple(2),
    "TUPLE3": lambda machine, _: machine._tuple(3),
    "APPEND": lambda machine, _: machine._append(machine._popped(1)),
    "APPENDS": lambda machine, _: machine._append(machine._since_mark()),
    "SETITEM": lambda machine, _: machine._set(machine._popped(2)),
    "SETITEMS": lambda machine, _: machine._set(machine._since_mark()),
    "GLOBAL": lambda machine, argument: machine._global(argument),
    "STACK_GLOBAL": lambda machine, _: machine._stack_global(),
    "BINPERSID": lambda machine, _: machine._persistent(),
    "REDUCE": lambda machine, _: machine._reduce(),
    "BUILD": lambda machine, _: machine._build(),
    "BINGET": lambda machine, argument: machine._get(argument),
    "LONG_BINGET": lambda machine, argument: machine._get(argument),
    "BINPUT": lambda machine, argument: machine._put(argument),
    "LONG_BINPUT": lambda machine, argument: machine._put(argument),
    "MEMOIZE": lambda machine, _: machine._put(len(machine._memo)),
    "LONG1": lambda machine, argument: machine._long(argument),
    **{name: lambda machine, argument: machine._push(argument) for name in (*_ARGUMENT, *_BYTES)},
}
