"""The files of one capture against each other: their tables, their samples, their routes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pyarrow as pa

from trajreplay.query.experts import expert_columns, route_problems, routed_rows
from trajreplay.query.validating.findings import ValidationFinding, finding_of
from trajreplay.schema.entry import Entry
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.store import Store
from trajreplay.schema.tables import ROUTES, ROW_TABLES, SAMPLE_TABLES


def table_findings(
    entry: Entry, path: str, ids: Mapping[str, pa.Table]
) -> Iterator[ValidationFinding]:
    """Tables that a capture of its kind has not, or has twice; routes of other samples.

    Args:
        entry: The capture.
        path: Of its entry.
        ids: By table, ids of the samples of each file that could be read.
    """
    allowed = [ROW_TABLES[entry.key.kind].name]
    if entry.key.kind in SAMPLE_TABLES:
        allowed.append(ROUTES.name)
    found = [file.table for file in entry.files]
    if len(set(found)) < len(found) or not set(found) <= set(allowed):
        message = f"names files of {', '.join(found)}, expected at most one each of "
        yield ValidationFinding("error", "manifest", path, message + " and ".join(allowed))
        return
    routed = ids.get(ROUTES.name)
    if routed is None:
        return
    samples = ids.get(allowed[0])
    if samples is None:
        message = "has routes, and no samples that they are of"
    elif not routed["sample_id"].equals(samples["sample_id"]):
        message = "has routes of other samples, or in another order, than it has samples"
    else:
        return
    yield ValidationFinding("error", "content", path, message)


def route_findings(store: Store, entry: Entry) -> Iterator[ValidationFinding]:
    """What no router chooses, in the routes of a capture; all of them are decoded."""
    file = entry.file(ROUTES.name)
    if file is None:
        return
    try:
        problems = route_problems(routed_rows(store, entry, expert_columns(entry)))
    except DatasetError as error:
        yield finding_of("content", file.path, error)
        return
    for one in problems:
        where = f"{entry.key} {one.sample_id}"
        where += f" token {one.token}" if one.token is not None else ""
        yield ValidationFinding(one.severity, one.check, file.path, f"{where}: {one.message}")
