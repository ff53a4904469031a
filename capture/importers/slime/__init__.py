"""Importers of the dumps of slime and Relax: rollouts as generated, and what training consumed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from trajreplay.capture.importers.places import below, is_plain_file
from trajreplay.capture.importers.registry import Importer, ImportOptions
from trajreplay.capture.importers.slime.contents import (
    ROLLOUT,
    TRAIN,
    TRAIN_BY_RANK,
    TRAIN_BY_SAMPLE,
    content_of,
    rank_sets,
)
from trajreplay.capture.importers.slime.files import read_by_rank, read_whole
from trajreplay.capture.importers.slime.rollouts import FOLDERS, read_rollout
from trajreplay.capture.importers.slime.training import captures_of
from trajreplay.capture.importers.torch_dumps import load_fields
from trajreplay.schema.bundles.folder import is_folder
from trajreplay.schema.bundles.record import CaptureRecord
from trajreplay.schema.bundles.torchhead import head_of

_OF_RELAX = "decoded_tokens"  # which slime does not add to its samples


def _kind(path: Path) -> str:
    """Which kind of import a file is for; empty for none."""
    if not is_plain_file(path):
        return ""
    head = head_of(path)
    found = content_of(head)
    if not found or head is None:
        return ""
    relax = found == TRAIN_BY_SAMPLE or (found == ROLLOUT and _OF_RELAX in head.names)
    return "relax-dump" if relax else "slime"


def _find(path: Path, kind: str) -> Iterator[Path]:
    by_rank, roots = [], dict[Path, None]()
    for one in below(path, lambda found: _kind(found) == kind):
        if one.parent.name in FOLDERS and is_folder(path):
            roots[one.parent.parent] = None
        if content_of(head_of(one)) in (TRAIN_BY_RANK, TRAIN_BY_SAMPLE):
            by_rank.append(one)
        else:
            yield one
    yield from rank_sets(by_rank)
    for root in roots:
        yield from _broken(root)


def _broken(root: Path) -> Iterator[Path]:
    """Files that lie among dumps and do not look like one: they are refused, and not passed by."""
    for folder in FOLDERS:
        for one in sorted((root / folder).glob("*.pt")):
            if is_plain_file(one) and not _kind(one):
                yield one


def _read(path: Path, options: ImportOptions, kind: str) -> Sequence[CaptureRecord]:
    content = content_of(head_of(path))
    if not content:
        raise load_fields(path, options).error("content", "is something else", "that of a dump")
    if content == ROLLOUT:
        return read_rollout(path, options, "relax" if kind == "relax-dump" else "slime")
    read = read_whole if content == TRAIN else read_by_rank
    return captures_of(read(path, options), options)


SLIME = Importer(
    kind="slime",
    doc="Dumps of slime: rollout_data/*.pt, and train_data/*.pt of all ranks or of each.",
    find=lambda path: _find(path, "slime"),
    read=lambda path, options: _read(path, options, "slime"),
)
RELAX_DUMP = Importer(
    kind="relax-dump",
    doc="Dumps of Relax, --dump-details: rollout_data/*.pt, and train_data/*.pt of each rank.",
    find=lambda path: _find(path, "relax-dump"),
    read=lambda path, options: _read(path, options, "relax-dump"),
)
