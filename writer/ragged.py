"""Rows that do not fit their sample: as many values as it has tokens, masks of 0 and 1."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trajreplay.schema.errors import named
from trajreplay.schema.tables import length_column
from trajreplay.writer.encode import ListColumn
from trajreplay.writer.flatten import Array


def wrong_lengths(column: ListColumn, expected: Array, sample_ids: Sequence[str]) -> list[str]:
    """Say which rows of a column have another number of values than their sample has tokens.

    Args:
        column: The column; rows without values are let pass.
        expected: Tokens of each sample.
        sample_ids: Ids of the samples, for the message.

    Returns:
        One sentence per such row, naming sample and lengths.
    """
    name, found = column.column.name, column.lengths
    if len(found) != len(expected):
        return [f"{name} has {len(found)} rows, expected {len(expected)}: one per sample"]
    wrong = found != expected
    if column.valid is not None:
        wrong &= column.valid
    return [
        f"row {row}: {name} of sample {named(sample_ids[row])} has {found[row]} values, "
        f"expected {length_column(name)} = {expected[row]}"
        for row in np.flatnonzero(wrong).tolist()
    ]


def mask_problems(masks: ListColumn, lengths: Array, sample_ids: Sequence[str]) -> list[str]:
    """Say which loss masks are missing, of another length than the response, or not 0 and 1."""
    problems = wrong_lengths(masks, lengths, sample_ids)
    if masks.valid is not None:
        problems += [
            f"row {row}: loss_mask of sample {named(sample_ids[row])} is None"
            for row in np.flatnonzero(~masks.valid).tolist()
        ]
    wrong = np.flatnonzero(masks.values > 1)
    rows = np.unique(np.searchsorted(masks.offsets, wrong, side="right") - 1)
    for row in rows.tolist():
        values = masks.values[masks.offsets[row] : masks.offsets[row + 1]]
        token = int(np.argmax(values > 1))
        problems.append(
            f"row {row}: loss_mask of sample {named(sample_ids[row])} has {values[token]} at "
            f"token {token}, expected 0 or 1"
        )
    return problems
