"""The gradient witness of one micro-batch: what is propagated back to its log-probabilities."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from trajreplay.capture.copies import Block, Copier
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
        self._given: dict[int, torch.Tensor] = {}
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
        """Keep one gradient; a second one, of another loss, is added to it as torch does."""
        import torch

        with torch.no_grad():
            if place in self._given:
                self._given[place] += gradient
            else:
                self._given[place] = gradient.detach().clone()

    def remove(self) -> None:
        """Look at no gradient from now on, and forget those that came."""
        self._unhook()
        self._given.clear()

    def _unhook(self) -> None:
        for one in self._handles:
            one.remove()
        self._handles.clear()

    def ended(self) -> Block:
        """What came: 0 where nothing did."""
        self._unhook()
        if self._whole and 0 in self._given:
            return self._copier.block(GRADIENTS, self._given[0], self._lengths)
        rows = [
            self._given[place] if place in self._given and not self._whole else [0.0] * length
            for place, length in enumerate(self._lengths)
        ]
        return self._copier.block(GRADIENTS, rows, self._lengths)
