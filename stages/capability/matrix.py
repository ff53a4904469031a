"""The matrices by contract version; a capture is judged by the one that it was declared under."""

from __future__ import annotations

from collections.abc import Collection

from trajreplay.schema.identity import ParallelCoordinates
from trajreplay.schema.settings import Settings
from trajreplay.stages.capability import v1, v2
from trajreplay.stages.capability.ability import Ability

_MATRICES = {"v1": v1.ability, "v2": v2.ability}


def ability(
    stage: str,
    settings: Settings,
    parallel: ParallelCoordinates,
    columns: Collection[str] = (),
    version: str = "v2",
) -> Ability:
    """Look a stage up in the matrix of a contract's version.

    Args:
        stage: Name of the stage.
        settings: The arithmetic in force.
        parallel: Where a capturing rank stands.
        columns: Columns that the capture holds.
        version: Version of the stage's contract.

    >>> ability("advantage.kl", Settings(), ParallelCoordinates(context_size=2)).reason
    'context-parallel size is 2 and layout.context is not stated'
    """
    matrix = _MATRICES.get(version)
    if matrix is None:
        known = " or ".join(_MATRICES)
        return Ability("unsupported", f"its contract is of version {version!r}, expected {known}")
    return matrix(stage, settings, parallel, columns)
