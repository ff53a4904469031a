"""Two ranks of a training that record: `python -m tests.helpers.recording_ranks LAKE RANK PORT`.

A fourth argument names the only rank where capture is on, and a fifth one how late the other comes.
"""

import datetime
import sys
import time
import warnings

import torch
import torch.distributed as dist

from tests.helpers.recorded import enabled, micro_batch, switched
from tests.helpers.scenes import WAY, drawn, halves
from trajreplay import capture

RANKS = 2


def main(lake: str, rank: int, port: int) -> None:
    """Agree, and record one step of half the samples each."""
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS
    )
    recorder = enabled(lake)
    with recorder.step(0, 0):
        micro_batch(recorder, 0, halves(drawn())[rank])
    recorder.close()
    dist.destroy_process_group()


def main_of_some(lake: str, rank: int, port: int, only: int, late_s: float) -> None:
    """Switch capture on on one rank at once and on the other late, or not at all, and train."""
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=RANKS,
        timeout=datetime.timedelta(seconds=12),
    )
    half = dist.new_group([0, 1]) if late_s else None
    if rank != only and late_s:
        time.sleep(late_s)
    if rank == only or late_s:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            recorder = capture.enable(switched(lake, strict=False), settings=WAY.short, group=half)
        assert not recorder.enabled
        assert "of 2 ranks switched capture on within 6 s" in str(told[0].message)
    given = torch.ones(4) * (rank + 1)
    dist.all_reduce(given)
    assert given.tolist() == [3.0] * 4
    dist.destroy_process_group()


if __name__ == "__main__":
    place = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    if sys.argv[4:]:
        main_of_some(*place, int(sys.argv[4]), float(sys.argv[5]))
    else:
        main(*place)
