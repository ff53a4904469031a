"""Copies of what a trainer hands over, made at once into memory that is used again and again."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from trajreplay.capture.taking.blocks import NUMBERS, Block, Copied, Together, no_numbers
from trajreplay.capture.taking.device import refuse_in_a_graph
from trajreplay.capture.taking.forms import (
    check_rows,
    dtype_of,
    is_in_graph,
    is_of_objects,
    is_torch,
    is_whole,
    shape_of_all,
    sizes_alike,
)
from trajreplay.capture.taking.slots import Slot, Slots
from trajreplay.capture.taking.values import kept
from trajreplay.schema.errors import CaptureError

if TYPE_CHECKING:
    import torch


LEAST_BYTES = 1 << 20
_LISTS = frozenset({list, tuple})


class Copier:
    """Copies values into slots and remembers which, for one capture.

    Args:
        slots: Where the memory comes from.
        limit_bytes: Most that the copies may take; `LEAST_BYTES` always may.

    Attributes:
        held_bytes: Memory that the copies take.
    """

    def __init__(self, slots: Slots, limit_bytes: int = sys.maxsize) -> None:
        self._slots, self._limit_bytes = slots, max(limit_bytes, LEAST_BYTES)
        self._taken: list[Slot] = []
        self.held_bytes = 0

    def wait(self) -> None:
        """Wait until all values are there; for a thread that reads them, and never for training."""
        for slot in self._taken:
            if slot.filled is not None:
                slot.filled.synchronize()

    def release(self) -> None:
        """Give the memory back: the copies are written, or given up."""
        self._slots.give_back(self._taken)
        self._taken = []

    def block(self, name: str, values: Any, lengths: Sequence[int]) -> Block:
        """Copy a column of some samples.

        Args:
            name: The column, for messages.
            values: A tensor or array of all samples packed, or padded on the right to (S, T); or
                one tensor, array, list or None per sample.
            lengths: Tokens of each sample.

        Raises:
            CaptureError: The values have another form, or another number of rows.
        """
        if is_whole(name, values, lengths):
            return Block(self._whole(values), lengths)
        return self._joined(values) or Block([self.value(one) for one in values], None)

    def columns(self, columns: Mapping[str, Any], lengths: Sequence[int]) -> Copied:
        """Copy columns of some samples, those that are alike by one operation into one slot.

        Args:
            columns: Values of each, as of `block`; there is none where it is None.
            lengths: Tokens of each sample.

        Raises:
            CaptureError: As of `block`.
        """
        tensors = [*columns.values()]
        if (shape := shape_of_all(tensors)) is not None:
            is_whole(next(iter(columns)), tensors[0], lengths)
            return Copied(self._wholes((*columns,), tensors, shape, lengths), {})
        if any(one is None for one in tensors):
            given = {name: values for name, values in columns.items() if values is not None}
            return self.columns(given, lengths)
        apart: dict[str, Block] = {}
        lists: dict[torch.dtype, dict[str, list[int]]] = {}
        for name, values in columns.items():
            if type(values) in _LISTS and (sizes := sizes_alike(values)) is not None:
                is_whole(name, values, lengths)
                lists.setdefault(values[0].dtype, {})[name] = sizes
            else:
                apart[name] = self.block(name, values, lengths)
        together = [self._lists(columns, dtype, members) for dtype, members in lists.items()]
        return Copied(together, apart)

    def _wholes(
        self,
        names: tuple[str, ...],
        tensors: list[torch.Tensor],
        shape: torch.Size,
        lengths: Sequence[int],
    ) -> list[Together]:
        """Copy tensors of one shape, those of one dtype together."""
        import torch

        if any(map(is_in_graph, tensors)):
            # To detach them takes less than to switch gradients off.
            tensors = [one.detach() for one in tensors]
        found = []
        for dtype, all_of_them, at in _layout((*map(dtype_of, tensors),), shape):
            slot = self._take(dtype, all_of_them)
            torch.cat([tensors[one] for one in at], out=slot.held)
            found.append(Together(slot.held, [names[one] for one in at], [lengths] * len(at)))
        return found

    def _lists(
        self, columns: Mapping[str, Any], dtype: torch.dtype, members: Mapping[str, list[int]]
    ) -> Together:
        """Copy lists of tensors of one dimension, all of one dtype, together.

        Args:
            columns: The lists, and others.
            dtype: The dtype of their tensors.
            members: How many values each tensor has, of each list.
        """
        import torch

        slot = self._take(dtype, (sum(map(sum, members.values())),))
        with torch.no_grad():
            torch.cat([one for name in members for one in columns[name]], out=slot.held)
        return Together(slot.held, [*members], [*members.values()])

    def routes(self, name: str, values: Any, samples: int) -> Block:
        """Copy choices of experts, one (tokens, layers, top_k) array or None per sample.

        Raises:
            CaptureError: There are more or fewer.
        """
        check_rows(name, values, samples)
        held = []
        for one in values:
            _check_graph(one)
            flat = None if one is None else self.value(one.reshape(-1))
            held.append(None if flat is None else flat.reshape(one.shape))
        return Block(held, None)

    def value(self, value: Any) -> Any:
        """Copy one value of any make: a tensor, an array, numbers in a sequence, or None.

        Raises:
            CaptureError: It is another thing, or holds what is no number.
        """
        if value is None:
            return None
        if is_torch(value) or (hasattr(value, "__array__") and not is_of_objects(value)):
            return self._whole(value)
        if isinstance(value, Sequence) or is_of_objects(value):
            return self._numbers(list(value))
        raise no_numbers(value)

    def _numbers(self, values: list[Any]) -> Any:
        """Numbers of a sequence, which itself may hold tensors that change later."""
        if values and type(values[0]) not in NUMBERS:  # the writer looks at those behind it
            if self._is_stack(values):
                _check_graph(values[0])
                torch = sys.modules["torch"]
                return self._whole(torch.stack([one.detach().reshape(()) for one in values]))
            values = [kept(one) for one in values]
            if not NUMBERS.issuperset(map(type, values)):  # a text, or one that a device still has
                raise no_numbers(values)
        self._check_room(8 * len(values))
        self.held_bytes += 8 * len(values)
        return values

    @staticmethod
    def _is_stack(values: list[Any]) -> bool:
        """Whether they are tensors of one number each, alike."""
        if not all(map(is_torch, values)):
            return False
        kinds = {(one.dtype, one.device, one.numel()) for one in values}
        return len(kinds) == 1 and values[0].numel() == 1

    def _whole(self, values: Any) -> Any:
        if not is_torch(values):
            self._check_room(getattr(values, "nbytes", 0))
            array = np.array(values)
            if array.dtype.kind in "OSU":
                raise no_numbers(values)
            self.held_bytes += array.nbytes
            return array
        return self._filled([values.detach()], values.shape)

    def _joined(self, values: Sequence[Any]) -> Block | None:
        """Copies of many small tensors in one; None where they are not of one kind."""
        if not values or not is_torch(values[0]):
            return None
        torch, lengths = sys.modules["torch"], []
        dtype, device = values[0].dtype, values[0].device
        for one in values:
            if type(one) is not torch.Tensor or one.dtype is not dtype or one.ndim != 1:
                return None
            if one.device != device:
                return None
            lengths.append(one.numel())
        with torch.no_grad():
            return Block(self._filled(list(values), (sum(lengths),)), lengths)

    def _filled(self, values: list[torch.Tensor], shape: tuple[int, ...]) -> torch.Tensor:
        """Tensors of one dtype and device one after the other, in a slot of this shape.

        They are in no graph, or gradients are off.
        """
        first = values[0]
        if not first.is_cpu and first.is_cuda:
            refuse_in_a_graph()
            self._check_room(first.dtype.itemsize * math.prod(shape))
            slot = self._slots.take(first.dtype, shape, pinned=True)
            filled = self._slots.device.copy(
                _parts(slot.held, values), lambda: self._slots.give_back([slot])
            )
            return self._keep(slot._replace(filled=filled)).held
        slot = self._take(first.dtype, shape)
        _copy(slot.held, values if first.is_cpu else [one.cpu() for one in values])
        return slot.held

    def _take(self, dtype: torch.dtype, shape: tuple[int, ...]) -> Slot:
        self._check_room(dtype.itemsize * math.prod(shape))
        return self._keep(self._slots.take(dtype, shape))

    def _keep(self, slot: Slot) -> Slot:
        self.held_bytes += slot.size_bytes
        self._taken.append(slot)
        return slot

    def _check_room(self, more: int) -> None:
        """Refuse a copy before its memory is taken, where that would be too much.

        Raises:
            CaptureError: It would.
        """
        if self.held_bytes + more > self._limit_bytes:
            raise CaptureError(
                f"the copies of one capture take {self.held_bytes} bytes, {more} more would exceed "
                f"{self._limit_bytes}",
                hint="Raise TRAJREPLAY_CAPTURE_QUEUE_BYTES, or RING_BYTES where steps are held.",
            )


@functools.lru_cache(maxsize=256)
def _layout(
    dtypes: tuple[torch.dtype, ...], shape: Sequence[int]
) -> list[tuple[torch.dtype, tuple[int, ...], list[int]]]:
    """Of each dtype the shape of all tensors of it, one behind the other, and which these are."""
    found: dict[torch.dtype, list[int]] = {}
    for at, dtype in enumerate(dtypes):
        found.setdefault(dtype, []).append(at)
    rows, *width = shape
    return [(dtype, (rows * len(at), *width), at) for dtype, at in found.items()]


def _copy(held: torch.Tensor, values: list[torch.Tensor]) -> None:
    """Copy tensors of one dtype, one after the other."""
    if len(values) == 1:
        held.copy_(values[0])
    else:
        import torch

        torch.cat(values, out=held)


def _parts(
    held: torch.Tensor, values: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each of some tensors with its part of the memory that they go to, in their order."""
    flat, at = held.view(-1), 0
    parts = []
    for one in values:
        parts.append((flat[at : at + one.numel()].view(one.shape), one))
        at += one.numel()
    return parts


def _check_graph(value: Any) -> None:
    """Refuse a value of a CUDA device before anything of it is laid out there.

    Raises:
        CaptureError: It is one, and a CUDA graph is being captured.
    """
    if is_torch(value) and value.is_cuda:
        refuse_in_a_graph()
