"""Log-probs that lie some tokens late: of some samples, of a rank, or later sample by sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from trajreplay.stages.contract_checks.columns import Columns, Flags, Floats, Ints
from trajreplay.stages.report import Finding

# Tokens that a statement about a whole column needs.
ENOUGH = 24
# Columns whose gap is smaller on average agree.
APART = 0.02
# A column is shifted where it lies so much nearer to the other one moved; of so many tokens, which
# an engine's noise keeps farther apart, so much.
NEARER, SURE, NEARER_OF_MANY = 10.0, 96, 4.0
# A sample by itself shows a shift by so many tokens that lie apart, and near where they are moved.
TELLING = 8
# Tokens by which a whole response is late at most.
MOST = 4
# A cheap look takes every so many tokens.
STRIDE = 4

Sources = Callable[[Ints, Ints], tuple[Ints, Flags]]


@dataclass(frozen=True)
class _Move:
    """A way in which one column may lie late.

    Args:
        by: Tokens by which the first column is late; below 0 the second is.
        text: How the late column lies against the other one.
        late: Whether it is the first column that is late.
        packed: Whether tokens of other samples are moved in.
        sources: Of packed tokens and their samples: the tokens of the column that is not late, and
            which of them there are.
    """

    by: int
    text: str
    late: bool
    packed: bool
    sources: Sources


@dataclass
class _Sums:
    """(S,) each: of a move, the sums over the tokens of each sample that can be compared."""

    count: Floats
    near: Floats
    far: Floats
    spread: Floats
    apart: Floats
    told: Floats

    def of(self, unit: Ints, size: int) -> _Sums:
        """The sums over units of samples."""
        sums = (np.bincount(unit, one, size) for one in vars(self).values())
        return _Sums(*(one.astype(np.float64) for one in sums))

    def shows(self, least: int) -> Flags:
        """Which of them show a shift, of so many tokens at least."""
        factor = np.where(self.count >= SURE, NEARER_OF_MANY, NEARER)
        nearer = (self.near * factor < self.far) & (self.near * factor < self.spread)
        told = (self.told >= TELLING) & (2 * self.told >= self.apart)
        found = nearer & told & (self.count >= least) & (self.far > APART * self.count)
        return np.asarray(found, bool)


class Shifts:
    """The shifts between two columns of a cohort.

    Args:
        given: The cohort.
        first, second: (N,) The columns, finite.
        usable: (N,) Tokens at which both can be compared.
    """

    def __init__(self, given: Columns, first: Floats, second: Floats, usable: Flags) -> None:
        self.given, self.usable = given, usable
        self.first, self.second = first, second
        self.size = len(given.lengths)
        starts = np.concatenate([[True], given.ranks[1:] != given.ranks[:-1]])
        cuts = [*starts.nonzero()[0].tolist(), self.size]
        # Samples of one rank that lie beside each other were packed into one stream.
        self.streams = [(one, other) for one, other in pairwise(cuts) if one < other]
        self.stream = np.cumsum(starts) - 1
        self.low = given.offsets[np.array(cuts[:-1], np.int64)][self.stream]
        self.high = given.offsets[np.array(cuts[1:], np.int64)][self.stream]

    def find(self, one: str, other: str) -> Iterator[Finding]:
        """The shift that most tokens show.

        Args:
            one: The name of the first column.
            other: The name of the second.
        """
        found = list(self._shown())
        tokens = np.zeros(self.size)
        for _, rows, sums in found:
            tokens[rows] = np.maximum(tokens[rows], sums.count[rows])
        if tokens.sum() < ENOUGH:
            return
        # Of two that say the same, the plainer one comes first.
        move, rows, sums = max(found, key=lambda this: (len(this[1]), not this[0].packed))
        late, early = (one, other) if move.late else (other, one)
        count = float(sums.count[rows].sum())
        near, far = (float(sums_of[rows].sum()) / count for sums_of in (sums.near, sums.far))
        over = move.packed or self._over(move, rows, far)
        where = " over the borders of packed samples" if over and not move.packed else ""
        all_rows = tokens.nonzero()[0]
        named = self._of(all_rows, move)
        message = (
            f"{late} lies {move.text} against {early}{where}{named}: the mean gap of "
            f"{count:.0f} tokens is {near:.3g} so, and {far:.3g} as recorded"
        )
        places = self._places(rows)
        wrong = np.abs(self.first - self.second)[places] > APART
        wrong &= self.usable[places]
        check = "log-prob.packed-shift" if over else "log-prob.shifted"
        yield self.given.at(check, "error", message, int(places[wrong.argmax()]))

    def _of(self, rows: Ints, move: _Move) -> str:
        """Which samples these are, where they are not all of them that have tokens."""
        held = np.unique(self.given.owners(self.usable.nonzero()[0]))
        # The first one of a pack that grows late is not late yet.
        if len(rows) >= len(held) - (len(self.streams) if move.packed else 0):
            return ""
        ranks = np.unique(self.given.ranks[rows]).tolist()
        where = f", all of rank {ranks[0]}" if len(ranks) == 1 < len(self.streams) else ""
        return f" in {len(rows)} of {len(held)} samples{where}"

    def _shown(self) -> Iterator[tuple[_Move, Ints, _Sums]]:
        """Ways in which samples are shifted, and which."""
        gap = np.where(self.usable, np.abs(self.first - self.second), 0.0)
        own = np.bincount(self._owner, gap, self.size)
        counts = np.bincount(self._owner[self.usable], minlength=self.size)
        apart = own > APART * counts
        if not apart.any():
            return
        all_of = np.bincount(self.stream, own)
        few = np.arange(0, len(gap), STRIDE)
        for move in self._moves():
            # What is summed over all tokens is at least what a few of them give: where these are
            # not nearer than the whole gap, all are not.
            near = self._sums(move, few).near * NEARER_OF_MANY
            alone = apart & (near < own) & (counts >= TELLING)
            pools = np.bincount(self.stream, near) < all_of
            rows = (alone | pools[self.stream]).nonzero()[0]
            if not len(rows):
                continue
            sums = self._sums(move, self._places(rows))
            found = sums.shows(TELLING)
            rest = np.where(found, len(pools), self.stream)
            shown = sums.of(rest, len(pools) + 1).shows(ENOUGH)
            whole = sums.of(self.stream, len(pools)).shows(ENOUGH)
            found |= (shown[:-1] | whole)[self.stream] & (sums.near < sums.far)
            if found.any():
                yield move, found.nonzero()[0], sums

    @property
    def _owner(self) -> Ints:
        return np.arange(self.size).repeat(self.given.lengths)

    def _places(self, rows: Ints) -> Ints:
        """The packed tokens of some samples, in order."""
        held = np.zeros(self.size, bool)
        held[rows] = True
        return held.repeat(self.given.lengths).nonzero()[0]

    def _pairs(self, move: _Move, places: Ints) -> tuple[Ints, Ints]:
        """Tokens of the late column, and those of the other one that they are, both usable."""
        sources, there = move.sources(places, self.given.owners(places))
        places, sources = places[there], sources[there]
        both = self.usable[places] & self.usable[sources]
        return places[both], sources[both]

    def _sums(self, move: _Move, places: Ints) -> _Sums:
        late, early = (self.first, self.second) if move.late else (self.second, self.first)
        places, sources = self._pairs(move, places)
        mine, as_is = late[places], early[places]
        moved, aligned = np.abs(mine - early[sources]), np.abs(mine - as_is)
        spread = np.abs(early[sources] - as_is)
        apart = aligned > APART
        told = apart & (moved * NEARER_OF_MANY < aligned)
        owner = self.given.owners(places)
        values = (None, moved, aligned, spread, apart, told)
        return _Sums(*(np.bincount(owner, one, self.size).astype(np.float64) for one in values))

    def _moves(self) -> Iterator[_Move]:
        for by in range(1, MOST + 1):
            text = f"{_COUNTED[by - 1]} late"
            for late in (True, False):
                yield _Move(by, text, late, False, self._inside(by))
        if max(stop - start for start, stop in self.streams) < 3:
            return
        for extra in (1, -1):
            how = "later" if extra > 0 else "earlier"
            text = f"one token {how} with each sample of a pack (an entry "
            text += "too many in each)" if extra > 0 else "too few in each)"
            for late in (True, False):
                for at_end in (True, False):
                    yield _Move(0, text, late, True, self._packed(extra, at_end=at_end))

    def _inside(self, by: int, *, over: bool = False) -> Sources:
        """Each value so many tokens late in its sample, or in its stream."""

        def sources(places: Ints, owner: Ints) -> tuple[Ints, Flags]:
            low = self.low if over else self.given.offsets[:-1]
            return places - by, np.asarray(places - by >= low[owner])

        return sources

    def _packed(self, extra: int, *, at_end: bool) -> Sources:
        """A stream of an entry more or less for each sample, cut by the lengths of samples."""
        offsets, lengths = self.given.offsets, self.given.lengths
        held = np.concatenate([[0], np.cumsum(lengths > 0)])  # an empty one has no entry to lose
        number = held[:-1] - held[[one for one, _ in self.streams]][self.stream]
        begins = offsets[:-1] + extra * number

        def sources(places: Ints, owner: Ints) -> tuple[Ints, Flags]:
            row = np.empty(len(places), np.int64)
            cuts = np.searchsorted(self.stream[owner], np.arange(len(self.streams) + 1))
            for (start, stop), (one, other) in zip(self.streams, pairwise(cuts), strict=True):
                mine = np.searchsorted(begins[start:stop], places[one:other], side="right")
                row[one:other] = start + mine - 1
            within = places - begins[row] - (0 if at_end else extra)
            there = (within >= 0) & (within < lengths[row])
            there &= places - begins[row] < lengths[row] + extra
            return np.where(there, offsets[row] + within, 0), np.asarray(there)

        return sources

    def _over(self, move: _Move, rows: Ints, far: float) -> bool:
        """Whether the first tokens of samples are the last ones of those before them."""
        inside, _ = self._pairs(move, places := self._places(rows))
        beyond = _Move(move.by, move.text, move.late, True, self._inside(move.by, over=True))
        places, sources = self._pairs(beyond, np.setdiff1d(places, inside))
        late, early = (self.first, self.second) if move.late else (self.second, self.first)
        gaps = np.abs(late[places] - early[sources])
        return bool(len(gaps)) and float(np.median(gaps)) * NEARER < far


_COUNTED = ("one token", "two tokens", "three tokens", "four tokens")
