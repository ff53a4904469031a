"""The expert choices of one capture, some samples at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from trajreplay.query.files.datafile import OpenFile
from trajreplay.query.files.footers import broken
from trajreplay.query.files.reading import read_columns
from trajreplay.query.files.scanning import WHOLE_LIMIT_BYTES, decoded_bytes, read_batches
from trajreplay.schema.entry import DataFile, Entry
from trajreplay.schema.lists import Int64s, elements, lengths_of
from trajreplay.schema.store import Store
from trajreplay.schema.tables import EXPERT_LISTS, MAX_CHOICES, ROUTES, SAMPLE_TABLES

Experts = np.ndarray[Any, np.dtype[np.int16]]
_SHAPE = ("layers", "top_k", "num_experts", "layer_numbers")


@dataclass(frozen=True)
class Choices:
    """Choices under one name.

    Args:
        values: (N, L, K) int16. Of the tokens of all samples, one sample after another.
        tokens: (S,) int64. Tokens of each sample; 0 where it has none.
    """

    values: Experts
    tokens: Int64s

    @cached_property
    def ends(self) -> Int64s:
        """(S,) int64. Where the tokens of each sample end."""
        return np.cumsum(self.tokens)

    def of(self, row: int) -> Experts | None:
        """(T, L, K) The choices of one sample; None of one without."""
        count, end = int(self.tokens[row]), int(self.ends[row])
        return self.values[end - count : end] if count else None


@dataclass(frozen=True)
class RoutedRows:
    """Consecutive samples of one capture with their routes.

    Args:
        entry: The capture.
        sample_ids: Of the samples, in order.
        total, response: (S,) int64. Tokens of each sample, and those of its response.
        layer_numbers: (L,) The number of each layer in the model.
        num_experts: Experts of a layer, where known.
        choices: By name.
        start: Row of the capture that the first sample is.
        numbered: Whether the numbers were recorded; else they are the places of the layers.
    """

    entry: Entry
    sample_ids: Sequence[str]
    total: Int64s
    response: Int64s
    layer_numbers: tuple[int, ...]
    num_experts: int | None
    choices: dict[str, Choices]
    start: int = 0
    numbered: bool = True


def expert_columns(entry: Entry) -> tuple[str, ...]:
    """Under which names a capture holds choices."""
    file = entry.file(ROUTES.name)
    return () if file is None else tuple(one for one in EXPERT_LISTS if one in file.columns)


def routed_rows(store: Store, entry: Entry, names: Sequence[str]) -> Iterator[RoutedRows]:
    """Read the routes of a capture, a bounded number of samples at a time.

    Args:
        store: The lake.
        entry: The capture; one without routes yields nothing.
        names: Which choices; those that it lacks are left out.

    Raises:
        DatasetError: A file is not what the entry says, or the routes are not of its samples.
    """
    file = entry.file(ROUTES.name)
    if file is None:
        return
    held = [one for one in names if one in file.columns]
    table = SAMPLE_TABLES[entry.key.kind]
    columns = ["sample_id", "total_length", "response_length"]
    samples = read_columns(store, entry, table, columns)
    ids = samples["sample_id"].to_pylist()
    total, response = (np.asarray(samples[one].to_numpy(), np.int64) for one in columns[1:])
    start = 0
    shape: tuple[Any, ...] | None = None
    for batch in _batches(store, entry, file, ["sample_id", *_SHAPE, *held]):
        part = slice(start, start + batch.num_rows)
        if batch["sample_id"].to_pylist() != ids[part]:
            raise broken(file, f"has routes of other samples than its capture, after row {start}")
        for found in _shapes(batch):
            if shape not in (None, found):
                raise broken(file, "has routes of samples that differ in layers or choices")
            shape = found
        if shape is None:
            continue
        layers, top_k, num_experts, numbers = shape
        named = numbers is None or len(numbers) == layers
        if layers < 1 or top_k < 1 or layers * top_k > MAX_CHOICES or not named:
            raise broken(file, f"has {layers} layers of {top_k} choices, numbered {numbers}")
        choices = {one: _choices(file, one, batch[one], layers, top_k, total[part]) for one in held}
        yield RoutedRows(
            entry,
            ids[part],
            total[part],
            response[part],
            tuple(range(layers)) if numbers is None else numbers,
            num_experts,
            choices,
            start,
            numbers is not None,
        )
        start += batch.num_rows
    if start != len(ids):
        raise broken(file, f"has routes of {start} samples, expected {len(ids)}")


def _batches(
    store: Store, entry: Entry, file: DataFile, columns: Sequence[str]
) -> Iterator[pa.RecordBatch]:
    """The rows in bounded pieces, none of which is taken unverified."""
    stored = [ROUTES[one] for one in columns if one in file.columns]
    if file.digest and decoded_bytes(file, stored) > WHOLE_LIMIT_BYTES:
        with OpenFile(store, file, ROUTES, columns=(), every_byte=True):
            pass  # its bytes are those that were sealed; a piece of a column has no digest
        yield from read_batches(store, entry, ROUTES, columns)
    else:
        yield from read_columns(store, entry, ROUTES, columns).to_batches()


def _shapes(batch: pa.RecordBatch) -> set[tuple[Any, ...]]:
    """The distinct shapes of routes in a batch: one, in what a writer makes."""
    parts = [batch[one].to_pylist() for one in _SHAPE[:3]]
    numbers = [None if one is None else tuple(one) for one in batch["layer_numbers"].to_pylist()]
    return set(zip(*parts, numbers, strict=True))


def _choices(
    file: DataFile, name: str, column: pa.Array, layers: int, top_k: int, total: Int64s
) -> Choices:
    lengths, width = lengths_of(column), layers * top_k
    tokens = lengths // width
    wrong = (tokens * width != lengths) | ((tokens != total) & (tokens != np.maximum(total - 1, 0)))
    wrong &= np.asarray(column.is_valid())
    if wrong.any():
        row = int(wrong.argmax())
        raise broken(
            file,
            f"column {name} has {lengths[row]} choices of a sample of {total[row]} tokens, "
            f"expected {width} a token, or those of one token less",
            name,
        )
    values = elements(column).to_numpy(zero_copy_only=False)
    return Choices(values.reshape(-1, layers, top_k), tokens)
