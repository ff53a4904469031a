"""What is told of a capture beside its columns: scalars, origins of columns, fates of samples."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trajreplay.capture.taking.values import are_plain, kept, read, settled
from trajreplay.schema.errors import CaptureError, is_name, named
from trajreplay.schema.events import check_fate
from trajreplay.schema.identity import check_id

if TYPE_CHECKING:
    from trajreplay.writer import CaptureBuilder

_MEANING = ("scale", "denominator", "numerator")  # what is told of scalars beside them


class Scalars:
    """What stages came to, as it was when it was handed over."""

    def __init__(self) -> None:
        self._told: list[tuple[str, dict[str, Any]]] = []

    def note(self, stage: str, scalars: Mapping[str, Any], meaning: Mapping[str, Any]) -> None:
        """Note scalars of a stage, and what they are.

        Raises:
            CaptureError: One is no number.
        """
        told = {**scalars, **meaning}
        if not are_plain(told.values()):
            told = {name: settled(value) for name, value in told.items()}
        self._told.append((stage, told))

    @property
    def seen(self) -> dict[str, list[Any]]:
        """All values of each."""
        found: dict[str, list[Any]] = {}
        for _, scalars in self._told:
            for name, value in scalars.items():
                if name not in _MEANING:
                    found.setdefault(name, []).append(value)
        return found

    def write(self, capture: CaptureBuilder) -> None:
        """Hand them over to a builder; waits for a device.

        Raises:
            TrajReplayError: One has no name, or they cannot be represented.
        """
        for stage, scalars in self._told:
            if texts := [name for name in scalars if not is_name(name)]:
                raise CaptureError(f"a scalar is called {named(texts[0])}, expected a name")
            capture.expected(stage, **read(scalars))


class Origins:
    """Where columns come from; what micro-batches say differently is none's.

    Attributes:
        differing: What they do.
    """

    def __init__(self) -> None:
        self._told: dict[str, dict[str, Any]] = {}
        self.differing: set[str] = set()

    def note(self, origins: Mapping[str, Mapping[str, Any]]) -> None:
        """Note what a micro-batch says of its columns."""
        for column, told in origins.items():
            known = self._told.setdefault(column, {})
            for name, value in told.items():
                if value is not None and known.setdefault(name, kept(value)) != kept(value):
                    known[name] = None
                    self.differing.add(f"{name} of {column}")

    def of(self, column: str) -> Mapping[str, Any]:
        """What is said of one."""
        return self._told.get(column, {})


class Ledger:
    """What became of samples, one row for each: the fate, the sample, why, and when."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str | None, int]] = []

    def note(self, fate: str, sample_ids: Sequence[str], reason: str) -> None:
        """Note what became of samples, now.

        Raises:
            SchemaError: It is no fate of a sample, a reason that is no word, or an id that is none.
        """
        check_fate(fate, reason)
        now = time.time_ns() // 1000
        ids = [check_id("sample_id", one) for one in sample_ids]
        self.rows += [(fate, one, reason or None, now) for one in ids]
