"""Readers of files that other tools left: each kind of file to captures of a lake."""

from trajreplay.capture.importers.importing import ImportedSource, ImportReport, import_files
from trajreplay.capture.importers.registry import (
    Importer,
    ImportOptions,
    importer_of,
    kinds,
    recognise,
)

__all__ = [
    "ImportOptions",
    "ImportReport",
    "ImportedSource",
    "Importer",
    "import_files",
    "importer_of",
    "kinds",
    "recognise",
]
