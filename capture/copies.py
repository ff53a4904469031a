"""Copies of what a trainer hands over, made at once into memory that is used again and again."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from trajreplay.capture.device import refuse_in_a_graph
from trajreplay.capture.slots import Slot, Slots
from trajreplay.capture.values import kept
from trajreplay.schema.errors import CaptureError, bare

if TYPE_CHECKING:
    import torch

_NUMBERS = frozenset({int, float, bool, type(None)})


class Rows(Protocol):
    """Values of some samples, once they are asked for."""

    def rows(self) -> list[Any]:
        """One value a sample."""


class Block(NamedTuple):
    """Copied values of some samples; cut into rows when they are written, not before.

    Args:
        held: All of them packed, or padded to (samples, tokens), or a list with one for each;
            other columns may lie before and behind them.
        lengths: Tokens of each sample; None where `held` is a list.
        at: Where they begin: a row where `held` is padded, a value where it is packed.
    """

    held: Any
    lengths: Sequence[int] | None
    at: int = 0

    def rows(self) -> list[Any]:
        """One value a sample: its tokens as a tensor, array or list, or None."""
        held, lengths, at = self
        if lengths is None:
            return [_unchanging(one) if type(one) is list else one for one in held]
        if held.ndim == 2:
            return [held[row, :length] for row, length in enumerate(lengths, at)]
        ends = list(itertools.accumulate(lengths, initial=at))[1:]
        return [held[end - length : end] for end, length in zip(ends, lengths, strict=True)]


class Copier:
    """Copies values into slots and remembers which, for one capture.

    Args:
        slots: Where the memory comes from.

    Attributes:
        held_bytes: Memory that the copies take.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
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
        if _is_whole(name, values, lengths):
            return Block(self._whole(values), lengths)
        return self._joined(values) or Block([self.value(one) for one in values], None)

    def blocks(self, columns: Mapping[str, Any], lengths: Sequence[int]) -> dict[str, Block]:
        """Copy columns of some samples, those that are alike by one operation into one slot.

        Args:
            columns: Values of each, as of `block`.
            lengths: Tokens of each sample.

        Raises:
            CaptureError: As of `block`.
        """
        loaded = sys.modules.get("torch")
        plain = None if loaded is None else loaded.Tensor
        found: dict[str, Block] = {}
        alike: dict[tuple[torch.dtype, torch.Size], dict[str, torch.Tensor]] = {}
        for name, values in columns.items():
            if type(values) is not plain or not values.is_cpu:
                found[name] = self.block(name, values, lengths)
                continue
            kind = values.dtype, values.shape
            if (members := alike.get(kind)) is None:
                _is_whole(name, values, lengths)
                members = alike[kind] = {}
            # To detach it takes less than to switch gradients off.
            members[name] = values.detach() if values.requires_grad else values
        for (dtype, (rows, *width)), members in alike.items():
            tensors = [*members.values()]
            slot = self._slots.take(dtype, (rows * len(tensors), *width))
            _copy(slot.held, tensors)
            self._keep(slot)
            at = 0
            for name in members:
                found[name] = Block(slot.held, lengths, at)
                at += rows
        return found

    def routes(self, name: str, values: Any, samples: int) -> Block:
        """Copy choices of experts, one (tokens, layers, top_k) array or None per sample.

        Raises:
            CaptureError: There are more or fewer.
        """
        if hasattr(values, "ndim") or len(values) != samples:
            found = f"has {values.ndim} dimensions" if hasattr(values, "ndim") else ""
            raise CaptureError(
                f"{name} {found or f'has {len(values)} rows for {samples} samples'}",
                hint="Give a list with one (tokens, layers, top_k) array per sample.",
                column=name,
            )
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
        if _is_torch(value) or (hasattr(value, "__array__") and not _is_of_objects(value)):
            return self._whole(value)
        if isinstance(value, Sequence) or _is_of_objects(value):
            return self._numbers(list(value))
        raise _no_numbers(value)

    def _numbers(self, values: list[Any]) -> Any:
        """Numbers of a sequence, which itself may hold tensors that change later."""
        if values and type(values[0]) not in _NUMBERS:  # the writer looks at those behind it
            if self._is_stack(values):
                _check_graph(values[0])
                torch = sys.modules["torch"]
                return self._whole(torch.stack([one.detach().reshape(()) for one in values]))
            values = [kept(one) for one in values]
            if not _NUMBERS.issuperset(map(type, values)):  # a text, or one that a device still has
                raise _no_numbers(values)
        self.held_bytes += 8 * len(values)
        return values

    @staticmethod
    def _is_stack(values: list[Any]) -> bool:
        """Whether they are tensors of one number each, alike."""
        if not all(map(_is_torch, values)):
            return False
        kinds = {(one.dtype, one.device, one.numel()) for one in values}
        return len(kinds) == 1 and values[0].numel() == 1

    def _whole(self, values: Any) -> Any:
        if not _is_torch(values):
            array = np.array(values)
            if array.dtype.kind in "OSU":
                raise _no_numbers(values)
            self.held_bytes += array.nbytes
            return array
        return self._filled([values.detach()], values.shape)

    def _joined(self, values: Sequence[Any]) -> Block | None:
        """Copies of many small tensors in one; None where they are not of one kind."""
        if not values or not _is_torch(values[0]):
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

    def _filled(self, values: list[torch.Tensor], shape: Sequence[int]) -> torch.Tensor:
        """Tensors of one dtype and device one after the other, in a slot of this shape.

        They are in no graph, or gradients are off.
        """
        first = values[0]
        if not first.is_cpu and first.is_cuda:
            refuse_in_a_graph()
            slot = self._slots.take(first.dtype, shape, pinned=True)
            filled = self._slots.device.copy(
                _parts(slot.held, values), lambda: self._slots.give_back([slot])
            )
            slot = slot._replace(filled=filled)
        else:
            slot = self._slots.take(first.dtype, shape)
            _copy(slot.held, values if first.is_cpu else [one.cpu() for one in values])
        self._keep(slot)
        return slot.held

    def _keep(self, slot: Slot) -> None:
        self.held_bytes += slot.size_bytes
        self._taken.append(slot)


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


def _is_whole(name: str, values: Any, lengths: Sequence[int]) -> bool:
    """Whether it is one array of all samples, packed or padded; else it has one for each.

    Raises:
        CaptureError: It does not fit the samples.
    """
    dimensions = getattr(values, "ndim", None)
    if dimensions == 2:
        rows, width = values.shape
        if rows != len(lengths):
            raise _odd_form(name, f"has {rows} rows for {len(lengths)} samples")
        if rows and max(lengths) > width:
            raise _odd_form(name, f"has {width} columns for a sample of {max(lengths)} tokens")
        return True
    if dimensions == 1 and getattr(values, "dtype", None) != np.dtype(object):
        if len(values) != sum(lengths):
            raise _odd_form(name, f"has {len(values)} packed values for {sum(lengths)} tokens")
        return True
    if dimensions is not None or isinstance(values, (str, bytes)):
        raise _odd_form(name, f"has {dimensions} dimensions")
    if len(values) != len(lengths):
        raise _odd_form(name, f"has {len(values)} rows for {len(lengths)} samples")
    return False


def _is_of_objects(value: Any) -> bool:
    """Whether it is an array of references, whose copy holds the same things."""
    dtype = getattr(value, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.hasobject


def _unchanging(values: list[Any]) -> list[Any]:
    """Numbers of one sample, none of which could have changed since they were handed over.

    Raises:
        CaptureError: One could.
    """
    if not _NUMBERS.issuperset(map(type, values)):
        raise _no_numbers(values)
    return values


def _check_graph(value: Any) -> None:
    """Refuse a value of a CUDA device before anything of it is laid out there.

    Raises:
        CaptureError: It is one, and a CUDA graph is being captured.
    """
    if _is_torch(value) and value.is_cuda:
        refuse_in_a_graph()


def _is_torch(value: Any) -> bool:
    """Whether it is a tensor; a trainer without torch never loads it for this."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _no_numbers(values: Any) -> CaptureError:
    kinds = {type(one).__name__ for one in values} if isinstance(values, list) else set()
    found = f" of {', '.join(sorted(kinds))}" if kinds else ""
    return CaptureError(
        f"a {type(values).__name__}{found} is given for the values of a sample, expected numbers",
        hint="Give a tensor, an array, or a list of plain numbers, for each sample.",
    )


def _odd_form(name: str, found: str) -> CaptureError:
    return CaptureError(
        f"{bare(name)} {found}",
        hint="Give one tensor per sample, all of them packed, or padded to (samples, tokens).",
        column=name,
    )
