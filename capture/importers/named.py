"""Paths as users name them: a link is followed once, an archive unpacked, and messages say so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trajreplay.schema.bundles.archive import is_archive, unpacked
from trajreplay.schema.errors import CaptureError, TrajReplayError


@dataclass(frozen=True)
class NamedPath:
    """A path that is open for reading.

    Args:
        path: As it was named.
        inside: Where its files lie: the path, what a link of that name leads to, or what an
            archive was unpacked to.
        is_unpacked: Whether it is that.
    """

    path: Path
    inside: Path
    is_unpacked: bool = False

    def told(self, text: str) -> str:
        """Text in which the files of an archive are named by their place in it."""
        if not self.is_unpacked:
            return text
        inside = str(self.inside)
        return text.replace(f"{inside}/", f"{self.path}:").replace(inside, str(self.path))


@contextmanager
def named(path: Path) -> Iterator[NamedPath]:
    """Open a path as a user named it, for the time of a block.

    No other link is followed than the path itself. What is raised in the block names the files of
    an archive by their place in it.

    Raises:
        CaptureError: It is not there.
        DatasetError: It is an archive that is broken or unsafe.
    """
    if not path.exists():
        raise CaptureError(f"{path} is not there", hint="Name files or folders that are there.")
    target = path.resolve() if path.is_symlink() else path
    with unpacked(target) as inside:
        place = NamedPath(path, inside, is_archive(target))
        try:
            yield place
        except TrajReplayError as error:
            _tell(error, place)
            raise


def _tell(error: TrajReplayError, place: NamedPath) -> None:
    def told(value: Any) -> Any:
        return place.told(value) if isinstance(value, str) else value

    error.message, error.hint = place.told(error.message), place.told(error.hint)
    error.facts = {name: told(value) for name, value in error.facts.items()}
    error.args = tuple(map(told, error.args))
