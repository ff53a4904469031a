"""`trajreplay schema`: the tables with their columns, and the stages, as they are declared."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from trajreplay.cli.options.shared import output_options
from trajreplay.cli.options.verb import Verb
from trajreplay.cli.terminal.output import Output

if TYPE_CHECKING:
    import pyarrow as pa

    from trajreplay.schema import Table


@click.command(
    cls=Verb,
    exit_codes={1: "", 2: "There is no such table.", 3: ""},
    example="trajreplay schema steps",
)
@click.argument(
    "table", required=False, metavar="[TABLE]", help="Table to list. Default: all of them."
)
@click.option("--stages", is_flag=True, help="List the stages instead. Default: the columns.")
@output_options
def schema(table: str | None, stages: bool, output: Output) -> None:
    """List the columns of the tables, or the stages."""
    import pyarrow as pa

    names = list(tables())
    if table is not None and table not in names:
        raise click.BadParameter(
            f"unknown table {table!r}, expected one of {', '.join(names)}", param_hint="'TABLE'"
        )
    if table is not None and stages:
        raise click.UsageError(
            "TABLE lists columns and --stages lists stages: give one of the two."
        )
    rows = stage_rows() if stages else column_rows(table)
    output.rows(pa.Table.from_pylist(rows), cell_width=None)


def tables() -> dict[str, Table]:
    """Every table that SQL shows, by name."""
    from trajreplay.query import SAMPLES
    from trajreplay.schema import TABLES

    return TABLES | {SAMPLES.name: SAMPLES}


def column_rows(table: str | None = None) -> list[dict[str, Any]]:
    """The declared columns, of one table or of all."""
    return [
        {
            "table": one.name,
            "column": column.name,
            "type": type_name(column.type),
            "unit": column.unit,
            "role": column.role,
            "nullable": column.nullable,
            "doc": column.doc,
        }
        for one in tables().values()
        if table in (None, one.name)
        for column in one.columns
    ]


def stage_rows() -> list[dict[str, Any]]:
    """The declared stages, in the order in which they are judged."""
    from trajreplay.schema import STAGES

    return [
        {
            "stage": one.name,
            "level": one.level,
            "inputs": ", ".join(one.inputs),
            "outputs": ", ".join((*one.outputs, *one.scalars)),
            "settings": ", ".join(one.settings),
            "equation": one.equation,
            "tolerance": one.tolerance,
            "source": one.source,
        }
        for one in STAGES
    ]


def type_name(kind: pa.DataType) -> str:
    """An Arrow type in short: `list<float32>`, `struct<start: int32, ...>`."""
    import pyarrow.types as types

    if types.is_list(kind):
        return f"list<{type_name(kind.value_type)}>"
    if types.is_struct(kind):
        return f"struct<{', '.join(f'{one.name}: {type_name(one.type)}' for one in kind)}>"
    return {"float": "float32", "double": "float64"}.get(str(kind), str(kind))
