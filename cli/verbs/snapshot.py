"""`trajreplay snapshot`: fold the manifest's entries, so that large lakes open with fewer reads."""

from __future__ import annotations

import click

from trajreplay.cli.options.shared import lake_option, output_options
from trajreplay.cli.options.verb import Verb
from trajreplay.cli.terminal.output import Output
from trajreplay.cli.terminal.progress import ProgressBar


@click.command(
    cls=Verb,
    exit_codes={0: "There is a snapshot of all that was committed.", 1: ""},
    example="trajreplay snapshot",
)
@lake_option
@output_options
def snapshot(lake_path: str, output: Output) -> None:
    """Fold the manifest's entries into a few files, which readers open instead of one each.

    Worth it from some thousand captures on, and sooner in a bucket or on a network file system. The
    entries stay as they are, and writers go on meanwhile.
    """
    import pyarrow as pa

    from trajreplay.lake import Lake

    with ProgressBar("Folding", quiet=output.quiet) as progress:
        root = Lake.open(lake_path).snapshot(progress=progress)
    row = {
        "snapshot": root.number,
        "segments": len(root.segments),
        "entries": sum(one.entries for one in root.segments),
        "bytes": sum(one.bytes for one in root.segments),
    }
    output.rows(pa.Table.from_pylist([row]))
