"""`trajreplay capability`: which arithmetic can be recomputed, and what each stage takes for it."""

from __future__ import annotations

from typing import Any

import click

from trajreplay.cli.options.shared import output_options
from trajreplay.cli.options.verb import Verb
from trajreplay.cli.terminal.output import Output


@click.command(
    cls=Verb,
    exit_codes={1: "", 2: "There is no such profile.", 3: ""},
    example="trajreplay capability --profile openrlhf",
)
@click.option(
    "--profile",
    metavar="NAME",
    help="What the stages need under the settings of a profile. Default: every setting that can be "
    "recomputed.",
)
@output_options
def capability(profile: str | None, output: Output) -> None:
    """Print the capability matrix.

    By stage, every setting with the values that can be recomputed and what comes of the others; of
    a profile, what each stage reads and is compared with.
    """
    import pyarrow as pa

    rows = matrix_rows() if profile is None else _needs(profile)
    output.rows(pa.Table.from_pylist(rows), cell_width=None)


def matrix_rows() -> list[dict[str, Any]]:
    """Every setting of every stage: what can be recomputed, and where that is not all of it."""
    from trajreplay.schema import STAGES
    from trajreplay.schema.settings import SECTIONS
    from trajreplay.schema.settings.knobs import kinds
    from trajreplay.stages.capability import limits

    return [
        {
            "stage": stage.name,
            "setting": f"{section}.{name}",
            "recomputed": ", ".join(kind.known) or kind.expected,
            "otherwise": "; ".join(limits(stage.name, f"{section}.{name}")),
        }
        for stage in STAGES
        for section in (*(("layout",) if stage.name == "sample" else ()), *stage.settings)
        if section in SECTIONS
        for name, kind in kinds(SECTIONS[section]).items()
    ]


def _needs(name: str) -> list[dict[str, Any]]:
    from trajreplay.cli.verbs.profiles import profile_settings
    from trajreplay.schema import STAGES, with_changes
    from trajreplay.schema.identity import ParallelCoordinates
    from trajreplay.stages.capability import ability
    from trajreplay.stages.compose.example import N_SAMPLES_PER_PROMPT

    settings = profile_settings(name)
    if settings.reward.n_samples_per_prompt is None:  # the user's to state
        settings = with_changes(settings, {"reward.n_samples_per_prompt": N_SAMPLES_PER_PROMPT})
    found = {one.name: ability(one.name, settings, ParallelCoordinates()) for one in STAGES}
    return [
        {
            "stage": stage,
            "capability": one.capability,
            "reads": ", ".join(one.reads),
            "compared": ", ".join(one.writes),
            "takes": "the whole cohort" if one.whole else "",
            "reason": one.reason,
        }
        for stage, one in found.items()
    ]
