"""The forms that a column may be handed over in, and the refusal of others."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np

from trajreplay.schema.errors import CaptureError, bare

if TYPE_CHECKING:
    import torch

# A training waits for what is asked of many tensors, so that it is asked in C.
dtype_of, is_in_graph = attrgetter("dtype"), attrgetter("requires_grad")
_shape_of, _is_on_host = attrgetter("shape"), attrgetter("is_cpu")


def is_torch(value: Any) -> TypeGuard[torch.Tensor]:
    """Whether it is a tensor; a trainer without torch never loads it for this."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_of_objects(value: Any) -> bool:
    """Whether it is an array of references, whose copy holds the same things."""
    dtype = getattr(value, "dtype", None)
    return isinstance(dtype, np.dtype) and dtype.hasobject


def is_whole(name: str, values: Any, lengths: Sequence[int]) -> bool:
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


def shape_of_all(values: Sequence[Any]) -> torch.Size | None:
    """The shape that all have, if all are tensors on the host and of no type of their own.

    One of a type of its own may do something else.
    """
    torch = sys.modules.get("torch")
    if torch is None or set(map(type, values)) != {torch.Tensor}:
        return None
    shapes = set(map(_shape_of, values))
    return shapes.pop() if len(shapes) == 1 and all(map(_is_on_host, values)) else None


def sizes_alike(values: Sequence[Any]) -> list[int] | None:
    """How many values each tensor of a sequence has; None where they are not alike.

    They are tensors of one dimension and dtype that lie on the host, and of no type of their own.
    """
    torch = sys.modules.get("torch")
    if torch is None or set(map(type, values)) != {torch.Tensor}:
        return None
    if len(set(map(dtype_of, values))) != 1 or set(map(torch.Tensor.dim, values)) != {1}:
        return None
    return list(map(torch.Tensor.numel, values)) if all(map(_is_on_host, values)) else None


def check_rows(name: str, values: Any, samples: int) -> None:
    """Refuse choices of experts that are not one array for each sample.

    Raises:
        CaptureError: They are not.
    """
    if hasattr(values, "ndim") or len(values) != samples:
        found = f"has {values.ndim} dimensions" if hasattr(values, "ndim") else ""
        raise CaptureError(
            f"{name} {found or f'has {len(values)} rows for {samples} samples'}",
            hint="Give a list with one (tokens, layers, top_k) array per sample.",
            column=name,
        )


def _odd_form(name: str, found: str) -> CaptureError:
    return CaptureError(
        f"{bare(name)} {found}",
        hint="Give one tensor per sample, all of them packed, or padded to (samples, tokens).",
        column=name,
    )
