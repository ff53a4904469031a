"""How many samples the ranks of a cohort hold, and their micro-batches."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa

from trajreplay.schema.columns import has_column
from trajreplay.schema.entry import Entry
from trajreplay.schema.errors import DatasetError
from trajreplay.stages.cohorts.shards import is_dynamic
from trajreplay.stages.cohorts.unique import SAMPLE_KEY


def counted_members(
    held: list[tuple[int, pa.Table]], lead: Entry, by_batch: bool
) -> tuple[dict[int, int], dict[tuple[int, str | None], int]]:
    """How many samples each rank holds, and of each micro-batch, whichever were chosen.

    Args:
        held: Ranks and their rows, of each context-parallel group one.
        lead: The first rank after shards were joined.
        by_batch: Whether their micro-batches were read.

    Raises:
        DatasetError: Samples whose rows say which shard they are, and which are not all here.
    """
    totals: dict[int, int] = {}
    batches: Counter[tuple[int, str | None]] = Counter()
    if is_dynamic([table for _, table in held]):  # all under one name, each sample once
        names = ["sample_id", *(("micro_batch_id",) if by_batch else ())]
        names += [name for name in SAMPLE_KEY[1:] if has_column(held[0][1], name)]
        whole = pa.concat_tables([table.select(names) for _, table in held])
        held = [(lead.key.rank, whole.group_by(names).aggregate([]))]
        _check_size(lead, held[0][1].num_rows)
    for rank, table in held:
        totals[rank] = table.num_rows
        if by_batch:
            batches.update((rank, one) for one in table["micro_batch_id"].to_pylist())
        elif table.num_rows:
            batches[rank, None] = table.num_rows
    return totals, dict(batches)


def _check_size(lead: Entry, count: int) -> None:
    """Hold samples whose shards lie on any ranks against the size of the cohort."""
    if lead.cohort_size not in (None, count):
        raise DatasetError(
            f"{count} samples were captured, expected cohort_size {lead.cohort_size}: capture the "
            "shards of all members"
        )
