"""A pickle read as data: a machine that knows the few instructions of tensor files and runs none.

Nothing is imported, called or built but what this module names. Whatever else a pickle asks for,
by a global name or an instruction, is refused with that name.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable
from typing import Any

from trajreplay.schema.bundles.tensors import (
    NUMPY_MODULES,
    STORAGES,
    Dtype,
    Global,
    Maker,
    Storage,
    plain,
)

# Of a byte each that takes fifty in memory; all others take little more than they are in the file.
MAX_CONTAINERS = 50_000_000
_CONTAINERS = {"MARK", "EMPTY_LIST", "EMPTY_DICT", "TUPLE1", "TUPLE2", "TUPLE3"}
_MAX_LONG_BYTES = 16


class _Mark:
    """The place on the stack where a sequence begins."""


class Unpickler:
    """The machine.

    Args:
        where: The file, for messages.
        storage: The bytes of a storage by its key.
        allow_numpy: Whether scalars and arrays of numpy are taken.
    """

    def __init__(
        self, where: str, storage: Callable[[str], bytes | memoryview], *, allow_numpy: bool = False
    ) -> None:
        self._make = Maker(where, allow_numpy=allow_numpy)
        self._storage = storage
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
            left = MAX_CONTAINERS
            for code, argument, _ in pickletools.genops(data):
                left -= code.name in _CONTAINERS
                if left < 0:
                    raise self._make.refused(f"more than {MAX_CONTAINERS:,} lists or tuples")
                if code.name == "STOP":
                    return self._result()
                step = _STEPS.get(code.name)
                if step is None:
                    raise self._make.refused(self._what_is_made(code.name))
                step(self, argument)
        except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
            raise self._make.refused(f"a pickle that is broken ({type(error).__name__})") from error
        raise self._make.refused("a pickle without an end")

    def _result(self) -> Any:
        (found,) = self._stack
        if isinstance(found, Global | Storage | Dtype | _Mark):
            raise self._make.refused(f"{found}")
        return plain(found)

    def _what_is_made(self, instruction: str) -> str:
        """What an instruction that is not known would have made."""
        named = [one for one in self._stack if isinstance(one, Global)]
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
        self._push(tuple(map(plain, items)))

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
        target += map(plain, items)

    def _set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise ValueError("no dictionary")
        for name, value in zip(items[::2], items[1::2], strict=True):
            if type(name) not in (str, int):
                raise ValueError("a key that is neither text nor number")
            target[name] = plain(value)

    def _global(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self._push(Global(module, name))

    def _stack_global(self) -> None:
        module, name = self._popped(2)
        if type(module) is not str or type(name) is not str:
            raise ValueError("a name that is no text")
        self._push(Global(module, name))

    def _persistent(self) -> None:
        """A storage, named by its class, key, device and number of values."""
        kind, of, key, _, size = self._stack.pop()
        if kind != "storage" or not isinstance(of, Global) or type(key) is not str:
            raise ValueError("no storage")
        if of.module != "torch" or of.name not in STORAGES:
            raise self._make.refused(f"a storage of the type {of}")
        self._push(self._make.storage(of, self._storage(key), size))

    def _reduce(self) -> None:
        function, arguments = self._popped(2)
        if not isinstance(function, Global) or type(arguments) is not tuple:
            raise ValueError("no call")
        if function == Global("torch._utils", "_rebuild_tensor_v2"):
            self._push(self._make.tensor(*arguments))
        elif function == Global("collections", "OrderedDict") and not arguments:
            self._push({})
        elif function.module in NUMPY_MODULES or function.module == "numpy":
            self._push(self._make.numpy(function, arguments, self._stack))
        elif function == Global("_codecs", "encode") and self._make.allow_numpy:
            content, encoding = arguments
            if type(content) is not str or encoding != "latin1":
                raise ValueError("no bytes")
            self._push(content.encode("latin1"))
        else:
            raise self._make.refused(f"a call of {function}")

    def _build(self) -> None:
        target, state = self._stack[-2], self._stack[-1]
        self._stack.pop()
        self._make.set_state(target, state)

    def _get(self, place: int) -> None:
        self._push(self._memo[place])

    def _put(self, place: int) -> None:
        self._memo[place] = self._stack[-1]

    def _long(self, value: int) -> None:
        if value.bit_length() > 8 * _MAX_LONG_BYTES:
            raise ValueError("a number of too many digits")
        self._push(value)


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
