"""Whether sampler and trainer chose the same experts, by layer, and how far apart log-probs are.

What is kept of a token is |d|, which layers were compared, and in which the sets differ: a bit a
layer. Quantiles are exact, taken by DuckDB, which may spill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa

from trajreplay.query.catalog import Catalog
from trajreplay.query.connection import MEMORY_BYTES, connect_empty, interruptible
from trajreplay.query.experts.pairs import PairedReading, PairedTokens
from trajreplay.query.mismatch.pair import DEFAULT_PAIR, Pair
from trajreplay.query.row_masks import SelectedSet
from trajreplay.query.selection import Selected, Selection, select
from trajreplay.schema.errors import DatasetError, QueryError, listed

DEFAULT_THRESHOLD = 0.5
_WORD = 64
_SIDES = ("agreeing", "differing")
_OF_SIDE = (
    pa.field("tokens", pa.int64()),
    pa.field("abs_delta_p50", pa.float64()),
    pa.field("abs_delta_p99", pa.float64()),
    pa.field("abs_delta_max", pa.float64()),
    pa.field("over", pa.int64()),
    pa.field("over_fraction", pa.float64()),
)
AGREEMENT = pa.schema(
    [
        pa.field("run_id", pa.string(), nullable=False),
        pa.field("layer", pa.int32()),
        pa.field("tokens", pa.int64(), nullable=False),
        pa.field("without_route", pa.int64(), nullable=False),
        pa.field("equal_sets", pa.float64()),
        pa.field("equal_ordered", pa.float64()),
        *(one.with_name(f"{side}_{one.name}") for side in _SIDES for one in _OF_SIDE),
    ]
)


@dataclass(frozen=True)
class AgreementFinding:
    """One thing worth saying about what was compared of a run.

    Args:
        severity: `error` where the numbers do not mean what they say, `warning`, `info`.
        run_id: The run.
        message: What was found.
    """

    severity: str
    run_id: str
    message: str


@dataclass(frozen=True)
class AgreementReport:
    """Agreement of routes by run and layer.

    Args:
        names: The trainer's and the sampler's choices.
        pair: The columns of log-probs.
        levels: By run, whether its steps or its rollouts were read.
        table: One row a layer of a run, and first one without a layer: over all that were
            compared, where a token differs if it does in any of them.
        threshold: |d| beyond which tokens were counted, in nats.
        findings: What is to be said of the columns.
    """

    names: tuple[str, str]
    pair: str
    levels: dict[str, str]
    table: pa.Table
    threshold: float
    findings: tuple[AgreementFinding, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no finding of severity error."""
        return not any(one.severity == "error" for one in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "names": list(self.names),
            "pair": self.pair,
            "levels": self.levels,
            "threshold": self.threshold,
            "rows": self.table.to_pylist(),
            "findings": [vars(one) for one in self.findings],
        }


def route_agreement(
    catalog: Catalog,
    selection: Selection | None = None,
    *,
    runs: Sequence[str] = (),
    pair: str = DEFAULT_PAIR,
    threshold: float = DEFAULT_THRESHOLD,
    any_version: bool = False,
    memory_bytes: int = MEMORY_BYTES,
    threads: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> AgreementReport:
    """Hold the experts that the sampler chose against those that the trainer chose.

    A token counts where its loss mask is 1 and, as in `mismatch`, no other weights are known to
    have sampled it; in a layer where one side has no route (-1) it does not. The choices are
    those at the position that predicts it. The capture of a step is read where one holds the
    trainer's choices, with what it lacks of the sampler's taken from the rollout; else rollouts.

    Args:
        catalog: The lake.
        selection: Which samples; all if omitted.
        runs: The runs, side by side; all of the lake if empty.
        pair: The columns of log-probs, `TRAINER:SAMPLER`; with them go the choices of the same
            forward pass: old_experts with old_log_probs, experts with log_probs.
        threshold: |d| beyond which tokens are counted, in nats.
        any_version: Count tokens, too, that are known to be sampled by other weights.
        memory_bytes: What DuckDB may take before it spills.
        threads: Threads of DuckDB; no result depends on it.
        progress: Called with the capture sets read and all of them.

    Returns:
        One row a layer of each run, and findings.

    Raises:
        QueryError: The selection is wrong, or holds nothing to compare.
        DatasetError: A file is not what its entry says, or a column is a copy of the other.
    """
    if not 0 <= threshold < float("inf"):
        raise QueryError(f"the threshold is {threshold}, expected a number of nats from 0 on")
    wanted = selection or Selection()
    names = list(dict.fromkeys(runs or ([wanted.run] if wanted.run else catalog.runs)))
    if not names:
        raise QueryError("the lake holds no run")
    columns = Pair.parse(pair)
    chosen = {one: select(catalog, replace(wanted, run=one)) for one in names}
    total, done = sum(map(len, chosen.values())), 0
    rows: list[dict[str, Any]] = []
    findings: list[AgreementFinding] = []
    levels: dict[str, str] = {}
    for run_id, selected in chosen.items():
        reading = PairedReading(catalog, columns, any_version)
        levels[run_id] = reading.level([selected.sets[one] for one in selected.cohorts])
        left_out: list[str] = []
        with (
            connect_empty(catalog.store.folder, memory_bytes, threads) as connection,
            interruptible(connection) as run,
        ):
            kept = _Kept(connection, run)
            for one in _usable(selected, levels[run_id], left_out):
                for tokens in reading.tokens(one):
                    kept.add(tokens)
                done += 1
                if progress is not None:
                    progress(min(done, total), total)
            if not kept.tokens:
                raise _nothing(run_id, levels[run_id], reading, left_out)
            rows += [{"run_id": run_id, **row} for row in kept.rows(threshold)]
        findings += _findings(run_id, reading, kept, left_out)
    if progress is not None:
        progress(total, total)
    trainer, sampler = PairedReading(catalog, columns).names
    return AgreementReport(
        (trainer, sampler),
        pair,
        levels,
        pa.Table.from_pylist(rows, schema=AGREEMENT),
        threshold,
        tuple(findings),
    )


@dataclass
class _Kept:
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
        for name, side in zip(_SIDES, (False, True), strict=True):
            count, quantiles, largest, over = sides.get(side, (0, (None, None), None, 0))
            values = (count, *quantiles, largest, over, over / count if count else None)
            row |= {
                f"{name}_{one.name}": value for one, value in zip(_OF_SIDE, values, strict=True)
            }
        return row


def _usable(selected: Selected, level: str, left_out: list[str]) -> Iterator[SelectedSet]:
    for cohort in selected.cohorts:
        if (cohort.step_id is None) != (level == "rollout"):
            continue
        one = selected.of(cohort)
        if one.problems:
            raise DatasetError(f"{cohort}: {listed(one.problems)}")
        refusals = one.captures.refusals(allow_partial=selected.selection.allow_partial)
        if refusals:
            left_out.append(f"{cohort}: {refusals[0]}")
        else:
            yield one


def _nothing(
    run_id: str, level: str, reading: PairedReading, left_out: Sequence[str]
) -> QueryError:
    why = [f"no {level} that is selected holds a token of both"]
    if reading.samples_without:
        why.append(f"{reading.samples_without} samples lack choices or log-probs of a side")
    if reading.of_other_version:
        why.append(f"{reading.of_other_version} tokens were sampled by other weights")
    if reading.shards:
        why.append(f"{reading.shards} samples are context-parallel shards")
    if left_out:
        why.append(f"{len(left_out)} incomplete {level}s were left out")
    trainer, sampler = reading.names
    return QueryError(
        f"run {run_id!r}: no routes to compare: {'; '.join(why)}",
        hint=f"Both sides are captured with capture.routes: {trainer!r} and {sampler!r}.",
        compared=0,
    )


def _findings(
    run_id: str, reading: PairedReading, kept: _Kept, left_out: Sequence[str]
) -> Iterator[AgreementFinding]:
    for severity, text in reading.origins.remarks():
        yield AgreementFinding(severity, run_id, text)
    if kept.odd:
        message = f"the difference of {kept.odd} valid tokens is not finite: left out"
        yield AgreementFinding("error", run_id, message)
    if reading.samples_without:
        message = f"{reading.samples_without} samples lack choices or log-probs of a side"
        yield AgreementFinding("warning", run_id, message)
    if reading.shards:
        message = f"{reading.shards} samples are context-parallel shards, which are not compared"
        yield AgreementFinding("warning", run_id, message)
    if reading.of_other_version:
        message = (
            f"{reading.of_other_version} valid tokens are left out: other weights sampled them "
            "than recomputed them"
        )
        yield AgreementFinding("info", run_id, message)
    if left_out:
        message = f"{len(left_out)} left out as incomplete, the first: {left_out[0]}"
        yield AgreementFinding("warning", run_id, message)
