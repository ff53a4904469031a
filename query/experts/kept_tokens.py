"""What is kept of every compared token of a run, and a row a layer made of it.

That is |d|, which layers were compared, and in which the sets differ: a bit a layer. Quantiles are
exact, taken by DuckDB, which may spill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from trajreplay.query.experts.agreement_report import OF_SIDE, SIDES
from trajreplay.query.experts.pairs import PairedTokens

if TYPE_CHECKING:
    import duckdb

_WORD = 64


@dataclass
class KeptTokens:
    """What is kept of every token of a run, in a table of DuckDB, and counts by layer."""

    connection: duckdb.DuckDBPyConnection
    run: Callable[[Callable[[], Any]], Any]
    tokens: int = 0
    odd: int = 0
    bits: dict[int, int] = field(default_factory=dict)  # layer: its bit
    ordered: dict[int | None, int] = field(default_factory=dict)
    without: dict[int, int] = field(default_factory=dict)
    words: int = 0

    def add(self, piece: PairedTokens) -> None:
        """Take the tokens of some samples."""
        finite = np.isfinite(piece.delta)
        self.odd += int(len(finite) - finite.sum())
        if not finite.any():
            return
        mine, theirs = piece.trainer[finite], piece.sampler[finite]
        known = np.ones(mine.shape[:2], bool)
        differs = ~known
        for slot in range(mine.shape[2]):  # so few that a reduction over them costs more
            left, right = mine[:, :, slot], theirs[:, :, slot]
            known &= (left >= 0) & (right >= 0)
            differs |= left != right
        differs &= known
        other_order = differs.copy()
        tokens, layers = np.nonzero(differs)
        left, right = (np.sort(one[tokens, layers], 1) for one in (mine, theirs))
        differs[tokens, layers] = (left != right).any(1)
        for layer in piece.layers:
            self.bits.setdefault(layer, len(self.bits))
        self._count(piece.layers, known, other_order)
        self._insert(piece, piece.delta[finite], known, differs)
        self.tokens += len(known)

    def _count(self, layers: tuple[int, ...], known: Any, other_order: Any) -> None:
        for layer, compared, other in zip(
            layers, known.sum(0).tolist(), other_order.sum(0).tolist(), strict=True
        ):
            self.ordered[layer] = self.ordered.get(layer, 0) + compared - other
            self.without[layer] = self.without.get(layer, 0) + len(known) - compared
        whole = int((known.any(1) & ~other_order.any(1)).sum())
        self.ordered[None] = self.ordered.get(None, 0) + whole

    def _insert(self, piece: PairedTokens, delta: Any, known: Any, differs: Any) -> None:
        places = [self.bits[layer] for layer in piece.layers]
        words = -(-len(self.bits) // _WORD)
        columns = {"a": pa.array(delta)}
        for prefix, flags in (("c", known), ("d", differs)):
            placed = np.zeros((len(flags), words * _WORD), bool)
            placed[:, places] = flags
            packed = np.packbits(placed, axis=1, bitorder="little").view("<u8")
            columns |= {f"{prefix}{word}": pa.array(packed[:, word]) for word in range(words)}
        batch = pa.table(columns)

        def work() -> None:
            if not self.words:
                self.connection.execute("CREATE OR REPLACE TEMP TABLE tokens (a DOUBLE)").fetchall()
            for word in range(self.words, words):
                for prefix in "cd":
                    self.connection.execute(
                        f"ALTER TABLE tokens ADD COLUMN {prefix}{word} UBIGINT DEFAULT 0"
                    ).fetchall()
            self.words = words
            self.connection.register("piece", batch)
            self.connection.execute("INSERT INTO tokens BY NAME SELECT * FROM piece").fetchall()

        self.run(work)

    def rows(self, threshold: float) -> Iterator[dict[str, Any]]:
        """Over all layers, then each layer in order of its number."""
        compared = " OR ".join(f"c{word} <> 0" for word in range(self.words))
        differs = " OR ".join(f"d{word} <> 0" for word in range(self.words))
        yield self._row(None, compared, differs, threshold)
        for layer in sorted(self.bits):
            word, bit = divmod(self.bits[layer], _WORD)
            mark = f"{1 << bit}::UBIGINT"
            yield self._row(layer, f"c{word} & {mark} <> 0", f"d{word} & {mark} <> 0", threshold)

    def _row(
        self, layer: int | None, compared: str, differs: str, threshold: float
    ) -> dict[str, Any]:
        statement = (
            f"SELECT {differs} AS side, count(*), quantile_cont(a, [0.5, 0.99]), max(a), "
            f"count(*) FILTER (a > {threshold!r}) FROM tokens WHERE {compared} GROUP BY side"
        )
        found = self.run(lambda: self.connection.execute(statement).fetchall())
        sides = {bool(one[0]): one[1:] for one in found}
        tokens = sum(one[0] for one in sides.values())
        row: dict[str, Any] = {
            "layer": layer,
            "tokens": tokens,
            "without_route": self.tokens - tokens if layer is None else self.without[layer],
            "equal_sets": sides.get(False, (0,))[0] / tokens if tokens else None,
            "equal_ordered": self.ordered[layer] / tokens if tokens else None,
        }
        for name, side in zip(SIDES, (False, True), strict=True):
            count, quantiles, largest, over = sides.get(side, (0, (None, None), None, 0))
            values = (count, *quantiles, largest, over, over / count if count else None)
            row |= {f"{name}_{one.name}": value for one, value in zip(OF_SIDE, values, strict=True)}
        return row
