"""The file of a verdict: what an earlier run left there is never read as that of this one."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, cast

import click
from click.exceptions import Exit

from trajreplay.cli.options.shared import Command
from trajreplay.cli.options.types import Place
from trajreplay.cli.options.verb import Verb
from trajreplay.cli.terminal.sink import SinkError, check_place, opened
from trajreplay.cli.terminal.values import json_text

OPTION = "--verdict"
_MOST_BYTES = 1 << 24  # of a verdict, which names its checks and some of the steps


class VerdictFile:
    """Where a verdict goes. In its block the file says that there is none yet, and then why not.

    Args:
        path: The file; None where none is written.
        told: What is known from the beginning of the run that is judged.

    Raises:
        click.UsageError: There is no such folder, or what is there is no plain file.
        SinkError: It cannot be written.
    """

    def __init__(self, path: Path | None, **told: Any) -> None:
        self.path = path
        self.told: dict[str, Any] = {"verdict": "fail", "certifies": False, **told}
        self._is_judged = False
        if path is not None:
            check_place(path, OPTION)

    def write(self, verdict: dict[str, Any]) -> None:
        """Write the verdict, whole or not at all."""
        self._write(verdict)
        self._is_judged = True

    def leave(self, reason: str, **told: Any) -> None:
        """Say that there is no verdict, and why.

        Args:
            reason: Why; a reader takes it for a fail.
            told: What is known by now, kept for what is left later.
        """
        self.told |= told
        self._write({**self.told, "reason": reason})

    def _write(self, found: dict[str, Any]) -> None:
        if self.path is not None:
            with opened(self.path, OPTION) as sink:
                sink.write(json_text(found, indent=2).encode() + b"\n")

    def __enter__(self) -> VerdictFile:
        self.leave("nothing is judged yet")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        if error is not None and not isinstance(error, Exit) and not self._is_judged:
            with suppress(SinkError, click.UsageError):  # it may be what cannot be written
                self.leave(f"nothing is judged: {told(error)}")


def verdict_option(default: str | None = None) -> Callable[[Command], Command]:
    """Add `--verdict`; the command gets a `VerdictFile` as `kept`, and is run in its block.

    It stands above all options that can refuse.

    Args:
        default: The file where none is named; None where none is written then.
    """

    def adding(command: Command) -> Command:
        @click.option(
            OPTION,
            "verdict_path",
            type=Place(dir_okay=False),
            default=default,
            show_default=default is not None,
            help="Write the verdict as JSON into this file, whole or not at all. What is there "
            "before is replaced at once by a fail that says that nothing is judged yet."
            + ("" if default else " Default: nowhere."),
        )
        @functools.wraps(command)
        def judging(*args: Any, verdict_path: Path | None, **values: Any) -> Any:
            known = {"run_id": values.get("run"), "attempts": values.get("attempts", ())}
            with VerdictFile(verdict_path, **known) as kept:
                return command(*args, kept=kept, **values)

        return cast(Command, judging)

    return adding


class JudgingVerb(Verb):
    """A verb that leaves a verdict, and voids one that is there where its command line is wrong."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse; of a command line that cannot be, no older verdict is taken for the outcome."""
        given = list(args)
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            option = next(one for one in self.params if OPTION in one.opts)
            path = _named(given) or option.get_default(ctx)
            if not ctx.resilient_parsing and isinstance(path, str | Path) and _is_verdict(path):
                with suppress(SinkError, click.UsageError):
                    VerdictFile(Path(path)).leave(f"nothing is judged: {told(error)}")
            raise


def told(error: BaseException) -> str:
    """An error in the words of a verdict."""
    if isinstance(error, click.ClickException):
        return error.format_message()
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return "interrupted"
    return getattr(error, "message", "") or f"{type(error).__name__}: {error}"


def _named(args: Sequence[str]) -> str | None:
    """The file that a command line names, as far as it can be read."""
    found = None
    for place, one in enumerate(args):
        if one == "--":
            break
        if one == OPTION:
            found = args[place + 1] if place + 1 < len(args) else None
        elif one.startswith(f"{OPTION}="):
            found = one.partition("=")[2]
    return found


def _is_verdict(path: str | Path) -> bool:
    """Whether a file is a verdict: nothing else is replaced by a command line that is wrong."""
    try:
        file = Path(path)
        if not file.is_file() or file.stat().st_size > _MOST_BYTES:
            return False
        found = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(found, dict) and {"verdict", "certifies"} <= found.keys()
