"""Importers of the dumps of slime and Relax: rollouts as generated, and what training consumed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from trajreplay.capture.importers.places import below_or_damaged, is_plain_file
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
from trajreplay.schema.bundles.record import CaptureRecord
from trajreplay.schema.bundles.torchhead import head_of

_NUMBER = re.compile(r"[0-9]+")
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
    """The dumps at or below a path, and what lies among them and does not look like one."""
    by_rank = []
    found = below_or_damaged(
        path, lambda one: _kind(one) == kind, lambda one: not _kind(one), _family, kin=_kin
    )
    for one in found:
        if content_of(head_of(one)) in (TRAIN_BY_RANK, TRAIN_BY_SAMPLE):
            by_rank.append(one)
        else:
            yield one
    yield from rank_sets(by_rank)


def _family(path: Path) -> str | None:
    """Everything that `--dump-details` writes; elsewhere the name of a file without its numbers."""
    if path.suffix != ".pt":
        return None
    return "" if path.parent.name in FOLDERS else _NUMBER.sub("", path.name)


def _kin(path: Path) -> Path:
    return path.parent.parent if path.parent.name in FOLDERS else path.parent


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
