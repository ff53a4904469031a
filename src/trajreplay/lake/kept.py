"""Keeping a lake quick to open as it grows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from trajreplay.lake.opened import Opened

if TYPE_CHECKING:
    from trajreplay.query import Catalog
    from trajreplay.schema.identity import CaptureKey
    from trajreplay.schema.snapshot import Root

_TRIES = 16


class Kept(Opened):
    """A lake that is looked after."""

    def snapshot(self, *, progress: Callable[[int, int], None] | None = None) -> Root:
        """Fold the entries that no snapshot holds into one, so that readers open fewer files.

        The entries stay. Writers go on meanwhile: what they commit is in the next snapshot.

        Args:
            progress: Called with the entries taken and all of those to take.

        Returns:
            The newest snapshot: its number and segments; the one that was there if it holds all.

        Raises:
            DatasetError: An entry or the newest snapshot is damaged.
            CaptureError: It cannot be written, or others were published faster.
        """
        from trajreplay.query import Catalog
        from trajreplay.schema import CaptureError
        from trajreplay.writer.snapshot import publish_snapshot

        for _ in range(_TRIES):
            catalog = Catalog.open(self._store)
            missing = [key for key in catalog.keys if catalog.snapshot.find(key) is None]
            if not missing:
                return catalog.snapshot.root
            entries = _verified(catalog, missing, progress)
            root = publish_snapshot(self._store, catalog.snapshot.root, entries)
            if root is not None:
                self.refresh()
                return root
        raise CaptureError(
            f"{self.path}: {_TRIES} other snapshots were published while this one was made",
            hint="One program should make them.",
        )


def _verified(
    catalog: Catalog, keys: list[CaptureKey], progress: Callable[[int, int], None] | None
) -> Iterator[tuple[CaptureKey, bytes]]:
    from trajreplay.query.files.scanning import ahead

    read = ahead(catalog.store, partial(_verified_bytes, catalog), keys)
    for done, pair in enumerate(zip(keys, read, strict=True), 1):
        yield pair
        if progress is not None:
            progress(done, len(keys))


def _verified_bytes(catalog: Catalog, key: CaptureKey) -> bytes:
    from trajreplay.schema.entry_codec import decode_all, load_entry
    from trajreplay.schema.layout import entry_path

    data = catalog.entry_bytes(key)
    decode_all(load_entry(data, entry_path(key)))
    return data
