"""Validation of a whole lake: format, integrity, safety, completeness, closure, redaction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import pyarrow as pa

from trajreplay.query.files.key_columns import KnownKeys
from trajreplay.query.files.scanning import ahead
from trajreplay.query.manifest.capture_sets import CaptureSet, read_capture_set
from trajreplay.query.manifest.catalog import Catalog, Cohort
from trajreplay.query.manifest.lineage import Lineage, lineages
from trajreplay.query.selecting.closure import source_rollouts
from trajreplay.query.validating.files import check_file, duplicate_samples
from trajreplay.query.validating.findings import ValidationFinding, ValidationReport, finding_of
from trajreplay.query.validating.snapshots import snapshot_findings
from trajreplay.query.validating.tables import route_findings, table_findings
from trajreplay.schema.entry import Entry
from trajreplay.schema.entry_codec import decode_all
from trajreplay.schema.errors import DatasetError, SchemaError, TrajReplayError
from trajreplay.schema.identity import DATA, CaptureKey
from trajreplay.schema.layout import DATA_ROOT, TEMPORARY, attempt_path, entry_path
from trajreplay.schema.store import Store
from trajreplay.schema.tables import ROW_TABLES


def validate(
    store: Store,
    *,
    deep: bool = False,
    progress: Callable[[int, int], None] | None = None,
) -> ValidationReport:
    """Check every file of a lake; nothing is recomputed.

    A few captures are in memory at a time, of a large one a column.

    Args:
        store: The lake.
        deep: Whether also the lists of numbers are decoded, and the digest of each is made anew.
        progress: Called with the captures done and all of them.
    """
    report = ValidationReport()
    catalog = Catalog.open(store, strict=False, snapshots=False)
    for problem in catalog.problems:
        report.raised("manifest", None, problem)
    shown = _lineages(catalog, report)
    cohorts = sorted(catalog.by_cohort, key=lambda cohort: cohort.order)
    events = [key for key in catalog.keys if key.kind == "events"]
    order = [*(key for cohort in cohorts for key in catalog.by_cohort[cohort]), *events]
    looked = ahead(store, partial(_look, catalog, KnownKeys(), deep), order)
    named: set[str] = set()
    done = 0
    for cohort in cohorts:
        keys = catalog.by_cohort[cohort]
        found = [_noted(next(looked), report, named) for _ in keys]
        _check_cohort(catalog, cohort, found, shown.get(cohort.run_id), report)
        done += len(keys)
        if progress is not None:
            progress(done, len(catalog.keys))
    for one in looked:
        _noted(one, report, named)
    report.captures = len(catalog.keys)
    if not catalog.problems:
        report.findings += snapshot_findings(catalog)
        _check_strays(store, report, named)
    return report


@dataclass(frozen=True)
class _Looked:
    """One capture that was looked at: its entry if it can be read, and the ids of its samples."""

    entry: Entry | None
    ids: pa.Table | None
    findings: tuple[ValidationFinding, ...]


def _look(catalog: Catalog, known: KnownKeys, deep: bool, key: CaptureKey) -> _Looked:
    """Check one capture alone."""
    path = entry_path(key)
    found: list[ValidationFinding] = []
    try:
        entry = catalog.entry(key)
        decode_all(entry)
    except DatasetError as error:
        return _Looked(None, None, (finding_of("integrity", path, error),))
    try:
        _ = entry.settings
    except SchemaError as error:
        found.append(ValidationFinding("warning", "settings", path, error.message))
    if (entry.status == "complete") != (key.part == DATA):
        message = f"is {entry.status}, and its part is {key.part}"
        found.append(ValidationFinding("error", "manifest", path, message))
    ids: dict[str, pa.Table] = {}
    for file in entry.files:
        try:
            problems, samples = check_file(catalog.store, entry, file, known, deep=deep)
        except TrajReplayError as error:
            found.append(finding_of("integrity", file.path, error))
            continue
        found += [
            ValidationFinding("error", check, file.path, f"{file.path}: {problem}")
            for check, problem in problems
        ]
        ids.setdefault(file.table, samples)
    found += table_findings(entry, path, ids)
    if deep and not any(one.severity == "error" for one in found):
        found += route_findings(catalog.store, entry)
    rows = ids.get(ROW_TABLES[key.kind].name)
    named = rows is not None and key.kind != "events"
    return _Looked(entry, rows if named else None, tuple(found))


def _noted(one: _Looked, report: ValidationReport, named: set[str]) -> _Looked:
    """Take what was found into the report."""
    report.findings += one.findings
    for file in one.entry.files if one.entry else ():
        if file.path not in named:  # several captures may share it
            named.add(file.path)
            report.files += 1
            report.bytes += file.bytes
    return one


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
    looked: list[_Looked],
    lineage: Lineage | None,
    report: ValidationReport,
) -> None:
    told = tuple(found.message for one in looked if one.entry is None for found in one.findings)
    try:
        captures = read_capture_set(
            catalog, cohort, (lineage.overlaps if lineage else {}).get(cohort, ())
        )
    except DatasetError as error:
        report.raised("completeness", None, error)
        return
    superseded = lineage is not None and not lineage.shows(cohort)
    problems = [one for one in captures.problems if not (told and one.startswith(told))]
    for problem in (*problems, *captures.gaps):
        if superseded:
            report.add("info", "completeness", None, f"superseded {cohort}: {problem}")
        else:
            report.add("error", "completeness", None, f"{cohort}: {problem}")
    owners = [(one.entry, one.ids) for one in looked if one.entry and one.entry.owner]
    for problem in duplicate_samples((entry, ids) for entry, ids in owners if ids is not None):
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


def _check_strays(store: Store, report: ValidationReport, named: set[str]) -> None:
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


def _unfinished(store: Store) -> Iterator[int]:
    return (one.size_bytes for one in store.list(TEMPORARY))
