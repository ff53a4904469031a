"""What other settings would make of a stage: a row for each field of each cohort."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trajreplay.cli.terminal.output import Output

if TYPE_CHECKING:
    import pyarrow as pa

    from trajreplay.stages import WhatIf

_LEGEND = (
    "values: how many were recomputed, and how many of them changed; where the largest change is: "
    "what was recorded there, what the declared settings give, and what the others then give; how "
    "many recorded values agree with the declared settings, and would then agree with the others, "
    "each stage judged from what was recorded before it, whatever changes there"
)


def write_what_if(found: WhatIf, output: Output) -> None:
    """Write a counterfactual: as one JSON document, a cohort a line, or rows of fields."""
    if output.format == "json":
        output.document(found.to_json())
        return
    output.note_refused(found.refused)
    for cohort in found.cohorts:
        for note in cohort.notes:
            output.note(f"{cohort.cohort}: {note}")
    for note in found.notes:
        output.note(note)
    if output.format == "ndjson":
        output.lines(one.to_json() for one in found.cohorts)
        return
    if output.format == "table":
        output.note(_LEGEND)
    output.rows(what_if_table(found))


def what_if_table(found: WhatIf) -> pa.Table:
    """One row for each field of each cohort; which run and attempt only where there are several."""
    import pyarrow as pa

    whole, text, real = pa.int64(), pa.string(), pa.float64()
    types = {"run_id": text} if len({one.cohort.run_id for one in found.cohorts}) > 1 else {}
    types |= {"attempt": whole} if len({one.cohort.attempt for one in found.cohorts}) > 1 else {}
    types |= {
        "rollout_id": whole,
        "step_id": whole,
        "stage": text,
        "field": text,
        "per": text,
        "values": whole,
        "changed": whole,
        "max_change": real,
        "where": text,
        "recorded": real,
        "declared": real,
        "then": real,
        "agree": whole,
        "then_agree": whole,
    }
    rows: list[dict[str, Any]] = [
        {**one.cohort._asdict(), **vars(field)} for one in found.cohorts for field in one.fields
    ]
    kept = [{name: row[name] for name in types} for row in rows]
    return pa.Table.from_pylist(kept, schema=pa.schema(list(types.items())))
