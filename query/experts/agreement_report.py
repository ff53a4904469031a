"""What a comparison of routes says: a row a layer of each run, and findings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from trajreplay.query.mismatch.report import MismatchFinding

SIDES = ("agreeing", "differing")
OF_SIDE = (
    pa.field("tokens", pa.int64()),
    pa.field("abs_delta_p50", pa.float64()),
    pa.field("abs_delta_p99", pa.float64()),
    pa.field("abs_delta_max", pa.float64()),
    pa.field("over", pa.int64()),
    pa.field("over_fraction", pa.float64()),
)
AGREEMENT = pa.schema(
    [
        pa.field("run_id", pa.string(), nullable=False),
        pa.field("layer", pa.int32()),
        pa.field("tokens", pa.int64(), nullable=False),
        pa.field("without_route", pa.int64(), nullable=False),
        pa.field("equal_sets", pa.float64()),
        pa.field("equal_ordered", pa.float64()),
        *(one.with_name(f"{side}_{one.name}") for side in SIDES for one in OF_SIDE),
    ]
)


@dataclass(frozen=True)
class AgreementReport:
    """Agreement of routes by run and layer.

    Args:
        names: The trainer's and the sampler's choices.
        pair: The columns of log-probs.
        levels: By run, whether its steps or its rollouts were read.
        table: One row a layer of a run, and first one without a layer: over all that were
            compared, where a token differs if it does in any of them.
        threshold: |d| beyond which tokens were counted, in nats.
        findings: What is to be said of the columns.
    """

    names: tuple[str, str]
    pair: str
    levels: dict[str, str]
    table: pa.Table
    threshold: float
    findings: tuple[MismatchFinding, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no finding of severity error."""
        return not any(one.severity == "error" for one in self.findings)

    def to_json(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "names": list(self.names),
            "pair": self.pair,
            "levels": self.levels,
            "threshold": self.threshold,
            "rows": self.table.to_pylist(),
            "findings": [vars(one) for one in self.findings],
        }
