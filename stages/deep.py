"""Contract checks over a whole lake, for a validation that looks at values."""

from __future__ import annotations

from collections.abc import Iterator

from trajreplay.query import Catalog, Cohort, Selection, select
from trajreplay.schema.errors import TrajReplayError
from trajreplay.stages.block import Block
from trajreplay.stages.cohort import LoadedCohort
from trajreplay.stages.contract_checks import check_contracts
from trajreplay.stages.report import Finding
from trajreplay.stages.whole import WholeCohorts


def contract_findings(catalog: Catalog) -> Iterator[tuple[Cohort, Finding]]:
    """Check the columns of every cohort that declares a stage, without recomputing anything.

    What cannot be read or is incomplete is left to the rest of the validation.

    Args:
        catalog: The lake.
    """
    try:
        whole = WholeCohorts(catalog, select(catalog, Selection()))
        turns = [place for place, _ in whole.turns()]
    except TrajReplayError:
        return
    for place in turns:
        loaded = whole.load(place)
        if isinstance(loaded, LoadedCohort) and loaded.table.num_rows:
            (found,) = check_contracts(Block([loaded]))
            yield from ((place, finding) for finding in found)
