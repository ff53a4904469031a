"""A policy that really learns, in plain torch, with the calls of the recorder in its loop.

As a program, one rank whose lake fails: `python -m tests.helpers.recorded_training LAKE FAULT`,
with `RANK RANKS` behind them one of several; it prints the parameters at the end.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from trajreplay import SampleRecord, Settings, capture
from trajreplay.capture import Recorder, Switches
from trajreplay.schema import LossSettings, RewardSettings, StageContract

FILE_BYTES = 6000  # too little for the entry of a capture, enough for that of a dropped one
STEPS, PROMPTS, GROUP, LENGTH, VOCABULARY = 6, 2, 4, 8, 16
SETTINGS = Settings(
    reward=RewardSettings(n_samples_per_prompt=GROUP),
    loss=LossSettings(batch_reduction="mean", use_kl_loss=False, tis=False, opsm=False, opd=False),
)
STAGES = (
    "sample",
    "reward.raw",
    "reward.post_process",
    "advantage.estimate",
    StageContract("loss.policy", scalars=["loss"]),
)


def learn(
    recorder: Recorder, between: Callable[[int], None] = lambda step: None, *, rank: int = 0
) -> str:
    """Take some steps, each of two micro-batches; the parameters at the end, bit by bit.

    Args:
        recorder: Is told of every step.
        between: Called after each step.
        rank: Whose prompts these are said to be.
    """
    torch.manual_seed(1)
    actor = torch.nn.Embedding(VOCABULARY, VOCABULARY)
    optimizer = torch.optim.SGD(actor.parameters(), lr=0.5)
    for step in range(STEPS):
        inputs = torch.randint(0, VOCABULARY, (PROMPTS, GROUP, LENGTH))
        tokens = torch.randint(0, VOCABULARY, inputs.shape)
        raw = (tokens % 2).float().mean(-1)
        reward = (raw - raw.mean(1, keepdim=True)) / (raw.std(1, keepdim=True) + 1e-6)
        with torch.no_grad():
            old = log_probs(actor, inputs, tokens) + 0.1 * torch.randn(inputs.shape)
        optimizer.zero_grad()
        with recorder.step(step, 0):
            for prompt in range(PROMPTS):
                new = log_probs(actor, inputs[prompt], tokens[prompt])
                ratio, advantages = (
                    (new - old[prompt]).exp(),
                    reward[prompt, :, None].expand(GROUP, LENGTH),
                )
                worst = torch.maximum(-ratio * advantages, -ratio.clamp(0.8, 1.2) * advantages)
                loss = worst.mean() / PROMPTS
                torch.autograd.backward(loss)
                recorder.record_policy_loss(
                    prompt,
                    samples(prompt, raw, reward, rank),
                    scalars={"loss": loss},
                    scale=1 / PROMPTS,
                    log_probs=new,
                    old_log_probs=old[prompt],
                    advantages=advantages,
                )
                advantages.mul(0.0)
                new.detach().zero_()  # what is in place later must not be what is recorded
        optimizer.step()
        between(step)
    return actor.weight.detach().numpy().tobytes().hex()


def log_probs(actor: torch.nn.Module, inputs: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """The log-probability of each token after the one before it."""
    every = torch.log_softmax(actor(inputs), -1)
    return every.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


def samples(prompt: int, raw: torch.Tensor, reward: torch.Tensor, rank: int) -> list[SampleRecord]:
    """The samples of one prompt."""
    number = rank * PROMPTS + prompt
    return [
        SampleRecord(
            f"s-{number}-{row}",
            LENGTH,
            2 * LENGTH,
            [1] * LENGTH,
            group_index=number,
            raw_reward=float(raw[prompt, row]),
            reward=float(reward[prompt, row]),
        )
        for row in range(GROUP)
    ]


def recording(lake: str, *, rank: int = 0, ranks: int = 1, **changes: object) -> Recorder:
    """The recorder of this training, as in production."""
    switches = Switches(**{"lake": lake, "run_id": "r", "close_s": 20.0, **changes})  # type: ignore[arg-type]
    among: dict[str, Any] = {}
    if ranks > 1:
        among = {"rank": rank, "expected_ranks": range(ranks), "attempt": 0}
    return capture.enable(switches, settings=SETTINGS, step_stages=STAGES, **among)


def kill(step: int) -> None:
    """End the process as the kernel does when memory is short."""
    if step == STEPS // 2:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_once_spooled(step: int) -> None:
    """The same once all steps before it are in the spool."""
    if step == STEPS // 2:
        capture.recorder().flush()
    kill(step)


def crash(step: int) -> None:
    """Fail as a bug of the training does."""
    if step == STEPS // 2:
        raise ZeroDivisionError


BETWEEN: dict[str, Callable[[int], None]] = {
    "kill": kill,
    "kill-spooling": kill_once_spooled,
    "crash": crash,
}


def make_read_only(lake: str) -> None:
    """Let nobody write there any more."""
    for folder, _, _ in os.walk(lake):
        Path(folder).chmod(0o555)


def main(lake: str, fault: str, rank: str = "0", ranks: str = "1") -> None:
    """Train with a lake that fails in some way, or until killed, or as a flight recorder."""
    warnings.simplefilter("ignore")
    hangs = fault == "hang"
    recorder = recording(
        lake,
        keep_last=2 if fault == "crash" else 0,
        close_s=0.0 if hangs else 20.0,
        spool=f"{lake}-spool" if fault == "kill-spooling" else "",
        rank=int(rank),
        ranks=int(ranks),
    )
    if fault == "read-only":
        make_read_only(lake)
    if hangs:  # as a mount does whose server is gone
        os.fsync = lambda fd: time.sleep(120.0)
    if fault == "disk-full":
        resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    found = learn(recorder, BETWEEN.get(fault, lambda step: None), rank=int(rank))
    sys.stdout.write(found)
    if hangs:
        sys.exit(5)


if __name__ == "__main__":
    main(*sys.argv[1:])
