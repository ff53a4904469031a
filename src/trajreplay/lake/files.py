"""Files that other tools left: imported into a lake, or opened as one of their own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Self

from trajreplay.lake.opened import Opened

if TYPE_CHECKING:
    from trajreplay.capture.importers import ImportOptions, ImportReport


class FromFiles(Opened):
    """A lake that files of other tools go into."""

    @classmethod
    @contextmanager
    def of_files(
        cls,
        *paths: str | os.PathLike[str],
        kind: str | None = None,
        options: ImportOptions | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[Self]:
        """Open files that another tool left, as a lake of their own for the time of a block.

        Args:
            paths: Files and folders.
            kind: What they are; found out if omitted.
            options: What is said beside the files.
            progress: Called with the sources done and all of them.

        Yields:
            A temporary lake, with what became of each source as `lake.imported`. Its `validate` and
            `replay` report those that were refused.

        Raises:
            CaptureError: A path is not there, is of no known kind or of several, or is a lake of
                which something was said.
        """
        import tempfile

        from trajreplay.capture.importers import import_files, importer_of, named, recognise
        from trajreplay.schema.errors import CaptureError
        from trajreplay.schema.lakefile import create_lake
        from trajreplay.schema.layout import LAKE_FILE

        with ExitStack() as opened:
            places = [opened.enter_context(named(Path(one))) for one in paths]
            if len(places) == 1 and (places[0].inside / LAKE_FILE).is_file():
                said = options.said() if options else []
                if kind or said:
                    told = f"the kind {kind!r}" if kind else ", ".join(said)
                    raise CaptureError(
                        f"{paths[0]} is a lake, and {told} is said of files: what it was imported "
                        "with is in it",
                        hint="Leave it out, or import the files again with it.",
                    )
                yield cls.open(places[0].inside)
                return
            importer = importer_of(kind) if kind else recognise([one.inside for one in places])
            folder = tempfile.TemporaryDirectory(prefix="trajreplay-files-")
            store = create_lake(opened.enter_context(folder), exist_ok=True)
            report = import_files(store, importer, places, options, progress=progress)
            yield cls(store, report)

    def import_files(
        self,
        kind: str,
        *paths: str | os.PathLike[str],
        options: ImportOptions | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> ImportReport:
        """Import files that another tool left: each source whole, or refused by itself.

        Args:
            kind: What they are, such as `relax-bundle`.
            paths: Files and folders.
            options: What is said beside the files: the run, the attempt, what ids are local to.
            progress: Called with the sources done and all of them.

        Returns:
            What became of each source; `report.refused`, `report.to_json()`.

        Raises:
            CaptureError: There is no such kind, a path is not there, or nothing of the kind is
                at or below it.
        """
        from trajreplay.capture.importers import import_files, importer_of

        found = [Path(one) for one in paths]
        report = import_files(self._store, importer_of(kind), found, options, progress=progress)
        self.refresh()
        return report
