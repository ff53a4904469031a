"""Ranks find out whether all of a group are there, before any waits in a collective of it."""

from __future__ import annotations

import hashlib
from collections import Counter
from datetime import timedelta
from typing import Any

from trajreplay.schema.errors import CaptureError

_LONGEST = timedelta(seconds=120)
_GO, _OFF = b"go", b"off"
_met: Counter[str] = Counter()  # how often this process met those of each group


def meet(ranks_of: Any, group: Any) -> None:
    """Wait a short time until every rank of a group is here.

    A rank where capture is off never comes, and a collective would wait for it until the group's
    own timeout ends the training. What the first rank decides that has all, or that waited long
    enough, holds for every rank, and for one that comes later.

    Args:
        ranks_of: torch.distributed, initialised.
        group: The process group; all processes if None.

    Raises:
        CaptureError: Some did not come.
    """
    store = _store_of(ranks_of)
    if store is None:
        return
    size = ranks_of.get_world_size(group)
    ranks = range(size) if group is None else ranks_of.get_process_group_ranks(group)
    name = hashlib.blake2b(repr(list(ranks)).encode(), digest_size=8).hexdigest()
    _met[name] += 1
    place = f"trajreplay/{name}/{_met[name]}"
    waits = min(_LONGEST, store.timeout / 2)  # the others may wait in a collective of their own
    if store.add(f"{place}/here", 1) >= size:
        _decide(store, place, _GO)
    else:
        try:
            store.wait([f"{place}/decided"], waits)
        except RuntimeError:  # torch's own kinds of it differ between versions
            _decide(store, place, _OFF)
    if store.get(f"{place}/decided") != _GO:
        there = store.add(f"{place}/here", 0)
        raise CaptureError(
            f"{there} of {size} ranks switched capture on within {waits.total_seconds():.0f} s",
            hint="Set the variables of capture on every rank, or on none.",
        )


def _decide(store: Any, place: str, what: bytes) -> None:
    """Say what holds for all, unless another rank did."""
    if store.add(f"{place}/claimed", 1) == 1:
        store.set(f"{place}/decided", what)


def _store_of(ranks_of: Any) -> Any:
    """Where the processes met at their start; None where this torch does not show it."""
    find = getattr(ranks_of.distributed_c10d, "_get_default_store", None)
    return None if find is None else find()
