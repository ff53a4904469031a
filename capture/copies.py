"""Copies of what a trainer hands over, made at once into memory that is used again and again."""

from __future__ import annotations

import copy
import sys
import threading
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trajreplay.schema.errors import CaptureError

if TYPE_CHECKING:
    import torch

Rows = list[Any]  # one value a sample: its tokens as a tensor, array, list or `Cut`, or None
_LEAST_VALUES = 1024


class Cut(NamedTuple):
    """A row of a padded copy that is cut when it is written: views cost more than the copy."""

    held: Any
    row: int
    length: int


def cut(rows: Rows) -> Rows:
    """The same rows, each as a value of its own."""
    return [one.held[one.row, : one.length] if type(one) is Cut else one for one in rows]


class Slots:
    """Host memory for copies. A fresh page costs more than the copy into it, so slots are kept.

    Args:
        limit_bytes: Most that may lie idle.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._idle_bytes = 0
        self._lock = threading.Lock()  # one thread takes, another gives back
        self._idle: dict[tuple[torch.dtype, int], list[torch.Tensor]] = defaultdict(list)

    def take(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        """A flat tensor of at least `count` values, whatever they are."""
        import torch

        capacity = max(_LEAST_VALUES, 1 << (count - 1).bit_length())
        with self._lock:
            if idle := self._idle[dtype, capacity]:
                slot = idle.pop()
                self._idle_bytes -= slot.nbytes
                return slot
        return torch.empty(capacity, dtype=dtype)

    def give_back(self, slots: Sequence[torch.Tensor]) -> None:
        """Let slots be used again, whose values nobody reads any more."""
        with self._lock:
            for slot in slots:
                if self._idle_bytes + slot.nbytes <= self._limit_bytes:
                    self._idle_bytes += slot.nbytes
                    self._idle[slot.dtype, slot.numel()].append(slot)


class Copier:
    """Copies values into slots and remembers which, for one capture.

    Args:
        slots: Where the memory comes from.

    Attributes:
        held_bytes: Memory that the copies take.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._taken: list[torch.Tensor] = []
        self.held_bytes = 0

    def release(self) -> None:
        """Give the memory back: the copies are written, or given up."""
        self._slots.give_back(self._taken)
        self._taken = []

    def rows(self, name: str, values: Any, lengths: Sequence[int]) -> Rows:
        """Copy a column; its rows are views of the copy, or become so by `cut`.

        Args:
            name: The column, for messages.
            values: A tensor or array of all samples packed, or padded on the right to (S, T); or
                one tensor, array, list or None per sample.
            lengths: Tokens of each sample.

        Raises:
            CaptureError: The values have another form, or another number of rows.
        """
        dimensions = getattr(values, "ndim", None)
        if dimensions == 2:
            return self._padded(name, values, lengths)
        if dimensions == 1 and getattr(values, "dtype", None) != np.dtype(object):
            return self._packed(name, values, lengths)
        if dimensions is not None or isinstance(values, (str, bytes)):
            raise _odd_form(name, f"has {dimensions} dimensions")
        if len(values) != len(lengths):
            raise _odd_form(name, f"has {len(values)} rows for {len(lengths)} samples")
        if all(_is_torch(one) and one.ndim == 1 for one in values):
            dtypes = {one.dtype for one in values}
            if len(dtypes) == 1:
                return self._joined(values, dtypes.pop())
        return [self.value(one) for one in values]

    def value(self, value: Any) -> Any:
        """Copy one value of any make."""
        if _is_torch(value):
            return self._flat(value.detach()).view(value.shape)
        self.held_bytes += getattr(value, "nbytes", 8 * len(value) if value is not None else 0)
        return copy.copy(value)

    def _padded(self, name: str, values: Any, lengths: Sequence[int]) -> Rows:
        rows, width = values.shape
        if rows != len(lengths):
            raise _odd_form(name, f"has {rows} rows for {len(lengths)} samples")
        if max(lengths, default=0) > width:
            raise _odd_form(name, f"has {width} columns for a sample of {max(lengths)} tokens")
        held = self._whole(values)
        return [Cut(held, row, length) for row, length in enumerate(lengths)]

    def _packed(self, name: str, values: Any, lengths: Sequence[int]) -> Rows:
        if len(values) != sum(lengths):
            raise _odd_form(name, f"has {len(values)} packed values for {sum(lengths)} tokens")
        held = self._whole(values)
        if _is_torch(held):
            return list(held.split(list(lengths)))
        return np.split(held, np.cumsum(lengths)[:-1]) if lengths else []

    def _whole(self, values: Any) -> Any:
        if _is_torch(values):
            return self._flat(values.detach()).view(values.shape)
        held = np.array(values)
        self.held_bytes += held.nbytes
        return held

    def _flat(self, values: torch.Tensor) -> torch.Tensor:
        held = self._slot(values.dtype, values.numel())
        held.copy_(values.reshape(-1))
        return held

    def _joined(self, values: Sequence[torch.Tensor], dtype: torch.dtype) -> Rows:
        import torch

        lengths = [len(one) for one in values]
        held = self._slot(dtype, sum(lengths))
        detached = [one.detach() for one in values]
        if all(one.device.type == "cpu" for one in detached):
            torch.cat(detached, out=held)
        else:
            held.copy_(torch.cat(detached))
        return list(held.split(lengths))  # type: ignore[no-untyped-call]

    def _slot(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        slot = self._slots.take(dtype, count)
        self._taken.append(slot)
        self.held_bytes += slot.nbytes
        return slot[:count]


def _is_torch(value: Any) -> bool:
    """Whether it is a tensor; a trainer without torch never loads it for this."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _odd_form(name: str, found: str) -> CaptureError:
    return CaptureError(
        f"{name} {found}",
        hint="Give one tensor per sample, all of them packed, or padded to (samples, tokens).",
        column=name,
    )
