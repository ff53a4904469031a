"""Expert choices of a capture's samples as columns of the table `routes`."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from trajreplay.schema.errors import CaptureError, named, shown
from trajreplay.schema.identity import CaptureKey, check_count
from trajreplay.schema.tables import EXPERT_LISTS, MAX_CHOICES, ROUTES
from trajreplay.writer.commit import TableRows
from trajreplay.writer.encode import ListColumn, encode_column
from trajreplay.writer.flatten import PLAIN, Array

_FORM = (
    "a list with one array of shape (tokens, layers, top_k) for each sample, or one such array "
    "of all samples packed"
)


@dataclass(frozen=True)
class Routing:
    """What all routes of a capture have in common.

    Args:
        layers: MoE layers recorded.
        top_k: Experts chosen per token and layer.
        num_experts: Experts of a layer, where known.
        layer_numbers: Number of each recorded layer; None if it is its place.
    """

    layers: int
    top_k: int
    num_experts: int | None = None
    layer_numbers: tuple[int, ...] | None = None

    @property
    def width(self) -> int:
        """Choices of one token."""
        return self.layers * self.top_k


def encode_routes(
    name: str,
    values: Any,
    total_length: Array | None,
    *,
    num_experts: int | None,
    layer_numbers: Sequence[int] | None,
) -> tuple[ListColumn, Routing]:
    """Turn expert choices into a column and what they have in common.

    Args:
        name: rollout_experts, old_experts or experts.
        values: One (tokens, layers, top_k) array of integers a sample, None for one without; or
            all samples packed, tokens as many as they have, or one less of each.
        total_length: (S,) int64. Tokens of each sample, where the samples are known.
        num_experts: Experts of a layer, where known.
        layer_numbers: The number of each layer in the model.

    Raises:
        CaptureError: They have no such form, or int16 cannot hold them.
    """
    if name not in EXPERT_LISTS:
        raise CaptureError(
            f"unknown routes {named(name)}, expected one of {', '.join(EXPERT_LISTS)}",
            hint="The sampler's are rollout_experts; the trainer's old_experts or experts.",
            column=name,
        )
    if _dimensions(values) == 3:
        layers, top_k = _shape(name, values)[1:]
        lengths = _packed(name, len(values), total_length) * (layers * top_k)
        column = encode_column(ROUTES[name], values.reshape(-1), lengths)
    else:
        arrays = [None if one is None else _array(name, one) for one in _samples(name, values)]
        shapes = {_shape(name, one)[1:] for one in arrays if one is not None}
        if len(shapes) > 1:
            told = " and ".join(f"{layers} x {top_k}" for layers, top_k in sorted(shapes))
            raise CaptureError(
                f"{name} has samples of {told} layers and choices, expected one shape", column=name
            )
        layers, top_k = shapes.pop() if shapes else (1, 1)
        flat = [None if one is None else one.reshape(-1) for one in arrays]
        column = encode_column(ROUTES[name], flat)
    if np.dtype(_known(column.source_dtype)).kind not in "iu":
        raise CaptureError(
            f"{name} has the dtype {column.source_dtype}, expected integers", column=name
        )
    if num_experts is not None:
        check_count("num_experts", num_experts)
    numbers = None if layer_numbers is None else _numbers(layer_numbers, layers)
    return column, Routing(layers, top_k, num_experts, numbers)


class CapturedRoutes:
    """The routes of one capture, as they are handed over.

    Args:
        key: The capture.
    """

    def __init__(self, key: CaptureKey) -> None:
        self._key = key
        self._columns: dict[str, ListColumn] = {}
        self._routing: Routing | None = None

    def __bool__(self) -> bool:
        return bool(self._columns)

    def add(self, name: str, values: Any, total_length: Array | None, **common: Any) -> None:
        """Take the choices under one name; arguments as of `encode_routes`.

        Raises:
            CaptureError: Given before, of other layers or choices than another name's, or of no
                such form.
        """
        if name in self._columns:
            raise CaptureError(f"capture of {self._key}: {name} was given before", column=name)
        column, routing = encode_routes(name, values, total_length, **common)
        if column.all_null:
            return
        if self._routing not in (None, routing):
            raise CaptureError(
                f"capture of {self._key}: {name} is of {routing}, expected {self._routing} as of "
                f"{next(iter(self._columns))}",
                hint="Record the layers that both have, and state the same of them.",
                column=name,
            )
        self._columns[name], self._routing = column, routing

    def problems(self, total_length: Array, sample_ids: Sequence[str]) -> list[str]:
        """Samples that have other tokens routed than they have, the last of which may lack."""
        return [
            problem
            for column in self._columns.values()
            for problem in self._wrong_tokens(column, total_length, sample_ids)
        ]

    def _wrong_tokens(
        self, column: ListColumn, total_length: Array, sample_ids: Sequence[str]
    ) -> list[str]:
        assert self._routing is not None
        name = column.column.name
        if len(column.lengths) != len(total_length):
            found = len(column.lengths)
            return [f"{name} has {found} rows, expected {len(total_length)}: one per sample"]
        tokens = column.lengths // self._routing.width
        wrong = (tokens != total_length) & (tokens != np.maximum(total_length - 1, 0))
        if column.valid is not None:
            wrong &= column.valid
        return [
            f"row {row}: {name} of sample {named(sample_ids[row])} has {tokens[row]} tokens, "
            f"expected total_length = {total_length[row]}, or one less: the last token predicts "
            "nothing"
            for row in np.flatnonzero(wrong).tolist()
        ]

    def rows(self, sample_ids: Sequence[str]) -> list[TableRows]:
        """Their rows, one for each sample; nothing where there are no routes."""
        routing = self._routing
        if routing is None:
            return []
        rows = len(sample_ids)
        shared = {
            **{name: getattr(self._key, name) for name in ROUTES.key if name != "row"},
            "layers": routing.layers,
            "top_k": routing.top_k,
            "num_experts": routing.num_experts,
        }
        columns: dict[str, pa.Array | ListColumn] = {
            name: pa.repeat(pa.scalar(value, ROUTES[name].type), rows)
            for name, value in shared.items()
            if value is not None
        }
        columns["row"] = pa.array(np.arange(rows, dtype=np.int32))
        columns["sample_id"] = pa.array(sample_ids, pa.string())
        if routing.layer_numbers is not None:
            numbers = np.tile(np.array(routing.layer_numbers, np.int32), (rows, 1))
            columns["layer_numbers"] = encode_column(ROUTES["layer_numbers"], numbers)
        dtypes = {name: one.source_dtype for name, one in self._columns.items()}
        return [TableRows(ROUTES, columns | self._columns, rows, dtypes)]


def _dimensions(values: Any) -> int | None:
    return None if isinstance(values, list | tuple) else getattr(values, "ndim", None)


def _samples(name: str, values: Any) -> list[Any]:
    """What was handed over, sample by sample."""
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise CaptureError(f"{name} is a {type(values).__name__}, expected {_FORM}", column=name)
    return list(values)


def _array(name: str, values: Any) -> Any:
    """One sample's choices as an array of torch or numpy."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(values, torch.Tensor):
        return values.detach()
    try:
        return np.asarray(values)
    except ValueError as error:
        raise CaptureError(f"{name} has a ragged sample: {error}", column=name) from error


def _shape(name: str, values: Any) -> tuple[int, int, int]:
    shape = tuple(values.shape)
    if len(shape) != 3 or 0 in shape[1:] or math.prod(shape[1:]) > MAX_CHOICES:
        raise CaptureError(f"{name} has an array of shape {shape}, expected {_FORM}", column=name)
    tokens, layers, top_k = shape
    return tokens, layers, top_k


def _packed(name: str, tokens: int, total_length: Array | None) -> Array:
    """Tokens routed of each sample, of packed ones."""
    if total_length is None:
        raise CaptureError(
            f"{name} is packed, and the samples are not known yet",
            hint="Call samples() before, or give a list with one array per sample.",
            column=name,
        )
    without_last = np.maximum(total_length - 1, 0)
    for lengths in (total_length, without_last):
        if tokens == lengths.sum():
            return lengths
    raise CaptureError(
        f"{name} has {tokens} packed tokens, expected {total_length.sum()}, the sum of "
        f"total_length of {len(total_length)} samples, or {without_last.sum()}, one less of each",
        hint="Give a list with one array per sample to see which differs.",
        column=name,
    )


def _numbers(numbers: Sequence[int], layers: int) -> tuple[int, ...]:
    found = tuple(check_count("layer_numbers", _index(one)) for one in numbers)
    if len(found) != layers or len(set(found)) < layers:
        raise CaptureError(
            f"layer_numbers are {shown(found)}, expected {layers} distinct numbers, one a layer"
        )
    return found


def _index(number: object) -> int:
    try:
        return operator.index(number)  # type: ignore[arg-type]
    except TypeError as error:
        raise CaptureError(
            f"layer_numbers has {named(number)}, expected whole numbers, one a layer"
        ) from error


def _known(dtype: str) -> str:
    return "int64" if dtype == PLAIN else "float32" if dtype == "bfloat16" else dtype
