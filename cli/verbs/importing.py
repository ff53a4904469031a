"""`trajreplay import`: files of other tools into captures of the lake."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from trajreplay.cli.options.shared import LAKE_HELP, find_lake, output_options
from trajreplay.cli.options.stating import statement_options
from trajreplay.cli.options.types import ImportKind, Named, Place, RedactionRule
from trajreplay.cli.options.verb import Verb
from trajreplay.cli.terminal.output import Output
from trajreplay.cli.terminal.progress import ProgressBar
from trajreplay.cli.terminal.text import counted, folded

if TYPE_CHECKING:
    import pyarrow as pa

    from trajreplay.capture.importers import ImportReport


class ImportVerb(Verb):
    """A verb whose help lists the kinds of files that there are."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the kinds, and what is below the options of every verb."""
        from trajreplay.capture.importers import importer_of, kinds
        from trajreplay.schema import TrajReplayError

        rows = []
        for kind in kinds():
            try:
                rows.append((kind, importer_of(kind).doc))
            except TrajReplayError as error:
                rows.append((kind, error.message))
        with formatter.section("Kinds"):
            formatter.write_dl(rows)
        super().format_epilog(ctx, formatter)


@click.command(
    name="import",
    cls=ImportVerb,
    exit_codes={0: "All of it is in the lake.", 1: "", 3: "Something was refused."},
    example="trajreplay import relax-bundle runs/replay-bundles",
)
@click.argument("kind", type=ImportKind(), help="What the files are, as listed below.")
@click.argument(
    "paths",
    nargs=-1,
    required=True,
    metavar="PATH...",
    type=Place(exists=True),
    help="Files, or folders with any number of them.",
)
@click.option(
    "--lake",
    "named",
    type=Named(),
    metavar="PATH",
    help=f"{LAKE_HELP} Made where it is missing.",
)
@click.option("--run", metavar="ID", help="Run of the captures. Default: as the files say.")
@click.option(
    "--attempt",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Attempt of the captures.",
)
@statement_options
@click.option(
    "--redact",
    "redaction",
    type=RedactionRule(),
    multiple=True,
    metavar="FIELD=RULE",
    help="Keep a text field that is dropped otherwise: truncate:N, its first N characters; hash or "
    "keyed-hash. May be given several times. Default: drop.",
)
@click.option(
    "-n", "--dry-run", is_flag=True, help="Read and check all of it. Default: and import it."
)
@output_options
def import_files(
    output: Output,
    kind: str,
    paths: tuple[Path, ...],
    named: str | None,
    dry_run: bool,
    statements: dict[str, Any],
    redaction: tuple[tuple[str, str], ...],
    **options: Any,
) -> None:
    """Import files that another tool left, each whole or not at all.

    What was imported before stays as it is, and what is missing is added: an import that was
    interrupted is done again. The report says of every source what was taken, and why another was
    refused.
    """
    from trajreplay.capture.importers import ImportOptions, import_files, importer_of
    from trajreplay.schema.lakefile import create_lake

    store = None if dry_run else create_lake(_target(named), exist_ok=True)
    said = ImportOptions(**options, **statements, redaction=dict(redaction))
    with ProgressBar("Importing", quiet=output.quiet) as progress:
        report = import_files(store, importer_of(kind), paths, said, progress=progress)
    write_import(report, output)
    click.get_current_context().exit(report.exit_code)


def write_import(report: ImportReport, output: Output) -> None:
    """Write what became of each source, and on stderr what to do about those refused."""
    if output.format == "json":
        output.document(report.to_json())
    elif output.format == "ndjson":
        output.lines(one.to_json() for one in report.sources)
    else:
        output.rows(_rows(report), cell_width=None)
    for note in folded((one.path, note) for one in report.sources for note in one.notes):
        output.note(f"Note: {note}")
    for hint in dict.fromkeys(one.hint for one in report.refused if one.hint):
        output.note(f"Hint: {hint}")
    output.note(summary(report))


def summary(report: ImportReport) -> str:
    """How many sources came to what."""
    counts = {one.status: 0 for one in report.sources}
    for one in report.sources:
        counts[one.status] += 1
    found = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    return f"{counted(len(report.sources), 'source')}: {found}"


def _target(named: str | None) -> str:
    """The lake to import into: one that is named or there, else a new one in ./lake."""
    from trajreplay.schema import DatasetError

    try:
        return find_lake(named)
    except DatasetError:
        return "lake"


def _rows(report: ImportReport) -> pa.Table:
    import pyarrow as pa

    return pa.Table.from_pylist(
        [
            {
                "status": one.status,
                "source": one.path,
                "captures": _named(one.captures),
                "samples": one.samples,
                "tokens": one.tokens,
                "problem": one.problem or None,
            }
            for one in report.sources
        ],
        schema=pa.schema(
            [
                ("status", pa.string()),
                ("source", pa.string()),
                ("captures", pa.string()),
                ("samples", pa.int64()),
                ("tokens", pa.int64()),
                ("problem", pa.string()),
            ]
        ),
    )


def _named(captures: Iterable[tuple[str, int, int | None, int | None, int]]) -> str:
    """Captures as `run rollout 7 step 0 ranks 0, 1`, those of one set together."""
    ranks: dict[tuple[str, int | None, int | None], list[int]] = {}
    for run, _, rollout, step, rank in captures:
        ranks.setdefault((run, rollout, step), []).append(rank)
    return "; ".join(
        f"{run} {'events' if rollout is None else f'rollout {rollout}'}"
        f"{'' if step is None else f' step {step}'} "
        f"rank{'s' * (len(found) > 1)} {', '.join(map(str, found))}"
        for (run, rollout, step), found in ranks.items()
    )
