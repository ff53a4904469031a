"""Two ranks of a training that record: `python -m tests.helpers.recording_ranks LAKE RANK PORT`."""

import sys

import torch.distributed as dist

from tests.helpers.recorded import enabled, micro_batch
from tests.helpers.scenes import drawn, halves

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


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
