"""The generated parts of the documents that say how the command line is used."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence

import click

from trajreplay.cli.main import VERBS, main
from trajreplay.cli.options.verb import EXIT_CODES, Verb


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows as a Markdown table."""
    lines = [names, ["---"] * len(names), *rows]
    return "".join(
        f"| {' | '.join(one.replace('|', chr(92) + '|') for one in line)} |\n" for line in lines
    )


def verb(name: str) -> Verb:
    """One verb of the command line."""
    command = main.get_command(click.Context(main), name)
    assert isinstance(command, Verb), f"{name} is no Verb"
    return command


def verbs() -> str:
    """Each verb with its sentence and an example."""
    return table(
        ("verb", "does", "for example"),
        [(f"`{name}`", line, f"`{verb(name).example}`") for name, (_, line) in VERBS.items()],
    )


def options() -> str:
    """Each verb in full: what it does, its options, its exit codes."""
    return "\n".join(_options_of(name) for name in VERBS)


def _options_of(name: str) -> str:
    command = verb(name)
    parent = click.Context(main, info_name=main.name)
    context = click.Context(command, parent, name, **command.context_settings)
    records = [one.get_help_record(context) for one in command.get_params(context)]
    rows = [(f"`{record[0]}`", record[1]) for record in records if record]
    codes = [(f"`{code}`", text) for code, text in command.exit_codes.items() if text]
    return (
        f"### `{' '.join(command.get_usage(context).removeprefix('Usage: ').split())}`\n\n"
        f"{inspect.cleandoc(command.help or '')}\n\n"
        f"{table(('option', ''), rows)}\n"
        f"{table(('exit', ''), codes)}\n"
        f"```text\n{command.example}\n```\n"
    )


def exits() -> str:
    """The exit codes that all verbs share."""
    return table(("exit", "means"), [(f"`{code}`", text) for code, text in EXIT_CODES.items()])
