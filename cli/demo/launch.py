"""Starting the rank processes of the demo training, following them, and ending them."""

import multiprocessing
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from trajreplay.cli.demo.config import TrainingConfig
from trajreplay.schema import CaptureError, TrajReplayError

if TYPE_CHECKING:
    from multiprocessing.queues import SimpleQueue

    from trajreplay.cli.demo.trainer import RolloutReport

POLL_INTERVAL_S = 0.05


@dataclass(frozen=True)
class Failure:
    """The last words of a rank."""

    rank: int
    message: str
    hint: str = ""

    @classmethod
    def of(cls, rank: int, error: Exception) -> "Failure":
        """Take down what ended a rank."""
        if isinstance(error, TrajReplayError):
            return cls(rank, error.message, error.hint)
        return cls(rank, "".join(traceback.format_exception_only(error)).strip())


def train(config: TrainingConfig, lake_path: Path) -> Iterator["RolloutReport"]:
    """Run the training in processes of its own; yield what rank 0 reports as it goes.

    Whatever ends the iteration, no process is left when it has ended.

    Raises:
        CaptureError: A rank failed.
    """
    context = multiprocessing.get_context("spawn")
    messages: SimpleQueue[RolloutReport | Failure] = context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="trajreplay-demo-") as folder:
        rendezvous = Path(folder) / "rendezvous"
        ranks = [
            context.Process(
                target=_run_rank, args=(rank, config, lake_path, rendezvous, messages), daemon=True
            )
            for rank in range(config.ranks)
        ]
        # A request to end must end the ranks too, as an interrupt does.
        before = signal.signal(signal.SIGTERM, _end)
        try:
            for process in ranks:
                process.start()
            running = True
            while running:
                # Looked at before the messages are read, so that none of a dead rank is lost.
                exit_codes = [process.exitcode for process in ranks]
                running = None in exit_codes
                while not messages.empty():
                    yield _checked(messages.get(), lake_path)
                if any(exit_codes):
                    raise CaptureError(
                        f"the ranks of the demo training ended with exit codes {exit_codes}, "
                        f"expected 0",
                        hint=f"What they recorded is in {lake_path}.",
                    )
                time.sleep(POLL_INTERVAL_S)
        finally:
            for process in ranks:
                if process.pid is not None:
                    process.kill()
                    process.join()
            signal.signal(signal.SIGTERM, before)


def _end(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _checked(message: "RolloutReport | Failure", lake_path: Path) -> "RolloutReport":
    """Pass a report on; raise a failure."""
    if isinstance(message, Failure):
        raise CaptureError(
            f"rank {message.rank} of the demo training failed: {message.message}",
            hint=message.hint or f"What it recorded is in {lake_path}.",
        )
    return message


def _run_rank(
    rank: int,
    config: TrainingConfig,
    lake_path: Path,
    rendezvous: Path,
    messages: "SimpleQueue[RolloutReport | Failure]",
) -> None:
    """Be one rank, from the first line of its process to the last."""
    # An interrupt goes to the whole process group; the parent answers it by ending the ranks.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback_interface())
    try:
        # Imported here, so that the parent does not wait for torch before it starts the ranks.
        import torch
        from torch import distributed

        from trajreplay.cli.demo.record import Recorder
        from trajreplay.cli.demo.trainer import Trainer

        torch.set_num_threads(1)
        distributed.init_process_group(
            "gloo", init_method=rendezvous.as_uri(), rank=rank, world_size=config.ranks
        )
        recorder = Recorder(lake_path, rank, config)
        for report in Trainer(rank, config, recorder).train():
            if rank == 0:
                messages.put(report)
        distributed.destroy_process_group()
    except Exception as error:
        messages.put(Failure.of(rank, error))
        raise SystemExit(1) from error


def _loopback_interface() -> str:
    """Name the interface that never leaves the machine: lo, or lo0 on macOS."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if name in ("lo", "lo0")), names[0])
