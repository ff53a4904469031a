"""Sums over the tokens of each sample, and exact quantiles, taken piece by piece.

Token sums of one sample are taken in the order of its tokens, whatever the number of threads. Over
samples the sums are exact until they are rounded once (`math.fsum`), in pieces whose bounds depend
on the data alone.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa

from trajreplay.query.mismatch.partial_sums import SEQUENCE_SUMS, PartialSum
from trajreplay.query.mismatch.plan import SumPlan
from trajreplay.query.mismatch.powers import near_powers
from trajreplay.query.mismatch.quantiles import exact_quantiles
from trajreplay.query.mismatch.statistics import QUANTILES
from trajreplay.query.mismatch.tokens import Tokens, token_blocks

if TYPE_CHECKING:
    import duckdb

Run = Callable[[Callable[[], Any]], Any]


class SumPlace(NamedTuple):
    """Where a partial sum counts: the key of a capture's samples, and what its tokens share."""

    key: int
    position: int | None = None
    version: int | None = None


@dataclass
class TokenSums:
    """Takes pieces and keeps what the statistics of one run are finished from.

    Args:
        connection: An empty database, which may spill.
        run: How its work is run.
        plan: What is taken.
        parts: The sums of what counts.
        of_other_version: By key, how many valid tokens other weights sampled than recomputed them.
        of_unknown_version: By key, how many of those that count were sampled by weights that are
            not recorded, where those that recomputed them are.
    """

    connection: duckdb.DuckDBPyConnection
    run: Run
    plan: SumPlan
    parts: dict[SumPlace, list[dict[str, float]]] = field(default_factory=dict)
    of_other_version: Counter[int] = field(default_factory=Counter)
    of_unknown_version: Counter[int] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        kept = "".join(f"{name} BIGINT, " for name in self.plan.delta_columns)
        made = f"CREATE OR REPLACE TEMP TABLE deltas ({kept}a DOUBLE)"
        self.run(lambda: self.connection.execute(made).fetchall())

    def add(self, piece: pa.Table) -> None:
        """Take the sums of one piece and keep its differences."""
        keys = piece["key"].to_numpy()
        near: list[dict[str, Any]] = []
        far: list[dict[str, Any]] = []
        sizes: list[dict[str, Any]] = []
        for tokens in token_blocks(piece, self.plan):
            _count(self.of_other_version, keys[tokens.of_other_version])
            _count(self.of_unknown_version, keys[tokens.of_unknown_version])
            size = np.abs(tokens.d)
            beyond = np.flatnonzero(~(size <= self.plan.near))  # also where d is no number
            if len(beyond):
                far.append(_by_sample(tokens, beyond))
            valid = tokens.valid
            kept = {"key": pa.array(keys[tokens.row[valid]])} if self.plan.by_key else {}
            kept |= {name: one.arrow(valid) for name, one in tokens.places.items()}
            sizes.append(kept | {"a": pa.array(size if valid.all() else size[valid])})
            near.append(near_powers(tokens, beyond))
        if not near:
            return

        def work() -> dict[str, list[Any]]:
            self.connection.register("sizes", pa.concat_tables(map(pa.table, sizes)))
            self.connection.execute("INSERT INTO deltas SELECT * FROM sizes").fetchall()
            self.connection.register("near", _together(near))
            if far:
                self.connection.register("far", _together(far))
            arrays = self.connection.execute(self.plan.statement(far=bool(far))).fetchnumpy()
            return {name: values.tolist() for name, values in arrays.items()}

        self._keep(piece["key"].to_pylist(), self.run(work))

    def _keep(self, keys: Sequence[int], columns: Mapping[str, list[Any]]) -> None:
        rows: dict[SumPlace, list[int]] = {}
        unsplit = [None] * len(columns["row"])
        split = [columns.get(name, unsplit) for name in ("position", "version")]
        for row, (sample, *place) in enumerate(zip(columns["row"], *split, strict=True)):
            rows.setdefault(SumPlace(keys[sample], *place), []).append(row)
        sums = [(one.name, one) for one in self.plan.sums]
        if not self.plan.by_token:
            sums += [(f"{one.name}_of", one) for one in SEQUENCE_SUMS]
        for where, chosen in rows.items():
            taken = {
                one.name: taken_together(one, list(map(columns[name].__getitem__, chosen)))
                for name, one in sums
            }
            self.parts.setdefault(where, []).append(taken)

    def quantiles(self, group_of: dict[SumPlace, int]) -> dict[int, list[float]]:
        """Exact quantiles of |d|, interpolated between the two values around them, by group.

        Args:
            group_of: The group of every place.
        """
        wanted = list(QUANTILES.values())
        one_group = len(set(group_of.values())) == 1
        groups = pa.table(
            {
                "key": pa.array([one.key for one in group_of], pa.int32()),
                "position": pa.array([one.position for one in group_of], pa.int64()),
                "version": pa.array([one.version for one in group_of], pa.int64()),
                "g": pa.array(list(group_of.values()), pa.int32()),
            }
        )
        same = " AND ".join(
            f"deltas.{name} IS NOT DISTINCT FROM groups.{name}" for name in self.plan.delta_columns
        )

        def work() -> list[Any]:
            if one_group:
                found = exact_quantiles(self.connection, "deltas", "a", wanted)
                return [(next(iter(group_of.values())), found)]
            self.connection.register("groups", groups)
            return self.connection.execute(
                f"SELECT g, quantile_cont(a, {wanted}) FROM deltas JOIN groups ON {same} GROUP BY g"
            ).fetchall()

        return dict(self.run(work)) if group_of else {}


def _count(into: Counter[int], keys: Any) -> None:
    if not len(keys):
        return  # numpy takes its time for nothing, too
    found, counts = np.unique(keys, return_counts=True)
    into.update(dict(zip(found.tolist(), counts.tolist(), strict=True)))


def _by_sample(tokens: Tokens, which: Any) -> dict[str, Any]:
    """Some tokens as lists, a row a sample, which one thread of DuckDB takes in their order.

    Its threads share a batch of many rows, and then each takes a part of a sample.
    """
    row = tokens.row[which]
    starts = np.flatnonzero(np.diff(row, prepend=-1))
    bounds = pa.array([*starts.tolist(), len(row)], pa.int32())
    values = {name: one.arrow(which) for name, one in tokens.places.items()}
    values |= {"x": pa.array(tokens.x[which]), "d": pa.array(tokens.d[which])}
    lists = {name: pa.ListArray.from_arrays(bounds, one) for name, one in values.items()}
    return {"row": pa.array(row[starts])} | lists


def _together(blocks: Sequence[Mapping[str, Any]]) -> pa.Table:
    """One table, in one batch, of what was made of each block."""
    return pa.concat_tables(map(pa.table, blocks)).combine_chunks()


def taken_together(one: PartialSum, values: Sequence[float]) -> float:
    """Partial results of a sum, count, smallest or largest made one."""
    if one.taken in ("smallest", "largest"):
        extreme = min if one.taken == "smallest" else max
        return math.nan if any(map(math.isnan, values)) else extreme(values)
    return total(values)


def total(values: Iterable[float]) -> float:
    """The sum, exact until it is rounded once; not finite where a value is not.

    >>> total([1e16, 1.0, -1e16])
    1.0
    """
    values = list(values)
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # beyond the largest float, or of both infinities
        return sum(values)
