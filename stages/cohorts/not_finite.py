"""NaN and infinities in the columns of a table of samples: how many, and which does harm first."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from trajreplay.schema.columns import Table, has_column
from trajreplay.schema.settings import Settings
from trajreplay.schema.tables import OWN_LENGTH
from trajreplay.stages.cohorts.packed import list_lengths, packed_values


@dataclass(frozen=True)
class NotFinite:
    """What is not finite in a column.

    Args:
        column: The column.
        count: How many values are not finite.
        trained: How many of them are of trained tokens, or of samples.
        value: The first one: on a trained token before one under the mask, which does no harm.
        sample_id: Its sample.
        token: Its position in the response; None for a value a sample.
        row: The row of that sample in its table.
    """

    column: str
    count: int
    trained: int
    value: float
    sample_id: str
    token: int | None
    row: int

    @property
    def where(self) -> str:
        """Its place in words."""
        return self.sample_id if self.token is None else f"{self.sample_id} token {self.token}"

    @property
    def masked(self) -> bool:
        """Whether all of them lie under the mask."""
        return not self.trained


class Samples:
    """A table of samples, some columns of which may be null here and there.

    Args:
        table: The samples; with `loss_mask`, and response columns as long as that.
    """

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    @cached_property
    def _trained(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return np.asarray(packed_values(self._table["loss_mask"]).numpy() != 0)

    @cached_property
    def _starts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """(S,) Where the tokens of each sample begin."""
        lengths = list_lengths(self._table["loss_mask"])
        return np.concatenate([[0], np.cumsum(lengths)])[:-1].astype(np.int64)

    def not_finite(self, name: str, *, masked: bool | None = None) -> NotFinite | None:
        """What is not finite in a column of floats; None if everything is, or it is not there.

        What is null of some samples is nothing, and hides nothing of the others.

        Args:
            name: The column.
            masked: Whether to look under the mask, or at trained tokens and samples; None is both.
        """
        if not has_column(self._table, name):
            return None
        column = self._table[name]
        there = (~np.asarray(column.is_null().to_numpy())).nonzero()[0]
        per_token = pa.types.is_list(column.type)
        if not per_token:
            odd = there[~np.isfinite(np.asarray(column.to_numpy(), np.float64)[there])]
            if not len(odd) or masked:
                return None
            value, row = column[int(odd[0])].as_py(), int(odd[0])
            return NotFinite(name, len(odd), len(odd), float(value), self._id(row), None, row)
        values = packed_values(column).numpy()
        odd = (~np.isfinite(values)).nonzero()[0]
        if not len(odd):
            return None
        own = list_lengths(column)[there]
        starts = np.concatenate([[0], np.cumsum(own)])[:-1]
        owners = np.searchsorted(starts, odd, side="right") - 1
        rows, tokens = there[owners], odd - starts[owners]
        is_trained = self._trained[self._starts[rows] + tokens]
        if masked is not None:
            kept = is_trained != masked
            if not kept.any():
                return None
            odd, rows, tokens, is_trained = (
                every[kept] for every in (odd, rows, tokens, is_trained)
            )
        trained = is_trained.nonzero()[0]
        at = int(trained[0]) if len(trained) else 0
        value, row = values[odd[at]], int(rows[at])
        place = self._id(row), int(tokens[at]), row
        return NotFinite(name, len(odd), len(trained), float(value), *place)

    def _id(self, row: int) -> str:
        return str(self._table["sample_id"][row].as_py())


def harmful_columns(table: Table, settings: Settings) -> list[str]:
    """Columns of floats in which a NaN is no part of the arithmetic, as a missing reward may be."""
    legal = {*OWN_LENGTH, *(["raw_reward"] if settings.reward.missing == "exclude" else [])}
    return [one.name for one in table.columns if one.is_floating and one.name not in legal]
