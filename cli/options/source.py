"""What a verb looks at: the lake, or files of another tool that are read for the time of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import click

from trajreplay.cli.options.shared import LAKE_FILE, LAKE_HELP, find_lake
from trajreplay.cli.options.stating import given_flags, statement_options
from trajreplay.cli.options.types import Named, Place
from trajreplay.cli.terminal.output import Output
from trajreplay.cli.terminal.progress import ProgressBar
from trajreplay.cli.terminal.text import folded

if TYPE_CHECKING:
    from trajreplay.lake import Lake

Command = TypeVar("Command", bound=Callable[..., Any])


class Source:
    """A lake by its path, or files that become one.

    Args:
        path: PATH as given; None for the lake.
        lake: `--lake` as given.
        options: What is said beside the files.
    """

    def __init__(self, path: Path | None, lake: str | None, options: dict[str, Any]) -> None:
        if path is not None and lake is not None:
            raise click.UsageError(f"PATH is {str(path)!r} and --lake is {lake!r}: give one.")
        self._path = path
        self._lake = lake
        self._options = options

    @contextmanager
    def open(self, output: Output) -> Iterator[Lake]:
        """Open it; what files hold and a lake does not is said on stderr."""
        from trajreplay.lake import Lake

        if self._path is None or (self._path / LAKE_FILE).is_file():
            self._refuse_statements()
            yield Lake.open(find_lake(self._lake if self._path is None else str(self._path)))
            return
        from trajreplay.capture.importers import ImportOptions
        from trajreplay.schema import QueryError

        options = ImportOptions(**self._options)
        progress = ProgressBar("Reading", quiet=output.quiet)
        with Lake.of_files(self._path, options=options, progress=progress) as lake:
            progress.__exit__(None, None, None)
            sources = lake.imported.sources if lake.imported else []
            for note in folded((one.path, note) for one in sources for note in one.notes):
                output.note(f"Note: {note}")
            try:
                yield lake
            except QueryError:  # perhaps what was asked for is in one of these
                refused = lake.imported.refused if lake.imported else []
                output.note_refused({one.path: one.problem for one in refused})
                raise

    def _refuse_statements(self) -> None:
        flags = given_flags(self._options)
        if flags:
            raise click.UsageError(
                f"{flags[0]} is said of files, and a lake is looked at: what it was "
                "imported with is in it."
            )

    @property
    def is_files(self) -> bool:
        """Whether files were named and no lake."""
        return self._path is not None and not (self._path / LAKE_FILE).is_file()


def source_options(command: Command) -> Command:
    """Add PATH, `--lake` and what is said of files; the command gets a `Source` as `source`."""

    @click.argument(
        "files",
        required=False,
        metavar="[PATH]",
        type=Place(exists=True),
        help="A file or folder of another tool, such as a replay bundle, or a lake. "
        "Default: --lake.",
    )
    @click.option("--lake", "named", type=Named(), metavar="PATH", help=LAKE_HELP)
    @statement_options
    @functools.wraps(command)
    def with_source(
        *args: Any,
        files: Path | None,
        named: str | None,
        statements: dict[str, Any],
        **values: Any,
    ) -> Any:
        return command(*args, source=Source(files, named, statements), **values)

    return cast(Command, with_source)
