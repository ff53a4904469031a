"""Which dtypes a stage may have been computed in, and losses computed in one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from trajreplay.schema.settings import Settings
from trajreplay.stages.block import Block
from trajreplay.stages.compose import PolicyTerms
from trajreplay.stages.counterfactuals.variants import Variant
from trajreplay.stages.faults.fault import WrongLosses
from trajreplay.stages.faults.policy import Columns
from trajreplay.stages.outputs import recorded_outputs

_Losses = Callable[[Settings, Columns, Tensor, Tensor], PolicyTerms]


def rounding_dtypes() -> Iterator[tuple[torch.dtype, str]]:
    """Dtypes that are narrower than float32, which a bound allows for, each with its name."""
    yield torch.bfloat16, "bfloat16"
    yield torch.float16, "float16"


def computing_dtypes(recorded: Tensor) -> Iterator[tuple[torch.dtype, str]]:
    """The same, and float32 where something recorded is not finite: it may have overflowed."""
    yield from rounding_dtypes()
    if not bool(torch.isfinite(recorded).all()):
        yield torch.float32, "float32"


def recorded_scalars(block: Block, stage: str) -> Tensor:
    """(K,) float64. The scalars that a loss recorded of more than a sample."""
    outputs = [one.output.value for one in recorded_outputs(block, 0, stage)]
    return torch.tensor([one for one in outputs if one is not None], dtype=torch.float64)


def computed_in(dtype: torch.dtype, own: _Losses) -> Variant:
    """The variant whose token losses are by the arithmetic of a dtype, their inputs rounded to it.

    Args:
        dtype: The dtype.
        own: The terms that the settings give.
    """

    def losses(settings: Settings, columns: Columns, mask: Tensor, offsets: Tensor) -> PolicyTerms:
        narrow = {name: values.to(dtype) for name, values in columns.items()}
        found = own(settings, narrow, mask, offsets)
        wide = next(iter(columns.values())).dtype
        return found._replace(terms={name: one.to(wide) for name, one in found.terms.items()})

    return Variant(arithmetic=WrongLosses(losses))
