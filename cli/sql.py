"""`trajreplay sql`: one statement over the tables of a lake."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import click

from trajreplay.cli.options import lake_option, output_options
from trajreplay.cli.output import Output
from trajreplay.cli.verb import Verb


@click.command(
    cls=Verb,
    exit_codes={0: "Done.", 1: "", 2: "The statement is wrong, or tries more than to read."},
    example='trajreplay sql "select rollout_id, avg(reward) from rollouts group by 1 order by 1"',
)
@click.argument(
    "statement",
    required=False,
    metavar="[STATEMENT]",
    help="One SELECT; - reads it from stdin. Default: --file.",
)
@lake_option
@click.option(
    "-f",
    "--file",
    "file",
    type=click.File("r", encoding="utf-8"),
    help="Read the statement from this file, - is stdin. Default: STATEMENT.",
)
@click.option("--explain", is_flag=True, help="Show the plan. Default: run the statement.")
@output_options
def sql(
    lake_path: Path, output: Output, statement: str | None, file: IO[str] | None, explain: bool
) -> None:
    """Run one SELECT of DuckDB's SQL over rollouts, steps, samples, outputs, and the other tables.

    STATEMENT is the text itself, or - for stdin. The tables: trajreplay schema.
    """
