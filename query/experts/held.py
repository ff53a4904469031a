"""Which response tokens the context-parallel ranks of a step hold, of each of its samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from trajreplay.query.experts.captured import RoutedRows
from trajreplay.query.experts.sides import Side
from trajreplay.query.files.reading import read_columns
from trajreplay.query.files.row_identity import Shard, names_of
from trajreplay.query.mismatch.consumed import columns_of
from trajreplay.query.mismatch.shards import Rows, identified, is_cut, needed, placed
from trajreplay.query.selecting.row_masks import SelectedSet
from trajreplay.schema.entry import Entry
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.shard_checks import CUT_HINT, check_once
from trajreplay.schema.shards import response_spans
from trajreplay.schema.store import Store
from trajreplay.schema.tables import SAMPLE_TABLES


class HeldTokens:
    """What the rows of one capture hold of the responses that are cut.

    Args:
        store: The lake.
        entry: The capture.
    """

    def __init__(self, store: Store, entry: Entry) -> None:
        self._entry = entry
        self._cut = _rows(store, entry).cut
        cut = self._cut
        self._spans = response_spans(cut.layout, cut.total, cut.response, cut.places)

    def tokens(self, row: int) -> Any:
        """(n,) int64. The tokens that a row holds, in the order in which it stores them."""
        return np.concatenate([np.arange(one[row], end[row]) for one, end in self._spans])

    def mask(self, row: int) -> Any:
        """(N,) bool. The same of all tokens of the response."""
        held = np.zeros(int(self._cut.response[row]), bool)
        held[self.tokens(row)] = True
        return held

    def positions(self, row: int) -> Any:
        """(T,) bool. Where in the sequence the choices are made that predict those tokens."""
        total, response = int(self._cut.total[row]), int(self._cut.response[row])
        found = np.zeros(total, bool)
        places = self.tokens(row) + total - response - 1
        found[places[places >= 0]] = True
        return found

    def spread(self, name: str, values: Any, row: int) -> Any:
        """Values at the tokens that a row holds, and 0 at the others.

        Raises:
            DatasetError: They are not as many.
        """
        tokens, response = self.tokens(row), int(self._cut.response[row])
        if len(values) != len(tokens):
            raise DatasetError(
                f"capture of {self._entry.key}: {name} of sample {self._cut.sample_ids[row]!r} has "
                f"{len(values)} values, expected {len(tokens)}, its tokens under the stated "
                f"layout, or response_length = {response} on every rank",
                hint=CUT_HINT,
            )
        whole = np.zeros(response, values.dtype)
        whole[tokens] = values
        return whole


class PairedRows(NamedTuple):
    """Consecutive samples of a capture.

    Args:
        piece: Their choices.
        samples: Their columns.
        shards: Which shard of its sample each is; empty of a rollout.
        held: Where they may be shards, the tokens that they hold.
    """

    piece: RoutedRows
    samples: pa.Table
    shards: Sequence[Shard]
    held: HeldTokens | None

    def whole(self, name: str, side: Side, row: int) -> Side:
        """A side with log-probs at each token of the response, 0 where another rank has them.

        Raises:
            DatasetError: They are as many as neither the response nor the shard has tokens.
        """
        response = int(self.piece.response[row])
        if len(side.log_probs) == response:
            return side
        if self.held is None:
            raise DatasetError(
                f"capture of {self.piece.entry.key}: {name} of sample "
                f"{self.piece.sample_ids[row]!r} has {len(side.log_probs)} values, expected "
                f"{response}"
            )
        values = self.held.spread(name, side.log_probs, self.piece.start + row)
        return side._replace(log_probs=values)


def check_shards(store: Store, chosen: SelectedSet) -> None:
    """Refuse samples of a capture set of which not every shard is there once, and selected.

    Raises:
        DatasetError: There is one.
    """
    entries = [one for one in chosen.captures.owners if one.key.rank in chosen.rows and one.rows]
    if not is_cut(entries):
        return
    dynamic = any("context_size" in columns_of(one) for one in entries)
    numbers: dict[tuple[object, ...], int] = {}
    found: list[tuple[int, int, int]] = []
    for entry in entries:
        rows = _rows(store, entry)
        mask = chosen.rows[entry.key.rank]
        kept = np.ones(entry.rows, bool) if mask is None else np.asarray(mask)
        group = 0 if dynamic else entry.parallel.data_rank
        places = zip(
            rows.ints("place.rank").tolist(), rows.ints("place.size").tolist(), strict=True
        )
        for row, (name, place) in enumerate(zip(names_of(rows.found), places, strict=True)):
            if kept[row]:
                found.append((numbers.setdefault((group, *name), len(numbers)), *place))
    columns = np.array(found, np.int64).reshape(-1, 3).T
    check_once([str(name[-1]) for name in numbers], *columns)


def _rows(store: Store, entry: Entry) -> Rows:
    """All rows of a capture, with where their shards lie."""
    declared = SAMPLE_TABLES[entry.key.kind]
    table = read_columns(store, entry, declared, needed(declared))
    found = identified(entry, {one: table[one].combine_chunks() for one in table.column_names})
    return Rows(entry, found | placed(entry, found))
