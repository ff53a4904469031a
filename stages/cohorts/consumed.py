"""What the steps of a lake consumed from each rollout, whether that was captured or not."""

from __future__ import annotations

from collections import OrderedDict

import pyarrow as pa
import pyarrow.compute as pc

from trajreplay.query.files.reading import read_columns
from trajreplay.query.manifest.capture_sets import CaptureSets
from trajreplay.query.manifest.catalog import Cohort, cohort_of
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.tables import STEPS

_COORDINATES = ("source_attempt", "source_rollout_id")
_NAMES = ("sample_id", "trajectory_id")
_KEPT = 64  # rollouts whose samples are kept: steps of one come one after another


class Consumed:
    """The samples that steps consumed, by rollout.

    Args:
        sets: The visible capture sets; None for none.
    """

    def __init__(self, sets: CaptureSets | None) -> None:
        self._sets = sets
        self._kept: OrderedDict[Cohort, pa.Table] = OrderedDict()

    def of(self, rollout: Cohort) -> pa.Table:
        """The samples that visible steps consumed from a rollout, and their trajectories.

        Samples of one step alone are not listed: that one knows them.
        """
        found = self._kept.get(rollout)
        if found is None:
            found = self._kept[rollout] = self._read(rollout)
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return found

    def _read(self, rollout: Cohort) -> pa.Table:
        parts = [pa.schema([(name, STEPS[name].type) for name in _NAMES]).empty_table()]
        if self._sets is not None:
            catalog = self._sets.catalog
            keys = catalog.consumers.get(rollout, ())
            visible = [key for key in keys if cohort_of(key) in self._sets]
            if len({cohort_of(key) for key in visible}) > 1:
                for key in visible:
                    try:
                        entry = catalog.entry(key)
                        names = [*_NAMES, *_COORDINATES]
                        parts.append(
                            _of_rollout(read_columns(catalog.store, entry, STEPS, names), rollout)
                        )
                    except DatasetError:  # what is damaged is refused where it is replayed
                        continue
        if len(parts) == 1:
            return parts[0]
        whole = pa.concat_tables([part.cast(parts[0].schema) for part in parts])
        return whole.group_by(list(_NAMES)).aggregate([])


def _of_rollout(rows: pa.Table, rollout: Cohort) -> pa.Table:
    attempts, rollouts = (rows[name] for name in _COORDINATES)
    same = pc.and_(pc.equal(attempts, rollout.attempt), pc.equal(rollouts, rollout.rollout_id))
    return rows.filter(same).select(list(_NAMES))
