"""Validation of a whole lake: format, integrity, safety, completeness, closure, redaction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa

from trajreplay.query.capture_sets import CaptureSet, read_capture_set
from trajreplay.query.catalog import Catalog, Cohort
from trajreplay.query.closure import source_rollouts
from trajreplay.query.lineage import Lineage, lineages
from trajreplay.query.validate_files import check_file, duplicate_samples
from trajreplay.schema.entry import Entry
from trajreplay.schema.entry_codec import decode_all
from trajreplay.schema.errors import DatasetError, SchemaError, TrajReplayError
from trajreplay.schema.identity import DATA, CaptureKey
from trajreplay.schema.layout import DATA_ROOT, TEMPORARY, attempt_path, entry_path
from trajreplay.schema.store import LocalStore

Severity = Literal["error", "warning", "info"]
FINDINGS = pa.schema(
    [
        pa.field("severity", pa.string(), nullable=False),
        pa.field("check", pa.string(), nullable=False),
        pa.field("path", pa.string()),
        pa.field("message", pa.string(), nullable=False),
    ]
)


@dataclass(frozen=True)
class ValidationFinding:
    """One thing worth saying about a lake.

    Args:
        severity: `error` for what a replay would refuse, `warning` for what it ignores, `info`.
        check: integrity, completeness, closure, redaction, or what else was looked at.
        path: The file concerned, relative to the lake.
        message: What was found and what was expected.
    """

    severity: Severity
    check: str
    path: str | None
    message: str


@dataclass
class ValidationReport:
    """What a validation found, and how much it looked at."""

    findings: list[ValidationFinding] = field(default_factory=list)
    captures: int = 0
    files: int = 0
    bytes: int = 0

    @property
    def ok(self) -> bool:
        """Whether there is no finding of severity error."""
        return not any(one.severity == "error" for one in self.findings)

    @property
    def counts(self) -> dict[str, int]:
        """Findings by severity."""
        return dict(Counter(one.severity for one in self.findings))

    def arrow(self) -> pa.Table:
        """The findings as a table."""
        return pa.Table.from_pylist([vars(one) for one in self.findings], schema=FINDINGS)

    def add(self, severity: Severity, check: str, path: str | None, message: str) -> None:
        """Add a finding."""
        self.findings.append(ValidationFinding(severity, check, path, message))

    def raised(self, check: str, path: str | None, error: TrajReplayError) -> None:
        """Add an error for one that was raised."""
        self.add("error", check, error.facts.get("path") or path, error.message)


def validate(
    store: LocalStore, *, progress: Callable[[int, int], None] | None = None
) -> ValidationReport:
    """Check every file of a lake; nothing is recomputed.

    One capture is in memory at a time, of a large one a column.

    Args:
        store: The lake.
        progress: Called with the captures done and all of them.
    """
    report = ValidationReport()
    catalog = Catalog.open(store, strict=False)
    for problem in catalog.problems:
        report.raised("manifest", None, problem)
    shown = _lineages(catalog, report)
    named: set[str] = set()
    done = 0
    for cohort, keys in sorted(catalog.by_cohort.items(), key=lambda item: item[0].order):
        _check_cohort(catalog, cohort, shown.get(cohort.run_id), report, named)
        done += len(keys)
        if progress is not None:
            progress(done, len(catalog.keys))
    for key in (key for key in catalog.keys if key.kind == "events"):
        entry = _entry(catalog, key, report)
        if entry is not None:
            _check_capture(store, entry, report, named)
    report.captures = len(catalog.keys)
    if not catalog.problems:
        _check_strays(store, report, named)
    return report


def _lineages(catalog: Catalog, report: ValidationReport) -> dict[str, Lineage]:
    shown: dict[str, Lineage] = {}
    for run_id, attempts in catalog.runs.items():
        for attempt in attempts:
            try:
                catalog.attempt_record(run_id, attempt)
            except DatasetError as error:
                report.raised("attempt", attempt_path(run_id, attempt), error)
        try:
            shown |= lineages(catalog, run_id)
        except DatasetError as error:
            report.raised("lineage", None, error)
    return shown


def _check_cohort(
    catalog: Catalog,
    cohort: Cohort,
    lineage: Lineage | None,
    report: ValidationReport,
    named: set[str],
) -> None:
    ids: list[tuple[Entry, pa.Table]] = []
    damaged = 0
    for key in catalog.by_cohort[cohort]:
        entry = _entry(catalog, key, report)
        if entry is None:
            damaged += 1
        elif (found := _check_capture(catalog.store, entry, report, named)) is not None:
            ids.append((entry, found))
    try:
        captures = read_capture_set(
            catalog, cohort, (lineage.overlaps if lineage else {}).get(cohort, ())
        )
    except DatasetError as error:
        report.raised("completeness", None, error)
        return
    superseded = lineage is not None and not lineage.shows(cohort)
    for problem in (*captures.problems[damaged:], *captures.gaps):
        if superseded:
            report.add("info", "completeness", None, f"superseded {cohort}: {problem}")
        else:
            report.add("error", "completeness", None, f"{cohort}: {problem}")
    for problem in duplicate_samples((entry, table) for entry, table in ids if entry.owner):
        report.add("error", "identity", None, f"{cohort}: {problem}")
    for difference in captures.copy_differences:
        report.add("error", "copies", None, f"{cohort}: {difference}")
    _check_sources(catalog, captures, report)


def _check_sources(catalog: Catalog, captures: CaptureSet, report: ValidationReport) -> None:
    for source in source_rollouts(captures):
        if source not in catalog.by_cohort:
            report.add(
                "info",
                "closure",
                None,
                f"{captures.cohort} consumed samples of {source}, which is not in the lake: it is "
                "judged from its own columns",
            )


def _entry(catalog: Catalog, key: CaptureKey, report: ValidationReport) -> Entry | None:
    path = entry_path(key)
    try:
        entry = catalog.entry(key)
        decode_all(entry)
    except DatasetError as error:
        report.raised("integrity", path, error)
        return None
    try:
        _ = entry.settings
    except SchemaError as error:
        report.add("warning", "settings", path, error.message)
    if (entry.status == "complete") != (key.part == DATA):
        report.add("error", "manifest", path, f"is {entry.status}, and its part is {key.part}")
    return entry


def _check_capture(
    store: LocalStore, entry: Entry, report: ValidationReport, named: set[str]
) -> pa.Table | None:
    """Check the files of a capture; returns the ids of its samples."""
    ids = None
    for file in entry.files:
        named.add(file.path)
        report.files += 1
        report.bytes += file.bytes
        try:
            problems, found = check_file(store, entry, file)
        except TrajReplayError as error:
            report.raised("integrity", file.path, error)
            continue
        for check, problem in problems:
            report.add("error", check, file.path, f"{file.path}: {problem}")
        if "sample_id" in found.column_names and ids is None:
            ids = found
    return ids


def _check_strays(store: LocalStore, report: ValidationReport, named: set[str]) -> None:
    try:
        for one in store.list(DATA_ROOT):
            if one.path not in named:
                report.add("warning", "stray", one.path, "no manifest entry names it: ignored")
        leftovers = list(_unfinished(store))
    except DatasetError as error:
        report.raised("safety", None, error)
        return
    if leftovers:
        report.add(
            "info",
            "unfinished",
            TEMPORARY,
            f"{len(leftovers)} unfinished files of {sum(leftovers)} bytes; the next writer removes "
            "those older than a day",
        )


def _unfinished(store: LocalStore) -> Iterator[int]:
    return (one.size_bytes for one in store.list(TEMPORARY))
