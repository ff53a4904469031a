"""The pair of columns that is compared: what each is, and why a pair is refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from trajreplay.schema.entry import Entry, LogProbOrigin
from trajreplay.schema.errors import DatasetError, QueryError
from trajreplay.schema.tables import STEPS

Severity = Literal["error", "warning", "info"]
COPY = "copy:"
DEFAULT_PAIR = "old_log_probs:rollout_log_probs"
_UNKNOWN = "origin not recorded"


@dataclass(frozen=True)
class Pair:
    """Two columns of log-probs of the same tokens.

    Args:
        trainer: Recomputed by the trainer.
        sampler: From the sampling engine.
    """

    trainer: str
    sampler: str

    @classmethod
    def parse(cls, text: str) -> Pair:
        """Read `TRAINER:SAMPLER`, two columns of log-probs.

        Raises:
            QueryError: One of them is no column of log-probs, or both are the same.

        >>> Pair.parse("log_probs:rollout_log_probs").trainer
        'log_probs'
        """
        names = text.split(":")
        known = [one.name for one in STEPS.columns if one.name.endswith("log_probs")]
        wrong = [name for name in names if name not in known]
        if len(names) != 2 or wrong or names[0] == names[1]:
            raise QueryError(
                f"the pair is {text!r}, expected two different columns TRAINER:SAMPLER out of "
                f"{', '.join(known)}",
                hint=f"The usual one: {DEFAULT_PAIR}",
            )
        return cls(*names)

    def __str__(self) -> str:
        return f"{self.trainer}:{self.sampler}"

    @property
    def columns(self) -> tuple[str, str]:
        """Both columns."""
        return self.trainer, self.sampler


@dataclass
class Origins:
    """Where the two columns of the captures that were read came from, as their entries say."""

    pair: Pair
    sources: dict[str, set[str]] = field(default_factory=dict)
    crossed: set[tuple[float, float]] = field(default_factory=set)
    half_stated: set[tuple[str, float]] = field(default_factory=set)
    trainer_unversioned: bool = False

    def add(self, column: str, entry: Entry) -> LogProbOrigin | None:
        """Take note of the origin that an entry gives a column.

        Raises:
            DatasetError: It makes the difference 0, or the pair another one, by construction.
        """
        origin = entry.origins.get(column)
        self.sources.setdefault(column, set()).add(origin.source if origin else _UNKNOWN)
        if origin is None:
            return None
        self._refuse(column, origin, entry)
        return origin

    def compare(self, trainer: LogProbOrigin | None, sampler: LogProbOrigin | None) -> None:
        """Take note of the temperatures at which the values of one row were taken.

        One that a single side states is the same as the other's only as far as anybody knows.
        """
        one, other = (None if of is None else of.temperature for of in (trainer, sampler))
        if one is not None and other is not None:
            if one != other:
                self.crossed.add((one, other))
        elif one is not None:
            self.half_stated.add((self.pair.trainer, one))
        elif other is not None:
            self.half_stated.add((self.pair.sampler, other))

    @property
    def interpolated(self) -> tuple[str, ...]:
        """The columns that some of the captures hold interpolated."""
        return tuple(
            one for one in self.pair.columns if "interpolated" in self.sources.get(one, ())
        )

    def _refuse(self, column: str, origin: LogProbOrigin, entry: Entry) -> None:
        other = self.pair.sampler if column == self.pair.trainer else self.pair.trainer
        found = ""
        if origin.source == COPY + other:
            found = f"is a copy of {other}, so that their difference is 0 by construction"
        elif column == self.pair.trainer and origin.source == "sampler":
            found = "comes from the sampler, expected what the trainer recomputed"
        elif column == self.pair.sampler and origin.source == "trainer":
            found = "comes from the trainer, expected what the sampler returned"
        if found:
            raise DatasetError(
                f"capture of {entry.key}: {column} {found}",
                hint="Compare another pair, or capture what the trainer recomputes: "
                "--pair log_probs:rollout_log_probs",
                column=column,
                source=origin.source,
            )

    def remarks(self) -> Iterator[tuple[Severity, str]]:
        """What is to be said of the origins: severity and text."""
        for column in self.interpolated:
            yield "warning", f"{column} is interpolated in some captures, not recomputed"
        if self.crossed:
            told = "; ".join(
                f"{self.pair.trainer} at {one} and {self.pair.sampler} at {other}"
                for one, other in sorted(self.crossed)
            )
            yield "error", f"the log-probs were taken at different temperatures: {told}"
        yield from (("warning", one) for one in self.unproven)

    @property
    def unproven(self) -> tuple[str, ...]:
        """What may tell the columns apart and only one of them states."""
        trainer, sampler = self.pair.columns
        found = []
        for column, other in ((trainer, sampler), (sampler, trainer)):
            if stated := sorted(value for of, value in self.half_stated if of == column):
                shown = ", ".join(map(str, stated[:3])) + (" ..." if len(stated) > 3 else "")
                found.append(
                    f"the temperature of {column} is stated ({shown}) and that of {other} is not: "
                    "whether they are the same is not known"
                )
        if self.trainer_unversioned:
            found.append(
                f"which weights sampled the tokens is stated and which recomputed {trainer} is "
                "not: whether they are the same is not known"
            )
        return tuple(found)

    def __str__(self) -> str:
        told = [
            f"{column} ({', '.join(sorted(self.sources.get(column, {_UNKNOWN})))})"
            for column in self.pair.columns
        ]
        return " against ".join(told)
