"""Readers of files that other tools left: each kind of file to captures of a lake."""

from trajreplay.capture.importers.importing import import_files
from trajreplay.capture.importers.json_lines import (
    bits,
    first_names,
    float32s,
    objects,
    token_ids,
)
from trajreplay.capture.importers.named import NamedPath, named
from trajreplay.capture.importers.places import below, run_of
from trajreplay.capture.importers.registry import (
    Importer,
    ImportOptions,
    importer_of,
    kinds,
    recognise,
)
from trajreplay.capture.importers.report import ImportedSource, ImportReport
from trajreplay.capture.importers.stating import Statement, groups_by_position, stated
from trajreplay.schema.bundles.record import CaptureRecord, Scalars

__all__ = [
    "CaptureRecord",
    "ImportOptions",
    "ImportReport",
    "ImportedSource",
    "Importer",
    "NamedPath",
    "Scalars",
    "Statement",
    "below",
    "bits",
    "first_names",
    "float32s",
    "groups_by_position",
    "import_files",
    "importer_of",
    "kinds",
    "named",
    "objects",
    "recognise",
    "run_of",
    "stated",
    "token_ids",
]
