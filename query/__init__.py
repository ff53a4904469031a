"""The lake read: captures and lineages, verified columns, SQL, selections, validation, overview."""

from trajreplay.query.files.reading import read_columns
from trajreplay.query.manifest.attempts import attempts
from trajreplay.query.manifest.capture_sets import (
    CaptureSet,
    CaptureSets,
    CopyDifference,
    capture_sets,
)
from trajreplay.query.manifest.catalog import Catalog, Cohort
from trajreplay.query.manifest.info import Inspection, info, inspect
from trajreplay.query.manifest.lineage import Lineage, lineages
from trajreplay.query.mismatch import (
    STATISTICS,
    MismatchFinding,
    MismatchReport,
    Statistic,
    mismatch,
)
from trajreplay.query.selecting.closure import (
    Closure,
    ShortGroup,
    also_consumed_by,
    close,
    short_groups,
    source_rollouts,
)
from trajreplay.query.selecting.predicates import matching_rows
from trajreplay.query.selecting.row_masks import SelectedSet, rows_named
from trajreplay.query.selecting.selection import Selected, Selection, select
from trajreplay.query.tables.samples import SAMPLES
from trajreplay.query.tables.sql import SqlQuery, SqlResult, run_sql
from trajreplay.query.validating.findings import ValidationFinding, ValidationReport
from trajreplay.query.validating.lake import validate

__all__ = [
    "SAMPLES",
    "STATISTICS",
    "CaptureSet",
    "CaptureSets",
    "Catalog",
    "Closure",
    "Cohort",
    "CopyDifference",
    "Inspection",
    "Lineage",
    "MismatchFinding",
    "MismatchReport",
    "Selected",
    "SelectedSet",
    "Selection",
    "ShortGroup",
    "SqlQuery",
    "SqlResult",
    "Statistic",
    "ValidationFinding",
    "ValidationReport",
    "also_consumed_by",
    "attempts",
    "capture_sets",
    "close",
    "info",
    "inspect",
    "lineages",
    "matching_rows",
    "mismatch",
    "read_columns",
    "rows_named",
    "run_sql",
    "select",
    "short_groups",
    "source_rollouts",
    "validate",
]
