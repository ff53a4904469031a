"""The gradient witness of one micro-batch: what is propagated back to its log-probabilities."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from trajreplay.capture.taking.blocks import Block
from trajreplay.capture.taking.copies import Copier
from trajreplay.schema.tables import GRADIENTS

if TYPE_CHECKING:
    import torch


class Witness:
    """Looks at gradients as they pass, and changes none.

    Args:
        copier: Makes the copies.
        log_probs: A tensor of the micro-batch, or one for each sample.
        lengths: Tokens of each sample.
        failed: Is told what went wrong with a gradient; what it raises, the training gets.
    """

    def __init__(
        self,
        copier: Copier,
        log_probs: Any,
        lengths: Sequence[int],
        failed: Callable[[Exception], None],
    ) -> None:
        self._copier, self._lengths, self._failed = copier, lengths, failed
        self._whole = getattr(log_probs, "ndim", None) is not None
        tensors = [log_probs] if self._whole else list(log_probs or ())
        self.in_graph = any(getattr(one, "requires_grad", False) for one in tensors)
        self._given: dict[int, list[Block]] = {}
        self._handles = [
            one.register_hook(functools.partial(self._take, place))
            for place, one in enumerate(tensors)
            if getattr(one, "requires_grad", False)
        ]

    def _take(self, place: int, gradient: torch.Tensor | None) -> None:
        if gradient is None:  # of a compiled loss, which takes log-probs of its own further
            self.in_graph = False
        if gradient is None or not self.in_graph:
            return
        try:
            self._add(place, gradient)
        except Exception as error:  # noqa: BLE001 - no backward pass fails for its witness
            self.in_graph = False
            self._given.clear()
            self._failed(error)

    def _add(self, place: int, gradient: torch.Tensor) -> None:
        """Copy one gradient to the host; a second one, of another loss, is added there."""
        values = gradient.detach()
        block = (
            self._copier.block(GRADIENTS, values, self._lengths)
            if self._whole
            else Block([self._copier.value(values)], None)
        )
        self._given.setdefault(place, []).append(block)

    def remove(self) -> None:
        """Look at no gradient from now on, and forget those that came."""
        self._unhook()
        self._given.clear()

    def _unhook(self) -> None:
        for one in self._handles:
            one.remove()
        self._handles.clear()

    def end(self) -> None:
        """Look at no gradient from now on; those that came are what is seen."""
        self._unhook()

    def seen(self) -> Gradients:
        """What came: 0 where nothing did."""
        places = [self._lengths] if self._whole else [[one] for one in self._lengths]
        return Gradients([(self._given.get(at, ()), one) for at, one in enumerate(places)])


class Gradients(NamedTuple):
    """Copied gradients, added up when they are written.

    Args:
        places: What came of each tensor, and the lengths of its samples.
    """

    places: Sequence[tuple[Sequence[Block], Sequence[int]]]

    def rows(self) -> list[Any]:
        """One value a sample, as torch adds them."""
        found: list[Any] = []
        for blocks, lengths in self.places:
            if blocks:
                found += [
                    sum(parts[1:], parts[0]) for parts in zip(*map(Block.rows, blocks), strict=True)
                ]
            else:
                found += [[0.0] * length for length in lengths]
        return found
