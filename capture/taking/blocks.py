"""Copied columns of some samples: together in one memory, cut into rows when they are written."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from trajreplay.schema.errors import CaptureError

if TYPE_CHECKING:
    import torch

NUMBERS = frozenset({int, float, bool, type(None)})


class Rows(Protocol):
    """Values of some samples, once they are asked for."""

    def rows(self) -> list[Any]:
        """One value a sample."""


class Block(NamedTuple):
    """Copied values of some samples.

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


class Together(NamedTuple):
    """Columns that were copied by one operation, one behind the other.

    Args:
        held: All of them, packed or padded to (samples, tokens).
        names: Their names, in their order.
        lengths: Of each the tokens of each sample.
    """

    held: torch.Tensor
    names: Sequence[str]
    lengths: Sequence[Sequence[int]]

    def blocks(self) -> dict[str, Block]:
        """Each for itself."""
        found, at, padded = {}, 0, self.held.ndim == 2
        for name, lengths in zip(self.names, self.lengths, strict=True):
            found[name] = Block(self.held, lengths, at)
            at += len(lengths) if padded else sum(lengths)
        return found


class Copied(NamedTuple):
    """Copied columns of some samples.

    Args:
        together: Those that were copied with others.
        apart: The others.
    """

    together: Sequence[Together]
    apart: Mapping[str, Block]

    def blocks(self) -> dict[str, Block]:
        """Each column for itself."""
        found = dict(self.apart)
        for one in self.together:
            found |= one.blocks()
        return found

    def __contains__(self, name: object) -> bool:
        return name in self.apart or any(name in one.names for one in self.together)


def no_numbers(values: Any) -> CaptureError:
    """What is said of values of a sample that are no numbers."""
    kinds = {type(one).__name__ for one in values} if isinstance(values, list) else set()
    found = f" of {', '.join(sorted(kinds))}" if kinds else ""
    return CaptureError(
        f"a {type(values).__name__}{found} is given for the values of a sample, expected numbers",
        hint="Give a tensor, an array, or a list of plain numbers, for each sample.",
    )


def _unchanging(values: list[Any]) -> list[Any]:
    """Numbers of one sample, none of which could have changed since they were handed over.

    Raises:
        CaptureError: One could.
    """
    if not NUMBERS.issuperset(map(type, values)):
        raise no_numbers(values)
    return values
