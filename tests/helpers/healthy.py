"""Healthy trainings, drawn from a seed: nothing that a replay says of them may be an alarm."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from tests.helpers.cohorts import (
    ALL_COLUMNS,
    ALL_STAGES,
    ROLLOUT_COLUMNS,
    ROLLOUT_STAGES,
    STEP_COLUMNS,
    STEP_STAGES,
    Expected,
    Shares,
    capture,
    rank_sums,
)
from tests.helpers.healthy_composed import decide
from tests.helpers.recordings import RECORDINGS
from tests.helpers.trainer import STYLES, Arithmetic, Sample, Trainer
from trajreplay import Lake, ParallelCoordinates

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_LOG_PROBS = ("rollout_log_probs", "old_log_probs", "ref_log_probs", "log_probs", "entropy")


@dataclass
class Draw:
    """Everything random about one training."""

    seed: int

    def __post_init__(self) -> None:
        self.choose = random.Random(self.seed)
        self.numbers = np.random.default_rng(self.seed)
        self.short = np.random.default_rng((1, self.seed))
        self.decided = self.short.random() < 0.25

    def chance(self, probability: float) -> bool:
        """True that often."""
        return self.choose.random() < probability

    def arithmetic(self) -> Arithmetic:
        """Settings that V1 recomputes."""
        choose = self.choose
        return Arithmetic(
            grouped=not self.chance(0.1),
            std=not self.chance(0.3),
            kl=choose.choice(["k1", "k2", "k3", "low_var_kl"]),
            kl_coef=choose.choice([0.0, 0.001, 0.1]),
            eps_clip=choose.choice([0.1, 0.2]),
            eps_clip_high=choose.choice([None, 0.28]),
            entropy_coef=choose.choice([0.0, 0.01]),
            old_source=choose.choice(["old", "old", "rollout"]),
        )

    def samples(self, rollout_id: int, way: Arithmetic, dtype: str) -> list[Sample]:
        """The samples of one rollout, grouped and raw."""
        groups, size = self.choose.randint(1, 3), self.choose.choice([1, 2, 3, 4, 8])
        ragged = way.group_size is None and self.chance(0.3)
        scale, shift = self.choose.choice([1e-6, 0.1, 1.0, 1.0, 1e3]), 0.0
        if dtype != "float16" and self.chance(0.1):
            scale, shift = 1.0, 1e4
        longest = 300 if self.chance(0.03) else self.choose.choice([1, 6, 20])
        even = self.chance(0.2)
        found: list[Sample] = []
        for group in range(groups):
            constant = self.chance(0.2)
            first = self._score(scale, shift)
            for _ in range(self.choose.randint(1, size) if ragged else size):
                raw = first if constant else self._score(scale, shift)
                length = longest if even else self.choose.randint(0, longest)
                mask = [1] * length if even else self._mask(length)
                found.append(self._sample(len(found), f"g-{group}", raw, mask, dtype))
        for one in found:
            one.rollout_id = rollout_id
        if self.chance(0.5):
            self.choose.shuffle(found)
        return found

    def _score(self, scale: float, shift: float) -> float:
        tenths = self.choose.choice([0.0, 1.0, 1.0, 0.3, 0.1, self.choose.random()])
        return tenths * scale + shift

    def _mask(self, length: int) -> list[int]:
        kind = self.choose.choice(["all", "all", "some", "none"])
        if kind == "some":
            return [self.choose.randint(0, 1) for _ in range(length)]
        return [int(kind == "all")] * length

    def _sample(self, number: int, group: str, raw: float, mask: list[int], dtype: str) -> Sample:
        sample, length = Sample(f"s-{number}", group, mask, raw), len(mask)
        columns = self.numbers.normal(-1.0, 0.7, (5, length)).astype(np.float32)
        drift = self.numbers.normal(0.0, self.choose.choice([0.0, 0.01, 0.5]), (4, length))
        values = dict(zip(_LOG_PROBS, np.minimum(columns, -1e-3), strict=True))
        values["old_log_probs"] = values["rollout_log_probs"] + drift[0].astype(np.float32) / 10
        values["ref_log_probs"] = values["old_log_probs"] + drift[1].astype(np.float32)
        values["log_probs"] = values["old_log_probs"] + drift[2].astype(np.float32)
        if self.decided:
            decide(values, [length], self.short)
        values["entropy"] = np.abs(columns[4])
        for name, held in values.items():
            sample.columns[name] = torch.from_numpy(held.astype(np.float32)).to(_DTYPES[dtype])
        return sample

    def clip_edges(self, samples: Sequence[Sample], way: Arithmetic) -> None:
        """Put some tokens exactly on a clip bound, as nearly as float32 can."""
        high = way.eps_clip if way.eps_clip_high is None else way.eps_clip_high
        for one in samples:
            old = one.columns[way.old]
            for token in range(one.length):
                if self.chance(0.2) and old.dtype == torch.float32:
                    bound = self.choose.choice([1.0 - way.eps_clip, 1.0 + high])
                    old[token] = self.choose.choice([0.0, -1.0])
                    one.columns["log_probs"][token] = old[token] + math.log(bound)

    def split(self, samples: Sequence[Sample], ranks: int) -> dict[int, list[Sample]]:
        """Samples over ranks, with micro-batches; a rank may get none."""
        shares: dict[int, list[Sample]] = {rank: [] for rank in range(ranks)}
        for one in samples:
            shares[self.choose.randrange(ranks)].append(one)
        size = self.choose.choice([1, 2, 100])
        for share in shares.values():
            for row, one in enumerate(share):
                one.micro_batch_id = f"mb-{row // size:04d}"
        return shares

    def echoes(self, shares: Shares) -> dict[int, list[Expected]]:
        """Rewards recorded beside the columns, as some trainers do."""
        if self.chance(0.7):
            return {rank: [] for rank in shares}
        scope = {"scope": "sample"}
        return {
            rank: [
                Expected({"raw_rewards": [one.raw_reward for one in own]}, scope, "reward.raw"),
                Expected({"rewards": [one.reward for one in own]}, scope, "reward.post_process"),
            ]
            for rank, own in shares.items()
        }

    def expected(self, trainer: Trainer, shares: Shares) -> dict[int, list[Expected]]:
        """The losses of a step, recorded in one of the ways that a capture can state."""
        return RECORDINGS[self.choose.choice(list(RECORDINGS))](trainer, shares)


def write_training(lake: Lake, seed: int, run_id: str) -> int:
    """Draw one healthy training, write it, and return how many cohorts it has."""
    draw = Draw(seed)
    dtype = draw.choose.choice(["float32", "float32", "float32", "bfloat16", "float16"])
    way = replace(draw.arithmetic(), group_size=None)
    kept = _DTYPES[dtype] if draw.chance(0.5) else torch.float32
    trainer = Trainer(way, draw.choose.choice(STYLES), kept)
    ranks = draw.choose.choice([1, 1, 2, 3])
    if draw.chance(0.4):
        return _write_whole(lake, draw, trainer, dtype, ranks, run_id)
    return _write_split(lake, draw, trainer, dtype, ranks, run_id)


def _prepare(draw: Draw, trainer: Trainer, rollout_id: int, dtype: str) -> list[Sample]:
    samples = draw.samples(rollout_id, trainer.arithmetic, dtype)
    draw.clip_edges(samples, trainer.arithmetic)
    trainer.score(samples)
    trainer.estimate(samples)
    bare = trainer.arithmetic.entropy_coef == 0.0 and draw.chance(0.5)
    for one in samples:
        if trainer.arithmetic.kl_coef == 0.0:
            del one.columns["ref_log_probs"]
        if bare:
            del one.columns["entropy"]
    return samples


def _options(draw: Draw, trainer: Trainer, samples: Sequence[Sample]) -> tuple[Arithmetic, bool]:
    """The settings to record: group sizes where they are equal, in short form or in full."""
    sizes: dict[tuple[int, str | None], int] = {}
    for one in samples:
        key = one.rollout_id, one.group
        sizes[key] = sizes.get(key, 0) + 1
    for one in samples:
        if draw.chance(0.5):
            one.group_size = sizes[one.rollout_id, one.group]
    equal = set(sizes.values())
    size = equal.pop() if len(equal) == 1 else None
    return replace(trainer.arithmetic, group_size=size), draw.chance(0.3)


def _write_whole(
    lake: Lake, draw: Draw, trainer: Trainer, dtype: str, ranks: int, run_id: str
) -> int:
    """All six stages in one step."""
    samples = _prepare(draw, trainer, 0, dtype)
    if draw.chance(0.3):
        samples += _prepare(draw, trainer, 1, dtype)
    if any("entropy" not in one.columns for one in samples):
        for one in samples:
            one.columns.pop("entropy", None)
    way, full = _options(draw, trainer, samples)
    shares = draw.split(samples, ranks)
    losses = draw.expected(trainer, shares) if full else rank_sums(trainer, shares)
    echoes = draw.echoes(shares)
    expected = {rank: [*echoes[rank], *losses.get(rank, [])] for rank in shares}
    parallel = {rank: ParallelCoordinates(rank, ranks) for rank in shares}
    if draw.chance(0.1):
        copy = ranks
        shares[copy], expected[copy] = shares[0], expected[0] if draw.chance(0.5) else []
        parallel |= {
            0: ParallelCoordinates(0, ranks, 0, 2),
            copy: ParallelCoordinates(0, ranks, 1, 2),
        }
    settings = way.full if full else way.short
    capture(
        lake,
        shares,
        way,
        step_id=0,
        stages=ALL_STAGES,
        columns=ALL_COLUMNS,
        expected=expected,
        run_id=run_id,
        parallel=parallel,
        settings=settings,
    )
    return 1


def _write_split(
    lake: Lake, draw: Draw, trainer: Trainer, dtype: str, ranks: int, run_id: str
) -> int:
    """One or two rollouts, and steps that consume samples of either or both."""
    rollouts = [_prepare(draw, trainer, one, dtype) for one in range(draw.choose.choice([1, 2]))]
    samples = [one for rollout in rollouts for one in rollout]
    if any("entropy" not in one.columns for one in samples):
        for one in samples:
            one.columns.pop("entropy", None)
    way, full = _options(draw, trainer, samples)
    settings = way.full if full else way.short
    for rollout_id, rollout in enumerate(rollouts):
        shares = draw.split(rollout, ranks)
        capture(
            lake,
            shares,
            way,
            expected=draw.echoes(shares),
            rollout_id=rollout_id,
            stages=ROLLOUT_STAGES,
            columns=ROLLOUT_COLUMNS,
            run_id=run_id,
            settings=settings,
            cohort_size=len(rollout) if draw.chance(0.5) else None,
        )
    draw.choose.shuffle(samples)
    steps = draw.choose.choice([1, 2, 3])
    for step in range(steps):
        consumed = samples[step::steps]
        if not consumed:
            steps = step
            break
        shares = draw.split(consumed, ranks)
        capture(
            lake,
            shares,
            way,
            rollout_id=len(rollouts) - 1,
            step_id=step,
            stages=STEP_STAGES,
            columns=STEP_COLUMNS,
            expected=draw.expected(trainer, shares) if full else rank_sums(trainer, shares),
            run_id=run_id,
            settings=settings,
            cohort_size=len(consumed) if draw.chance(0.5) else None,
        )
    return len(rollouts) + steps
