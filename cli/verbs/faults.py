"""`trajreplay faults`: the catalogue of known mistakes."""

from __future__ import annotations

from typing import Any

import click

from trajreplay.cli.options.shared import output_options
from trajreplay.cli.options.verb import Verb
from trajreplay.cli.terminal.output import Output


@click.command(
    cls=Verb,
    exit_codes={1: "", 2: "There is no such fault or stage.", 3: ""},
    example="trajreplay faults loss.mask",
)
@click.argument(
    "name",
    required=False,
    metavar="[ID | STAGE]",
    help="A fault to show in full, or a stage to list those of. Default: a line for each.",
)
@output_options
def faults(name: str | None, output: Output) -> None:
    """List the known mistakes that explain looks for, or show one.

    Installed packages add theirs by an entry point of the group trajreplay.faults.
    """
    import pyarrow as pa

    from trajreplay.schema.contracts import STAGE_NAMES
    from trajreplay.stages.faults import not_loaded

    for failed in not_loaded():
        output.note(f"faults that are not listed: {failed}")
    if name is None or name in STAGE_NAMES:
        rows = [one for one in fault_rows() if name in (None, one["stage"])]
        output.rows(pa.Table.from_pylist(rows), cell_width=None)
        return
    from trajreplay.schema.errors import StageError
    from trajreplay.stages.faults import fault_named, reported

    try:
        one = fault_named(name)
    except StageError as error:
        raise click.BadParameter(f"{error.message}. {error.hint}", param_hint="'ID'") from error
    rows = [
        {"field": "id", "value": one.id},
        {"field": "name", "value": one.name},
        {"field": "stage", "value": one.stage},
        {"field": "recorded values equal", "value": one.says("...")},
        {"field": "look at", "value": one.look},
        *({"field": "report", "value": report} for report in reported(one.references)),
    ]
    output.rows(pa.Table.from_pylist(rows), cell_width=None)


def fault_rows() -> list[dict[str, Any]]:
    """Every fault with its stage and its name."""
    from trajreplay.stages.faults import catalogue

    return [
        {"fault": one.id, "stage": one.stage, "name": one.name, "look at": one.look}
        for one in catalogue()
    ]
