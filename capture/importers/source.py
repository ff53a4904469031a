"""One source of an import between its reading and its commit."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from trajreplay.capture.importers.report import ImportedSource
from trajreplay.schema.errors import CaptureError, TrajReplayError
from trajreplay.schema.identity import CaptureKey
from trajreplay.schema.store import Store
from trajreplay.writer.commit import Prepared


@dataclass
class Source:
    """One source, read and checked whole.

    Args:
        result: What the report will say of it.
        counts: Samples and tokens of each of its captures.
        prepare: Lays its captures out, in the order in which they become visible.
    """

    result: ImportedSource
    counts: dict[CaptureKey, tuple[int, int]] = field(default_factory=dict)
    prepare: Callable[[], list[Prepared]] | None = None
    _captures: list[Prepared] | None = None

    def laid_out(self, store: Store) -> list[Prepared] | None:
        """Its captures; None where they cannot be, which the report then says.

        They are laid out once, by whichever thread asks first, before the other one may.
        """
        if self.prepare is not None:
            prepare, self.prepare = self.prepare, None  # what it was read into is needed no more
            try:
                self._captures = prepare()
            except (TrajReplayError, OSError) as error:
                self.fail(error, store)
            except (MemoryError, RecursionError) as error:
                told = str(error) or type(error).__name__
                self.result.problem = f"{self.result.path} cannot be read: {told}"
        return self._captures

    def tell(self, keys: Collection[CaptureKey] | None = None) -> None:
        """Say in the report which captures were taken: all of them, or those given."""
        result = self.result
        for key, (samples, tokens) in self.counts.items():
            if keys is None or key in keys:
                place = key.run_id, key.attempt, key.rollout_id, key.step_id, key.rank
                result.captures.append(place)
                result.samples += samples
                result.tokens += tokens

    def fail(self, error: TrajReplayError | OSError, store: Store) -> None:
        """Say in the report why nothing of it was taken."""
        told = not_writable(store, error) if isinstance(error, OSError) else error
        self.result.problem, self.result.hint = told.message, told.hint


def not_writable(store: Store, error: OSError) -> CaptureError:
    """What to say where a lake cannot be written."""
    return CaptureError(
        f"{store} cannot be written: {error}",
        hint="Make room, or make the folder writable, and import it again.",
    )
