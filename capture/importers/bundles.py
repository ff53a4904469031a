"""Importers of replay bundles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trajreplay.capture.importers.registry import Importer, ImportOptions
from trajreplay.capture.importers.stating import refuse_statements
from trajreplay.schema.bundles.record import CaptureRecord
from trajreplay.schema.bundles.relax import bundle_folders, read_bundle
from trajreplay.schema.errors import CaptureError


def _read(path: Path, options: ImportOptions) -> Sequence[CaptureRecord]:
    refuse_statements(options, "a bundle records its groups and its settings")
    if options.redaction:
        raise CaptureError(
            "--redact keeps text of a file, and a bundle holds none", hint="Leave it out."
        )
    return read_bundle(path, run_id=options.run, ids=options.ids)


RELAX_BUNDLE = Importer(
    kind="relax-bundle",
    doc="Replay bundles of Relax, formats 1.x and 2.x, of one rank or many.",
    find=bundle_folders,
    read=_read,
)
