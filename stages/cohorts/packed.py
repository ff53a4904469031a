"""Samples of several cohorts packed into tensors: one value a sample, or one a response token."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import DTypeLike
from torch import Tensor

from trajreplay.schema.columns import has_column
from trajreplay.schema.lists import Int64s, elements, lengths_of
from trajreplay.schema.settings import LayoutSettings
from trajreplay.stages.cohorts.spans import Spans

# Of samples whose shards lie on any ranks: the one that holds the first shard of each.
FORWARD_RANK = "forward_rank"
_RANK, _ROW = pa.field("rank", pa.int32()), pa.field("row", pa.int64())


class Packed:
    """Rows of one or several cohorts, in order, as tensors made on demand and kept.

    Args:
        tables: The rows of each cohort, all with the same columns; list columns as long as
            `response_length` says.

    Attributes:
        sample_bounds: Where the samples of each cohort begin, and their number at the end.
        token_bounds: The same for response tokens.
        lengths: (S,) int64. Response tokens of each sample.
        offsets: (S+1,) int64. Where the tokens of each sample begin.
    """

    def __init__(self, tables: list[pa.Table]) -> None:
        self.table = pa.concat_tables(tables)
        self._counts = [table.num_rows for table in tables]
        self.sample_bounds = [0, *np.cumsum(self._counts, dtype=np.int64).tolist()]
        self.lengths = _tensor(self.table["response_length"]).long()
        self.offsets = torch.zeros(len(self.lengths) + 1, dtype=torch.int64)
        torch.cumsum(self.lengths, 0, out=self.offsets[1:])
        self.token_bounds = [int(self.offsets[bound]) for bound in self.sample_bounds]
        self._stored: dict[str, Tensor] = {}
        self._tokens: dict[str, Tensor] = {}
        self._scalars: dict[str, Tensor] = {}

    def stored(self, name: str) -> Tensor:
        """(N,) A list column, packed, in the type in which it is stored."""
        if name not in self._stored:
            self._stored[name] = packed_values(self.table[name])
        return self._stored[name]

    def tokens(self, name: str) -> Tensor:
        """(N,) float64. A list column, packed."""
        if name not in self._tokens:
            self._tokens[name] = packed_values(self.table[name], np.float64)
        return self._tokens[name]

    def scalars(self, name: str) -> Tensor:
        """(S,) float64. A column of one number a sample."""
        if name not in self._scalars:
            self._scalars[name] = _tensor(self.table[name]).double()
        return self._scalars[name]

    def replaced(self, columns: Mapping[str, Tensor]) -> Packed:
        """The same rows with other values: of columns, or of `groups`, the group of each sample.

        Args:
            columns: (N,) or (S,) each; `loss_mask` and `groups` among them as bool and int64.
        """
        other = copy.copy(self)
        other._tokens, other._scalars = {**self._tokens}, {**self._scalars}
        for name, values in columns.items():
            if name == "loss_mask":
                for made in ("weights", "masked", "trained"):
                    other.__dict__.pop(made, None)
                other.__dict__["mask"] = values
            elif name == "groups":
                other.__dict__["groups"] = values
            elif pa.types.is_list(self.table.schema.field(name).type):
                other._tokens[name] = values
            else:
                other._scalars[name] = values
        return other

    @cached_property
    def mask(self) -> Tensor:
        """(N,) bool. Trainable tokens."""
        values = self.stored("loss_mask")
        ones = values.dtype == torch.uint8 and (not len(values) or int(values.max()) <= 1)
        return values.view(torch.bool) if ones else values != 0

    @cached_property
    def weights(self) -> Tensor:
        """(N,) float64. 1 for trainable tokens, 0 for masked ones."""
        return self.mask.double()

    @cached_property
    def masked(self) -> Tensor:
        """(K,) int64. Where the tokens lie that are not trained."""
        return (~self.mask).nonzero().squeeze(1)

    @cached_property
    def trained(self) -> list[int]:
        """How many tokens of each cohort are trainable."""
        mask = self.mask.numpy()
        spans = pairwise(self.token_bounds)
        return [int(np.count_nonzero(mask[start:stop])) for start, stop in spans]

    @cached_property
    def groups(self) -> Tensor:
        """(S,) int64. The group of each sample, numbered over all cohorts.

        Rollouts number their prompts each for itself, so that a group of a step that consumed
        from several is one of a rollout.
        """
        return self._of_rollouts("group_id")

    @cached_property
    def cohorts(self) -> Tensor:
        """(S,) int64. The cohort of each sample."""
        return torch.from_numpy(np.repeat(np.arange(len(self._counts)), self._counts))

    def batches(self, layout: LayoutSettings) -> Tensor:
        """(S,) int64. What statistics over all samples are of: each cohort, or each rollout."""
        return self._within_rollouts(self.cohorts) if layout.batch == "rollout" else self.cohorts

    def rank_batches(self, layout: LayoutSettings) -> Tensor:
        """(S,) int64. The same of the samples of each rank."""
        ranks = self.cohort_ranks
        return self._within_rollouts(ranks) if layout.batch == "rollout" else ranks

    @cached_property
    def cohort_ranks(self) -> Tensor:
        """(S,) int64. The rank of each sample, numbered over all cohorts."""
        return torch.from_numpy(_divided(self.cohorts.numpy(), self.ranks))

    @cached_property
    def trajectories(self) -> Tensor:
        """(S,) int64. The trajectory of each sample, numbered over all cohorts and rollouts."""
        return self._of_rollouts("trajectory_id")

    @cached_property
    def weight_versions(self) -> Tensor:
        """(N,) int64. The weights that sampled each response token; UNKNOWN where none is said."""
        return torch.from_numpy(self.spans.by_token(self.offsets.numpy()))

    @cached_property
    def spans(self) -> Spans:
        """Which weights sampled which tokens."""
        return Spans.of(self.table["weight_versions"])

    @cached_property
    def micro_batches(self) -> Tensor:
        """(S,) int64. The micro-batch of each sample, numbered over all ranks and cohorts.

        Ranks number their forward passes each for itself, and shards of one pass lie on several.
        """
        there = has_column(self.table, FORWARD_RANK)
        ranks = self.table[FORWARD_RANK].to_numpy() if there else self.ranks
        return torch.from_numpy(_divided(self._named("micro_batch_id"), ranks))

    @cached_property
    def consumer_batches(self) -> Tensor:
        """(S,) int64. The consumer batch of each sample, numbered over all cohorts."""
        return torch.from_numpy(self._named("consumer_batch_id"))

    def agents(self, of_episodes: Collection[str]) -> Tensor:
        """(S,) int64. The group and agent of each sample, numbered over all cohorts.

        Args:
            of_episodes: Agents of which each episode is one by itself.
        """
        numbers = _divided(self.groups.numpy(), self._named("agent_id"))
        if not of_episodes:
            return torch.from_numpy(numbers)
        alone = pc.is_in(self.table["agent_id"], value_set=pa.array(list(of_episodes), pa.string()))
        episodes = np.where(alone.to_numpy(), self._named("episode_id") + 1, 0)
        return torch.from_numpy(_divided(numbers, episodes))

    def strides(self, length: int) -> Tensor:
        """(S,) int64. Every `length` rows of a rank, numbered over all cohorts."""
        return torch.from_numpy(_divided(self.cohort_ranks.numpy(), self.rows // length))

    def _of_rollouts(self, column: str) -> Tensor:
        """(S,) int64. Samples of one rollout and one name, numbered."""
        return self._within_rollouts(torch.from_numpy(self._named(column)))

    def _within_rollouts(self, classes: Tensor) -> Tensor:
        """(S,) int64. Classes of samples, divided by the rollout that generated each."""
        numbers = np.asarray(classes.numpy(), np.int64)
        for name in ("source_attempt", "source_rollout_id"):
            if has_column(self.table, name):
                numbers = _divided(numbers, self.table[name].to_numpy())
        return torch.from_numpy(numbers)

    def _named(self, column: str) -> Int64s:
        """Samples of one cohort and one name, numbered; those without a name are one."""
        names = self.table[column].combine_chunks()
        encoded = pc.dictionary_encode(names, null_encoding="encode")
        if isinstance(encoded, pa.ChunkedArray):
            encoded = encoded.combine_chunks()
        return _divided(encoded.indices.to_numpy().astype(np.int64), self.cohorts.numpy())

    @cached_property
    def ranks(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """(S,) int32. The rank that captured each sample."""
        return np.asarray(self.table["rank"].to_numpy(), np.int32)

    @cached_property
    def rows(self) -> Int64s:
        """(S,) int64. The row of each sample in the capture of its rank."""
        return np.asarray(self.table["row"].to_numpy(), np.int64)

    def text(self, name: str, sample: int) -> str | None:
        """A text column of one sample."""
        value = self.table[name][sample].as_py() if has_column(self.table, name) else None
        return None if value is None else str(value)

    def sample_of(self, token: int) -> tuple[int, int]:
        """The sample of a packed token, and the token's position in its response."""
        sample = int(torch.searchsorted(self.offsets, token, right=True)) - 1
        return sample, token - int(self.offsets[sample])


def _divided(numbers: Int64s, by: np.ndarray[Any, Any]) -> Int64s:
    """Classes split further by another number."""
    if not len(by) or by.min() == by.max():
        return numbers
    parts, part = np.unique(by, return_inverse=True)
    _, divided = np.unique(numbers * len(parts) + part, return_inverse=True)
    return np.asarray(divided, np.int64)


def packed_values(column: pa.ChunkedArray, dtype: DTypeLike | None = None) -> Tensor:
    """(N,) The values of a list column, one after another.

    Args:
        column: Lists of numbers.
        dtype: What they become; as they are if omitted.
    """
    parts = [elements(chunk).to_numpy(zero_copy_only=False) for chunk in column.chunks]
    if not parts:
        parts = [pa.array([], column.type.value_type).to_numpy()]
    return torch.from_numpy(np.concatenate(parts, dtype=dtype))


def numbered(part: pa.Table, rank: int) -> pa.Table:
    """The rows of a capture with their rank and their place in it."""
    ranks, rows = _places(rank, part.num_rows)
    return part.append_column(_RANK, ranks).append_column(_ROW, rows)


@lru_cache(maxsize=256)
def _places(rank: int, rows: int) -> tuple[pa.Array, pa.Array]:
    return pa.array(np.full(rows, rank, np.int32)), pa.array(np.arange(rows, dtype=np.int64))


def list_lengths(column: pa.ChunkedArray) -> Int64s:
    """(S,) int64. The length of each list; -1 for a null one."""
    if column.num_chunks == 1 and not column.null_count and pa.types.is_list(column.type):
        return lengths_of(column.chunk(0))
    lengths = pc.list_value_length(column)
    return np.asarray(pc.fill_null(lengths, -1).to_numpy(), np.int64)


def _tensor(column: pa.ChunkedArray) -> Tensor:
    return torch.from_numpy(np.array(column.to_numpy()))
