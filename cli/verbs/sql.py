"""`trajreplay sql`: one statement over the tables of a lake."""

from __future__ import annotations

import sys
from typing import IO

import click

from trajreplay.cli.options.shared import ATTEMPT, RUN, lake_option, output_options
from trajreplay.cli.options.types import Size
from trajreplay.cli.options.verb import Verb
from trajreplay.cli.terminal.output import Output


@click.command(
    cls=Verb,
    exit_codes={0: "Done.", 1: "", 2: "The statement is wrong, or does more than to read."},
    example='trajreplay sql "select rollout_id, avg(reward) from rollouts group by 1 order by 1"',
)
@click.argument(
    "statement",
    required=False,
    metavar="[STATEMENT]",
    help="One SELECT; - reads it from stdin. Default: that of --file.",
)
@lake_option
@click.option(
    "-f",
    "--file",
    "file",
    type=click.File("rb"),
    metavar="FILE",
    help="Read the statement from this file. Default: STATEMENT.",
)
@RUN
@ATTEMPT
@click.option(
    "--allow-partial",
    is_flag=True,
    help="Show captures of incomplete rollouts and steps, and of superseded attempts, too. "
    "Default: leave them out and say how many.",
)
@click.option("--explain", is_flag=True, help="Show the plan. Default: run the statement.")
@click.option(
    "--memory",
    "memory_bytes",
    type=Size(),
    default="2GiB",
    show_default=True,
    help="Memory that the statement may take, in bytes or with a unit.",
)
@output_options
def sql(
    lake_path: str,
    output: Output,
    statement: str | None,
    file: IO[bytes] | None,
    run: str | None,
    attempt: int | None,
    allow_partial: bool,
    explain: bool,
    memory_bytes: int,
) -> None:
    """Ask a lake one question in SQL.

    The tables are those of `trajreplay schema`, and the dialect is DuckDB's. They show the complete
    captures of the newest attempt and of what it was resumed from.
    """
    from trajreplay.lake import Lake

    text = _read_statement(statement, file)
    query = Lake.open(lake_path).sql(
        text, run=run, attempt=attempt, allow_partial=allow_partial, memory_bytes=memory_bytes
    )
    if explain:
        output.text(query.explain().rstrip() + "\n")
        return
    with query.stream() as (rows, visible):
        output.rows(rows)
        notes = visible.notes()
    for note in notes:
        output.note(note)


def _read_statement(statement: str | None, file: IO[bytes] | None) -> str:
    if (statement is None) == (file is None):
        raise click.UsageError("Give one of STATEMENT and --file; - as STATEMENT reads stdin.")
    source = sys.stdin.buffer if statement == "-" else file
    if source is None:
        assert statement is not None
        return statement
    try:
        return source.read().decode()
    except UnicodeDecodeError as error:
        raise click.UsageError(f"The statement is no UTF-8 text: {error}.") from error
