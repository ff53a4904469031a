"""The form of a verb's help: a sentence, the options, the exit codes, one example to paste."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

EXIT_CODES = {
    0: "Done, and nothing differs.",
    1: "A difference was found.",
    2: "The command line is wrong, or selects nothing.",
    3: "Refused, unverified, or broken data.",
    130: "Interrupted.",
}
HELP = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class Verb(click.Command):
    """A command whose help ends with its exit codes and an example.

    Args:
        example: A whole command line that can be pasted.
        exit_codes: Outcomes that need saying, by code; whatever is not named is as in EXIT_CODES.
    """

    def __init__(
        self, name: str, *, example: str, exit_codes: Mapping[int, str] | None = None, **extra: Any
    ) -> None:
        super().__init__(name, **{"context_settings": HELP, **extra})
        self.example = example
        self.exit_codes = EXIT_CODES | dict(exit_codes or {})

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write what comes below the options."""
        write_exit_codes(formatter, self.exit_codes)
        with formatter.section("Example"):
            formatter.write(f"  {self.example}\n")


def write_exit_codes(formatter: click.HelpFormatter, codes: Mapping[int, str]) -> None:
    """Write the table of exit codes; an outcome that cannot happen has no text."""
    with formatter.section("Exit codes"):
        formatter.write_dl([(str(code), text) for code, text in codes.items() if text])
