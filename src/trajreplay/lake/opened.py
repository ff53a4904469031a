"""A lake that is open: where it is, and one listing of it."""

from __future__ import annotations

import os
from functools import cached_property
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from trajreplay.capture.importers import ImportReport
    from trajreplay.query import Catalog
    from trajreplay.schema.store import Store


class Opened:
    """A lake that is open."""

    def __init__(self, store: Store, imported: ImportReport | None = None) -> None:
        self._store = store
        self.imported = imported

    def __repr__(self) -> str:
        return f"Lake({str(self._store)!r})"

    @cached_property
    def _catalog(self) -> Catalog:
        """One listing of the manifest, shared by everything until `refresh`."""
        from trajreplay.query import Catalog

        return Catalog.open(self._store)

    @property
    def _refused(self) -> dict[str, str]:
        """Files that this lake was made for and could not be read, and why."""
        return {one.path: one.problem for one in self.imported.refused} if self.imported else {}

    @property
    def _whole_catalog(self) -> Catalog:
        """The listing, for what has no place to name files that were refused.

        Raises:
            CaptureError: Some were.
        """
        self._refuse_refused()
        return self._catalog

    def _refuse_refused(self) -> None:
        """Raise what became of files that were refused, as if they had been all that was asked.

        Raises:
            CaptureError: Some were.
        """
        from trajreplay.schema.errors import CaptureError

        refused = self.imported.refused if self.imported else []
        if refused:
            more = f" (and {len(refused) - 1} more were refused)" if len(refused) > 1 else ""
            raise CaptureError(
                f"{refused[0].problem}{more}",
                hint=refused[0].hint or "Name the other files by themselves.",
            )

    def refresh(self) -> None:
        """See what was committed since the lake was opened, or since the last refresh."""
        self.__dict__.pop("_catalog", None)

    @property
    def path(self) -> str:
        """The folder, with links resolved."""
        return str(self._store)

    @classmethod
    def create(cls, path: str | os.PathLike[str], *, exist_ok: bool = False) -> Self:
        """Make a folder a lake and open it.

        Args:
            path: The folder; made where it is missing.
            exist_ok: Open what is already a lake instead of refusing it.

        Raises:
            DatasetError: It is a lake already, or no folder can be made there.

        >>> import tempfile
        >>> from trajreplay import Lake
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     lake = Lake.create(f"{folder}/lake")
        ...     Lake.open(f"{folder}/lake").path == lake.path
        True
        """
        from trajreplay.schema.lakefile import create_lake

        return cls(create_lake(path, exist_ok=exist_ok))

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """Open a lake.

        Raises:
            DatasetError: The folder is no lake, is damaged, or has a newer format.
        """
        from trajreplay.schema.lakefile import open_lake

        return cls(open_lake(path))
