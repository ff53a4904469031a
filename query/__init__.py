"""The lake read: captures and lineages, verified columns, SQL, selections, validation, overview."""

from trajreplay.query.attempts import attempts
from trajreplay.query.capture_sets import CaptureSet, CaptureSets, CopyDifference, capture_sets
from trajreplay.query.catalog import Catalog, Cohort
from trajreplay.query.closure import (
    Closure,
    ShortGroup,
    also_consumed_by,
    close,
    short_groups,
    source_rollouts,
)
from trajreplay.query.findings import ValidationFinding, ValidationReport
from trajreplay.query.info import Inspection, info, inspect
from trajreplay.query.lineage import Lineage, lineages
from trajreplay.query.mismatch import (
    STATISTICS,
    MismatchFinding,
    MismatchReport,
    Statistic,
    mismatch,
)
from trajreplay.query.predicates import matching_rows
from trajreplay.query.reading import read_columns
from trajreplay.query.row_masks import SelectedSet, rows_named
from trajreplay.query.samples import SAMPLES
from trajreplay.query.selection import Selected, Selection, select
from trajreplay.query.sql import SqlQuery, SqlResult, run_sql
from trajreplay.query.validate import validate

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
