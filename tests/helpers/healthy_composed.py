"""Healthy cohorts under settings composed at random, many at once, made by plain loops."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from tests.helpers.cohorts import Expected, record
from tests.helpers.composed import ComposedTrainer
from tests.helpers.composed_corrections import CURRENT
from tests.helpers.queried import catalog_of
from tests.helpers.trainer import Sample
from trajreplay import Lake, ParallelCoordinates, SchemaError, Settings, with_changes
from trajreplay.query import Selection, select
from trajreplay.schema import Output
from trajreplay.schema.settings import PROFILES
from trajreplay.stages import CohortReport
from trajreplay.stages.capability import ability
from trajreplay.stages.capability.losses import INSPECTED
from trajreplay.stages.cohorts.cohort import LoadedCohort
from trajreplay.stages.cohorts.sources import NoSources
from trajreplay.stages.replaying.judge import finish_report, judge_cohorts
from trajreplay.stages.replaying.whole import WholeCohorts
from trajreplay.writer.outputs import make_outputs

Changes = Mapping[str, Any]
# Settings drawn before none that can be recomputed are believed to be there.
_PATIENCE = 500
_TOKENS = (
    *("rollout_log_probs", "old_log_probs", "ref_log_probs", "log_probs", "entropy"),
    *("values", "old_values", "token_rewards", "teacher_log_probs", "sum_pi_squared"),
    "message_faults",
)
COLUMNS = (*_TOKENS, "kl", "advantages", "returns")
_HELD = {*COLUMNS, "micro_batch_id"}
# Values of single settings, beside the named compositions that a draw is made of.
_FIELDS: dict[str, tuple[Any, ...]] = {
    "reward.epsilon": (1e-4, 1e-5, 1e-6, 1e-9),
    "reward.ddof": (0, 1),
    "reward.divide_by_std": (True, False),
    "reward.clip_after": (None, (-5.0, 5.0)),
    "kl.estimator": ("k1", "k2", "k3", "low_var_kl", "abs"),
    "kl.coef": (0.0, 0.001, 0.1),
    "kl.policy_source": ("old", "rollout"),
    "advantage.whiten_ddof": (0, 1),
    "advantage.gamma": (1.0, 0.99),
    "loss.eps_clip": (0.1, 0.2),
    "loss.eps_clip_high": (0.2, 0.28),
    "loss.entropy_coef": (0.0, 0.001, 0.01),
    "loss.old_source": ("old", "rollout"),
    "loss.batch_reduction": ("sum", "mean"),
    "value.clip": (None, 0.2),
}


class Draw:
    """Settings and cohorts of one seed.

    Args:
        seed: Everything follows from it.
        named: Compositions of settings by name, from which a draw takes some.
        stages: Stages that have to be recomputable under what is drawn.
        hard: Whether float32 has a hard time: rewards and values far from 0 for their spread,
            groups that no sum of is exact, long responses.
    """

    def __init__(
        self, seed: int, named: Mapping[str, Changes], stages: Sequence[str], *, hard: bool = False
    ) -> None:
        self.hard = hard
        self.choose = random.Random(seed)
        self.numbers = np.random.default_rng(seed)
        self.short = np.random.default_rng((1, seed))
        self.named = named
        self.stages = stages

    def settings(
        self, profile: str | None = None, needed: Changes = MappingProxyType({})
    ) -> Settings:
        """Settings that can be recomputed: a profile or the plain ones, and some changes.

        Args:
            profile: What they start from.
            needed: Changes that are made in any case.

        Raises:
            LookupError: What is needed contradicts the profile.
        """
        for _ in range(_PATIENCE):
            found = self._settings(profile, needed)
            if found is not None:
                return found
        raise LookupError(f"no settings of {profile} with {needed}")

    def _settings(self, profile: str | None, needed: Changes) -> Settings | None:
        own = {
            "reward.n_samples_per_prompt": self.choose.choice(
                [2, 3, 4] if not self.hard else [2, 4, 7, 8, 16]
            ),
            "loss.entropy_coef": 0.01,
            "kl.coef": 0.1,
            "loss.eps_clip_high": 0.28,
        }
        base = Settings() if profile is None else PROFILES[profile].settings
        if base.value.counts in INSPECTED["value.counts"]:  # and so no draw of a value loss
            base = with_changes(base, {"value.counts": "trained"})
        changes: dict[str, Any] = dict(own)
        for name in self.choose.sample(sorted(self.named), self.choose.choice([0, 0, 1, 1, 2, 3])):
            changes |= self.named[name]
        for name in self.choose.sample(sorted(_FIELDS), self.choose.choice([0, 1, 2, 4])):
            changes[name] = self.choose.choice(_FIELDS[name])
        if changes["reward.n_samples_per_prompt"] is not None:
            changes["reward.n_samples_per_prompt"] = own["reward.n_samples_per_prompt"]
        changes |= needed
        try:
            settings = with_changes(base, changes)
        except SchemaError:
            return None
        if (settings.reward.lone, settings.reward.missing) == ("nan", "exclude"):
            return None  # who is alone because the others are missing has NaN, which is an alarm
        places = ParallelCoordinates()
        for stage in self.stages:
            if ability(stage, settings, places, _HELD).capability != "recompute":
                return None
        return settings

    def shares(
        self, settings: Settings, groups_between: tuple[int, int] = (1, 3)
    ) -> dict[int, list[Sample]]:
        """Whole groups on one to three ranks, with every kind of column."""
        own = settings.reward
        size = own.n_samples_per_prompt or self.choose.choice([2, 3, 4])
        groups, ranks = self.choose.randint(*groups_between), self.choose.choice([1, 1, 2, 3])
        longest = self.choose.choice([2, 5, 5, 8, 40]) if self.choose.random() < 0.9 else 1
        if self.hard:
            longest = self.choose.choice([2, 8, 40, 300])
        level, width = self._level(), self.choose.choice([1.0, 1.0, 1e-3]) if self.hard else 1.0
        steps = own.unit == "step"
        found: dict[int, list[Sample]] = {}
        number = 0
        for group in range(groups):
            rank = group % ranks
            constant = self.choose.random() < 0.15
            first = self.choose.choice([0.0, 1.0, 0.25, self.choose.random()])
            for member in range(size * (2 if steps else 1)):
                raw = first if constant else self.choose.choice([0.0, 1.0, self.choose.random()])
                mask = self._mask(longest, member == 0)
                one = Sample(f"s-{number}", f"g-{group}", mask, level + width * raw)
                one.trajectory_id, one.fragment_index = f"t-{number // 2}", number % 2
                self._place(one)
                found.setdefault(rank, []).append(one)
                number += 1
        samples = [one for rank in sorted(found) for one in found[rank]]
        self.fill(samples, settings)
        for own_samples in found.values():
            batch = self.choose.choice([1, 2, 100])
            for row, one in enumerate(own_samples):
                one.micro_batch_id = f"mb-{row // batch:04d}"
        return {rank: found[rank] for rank in sorted(found)}

    def _level(self) -> float:
        """Where rewards and values lie."""
        return self.choose.choice([0.0, 0.3, -5.0, 100.0]) if self.hard else 0.0

    def _place(self, one: Sample) -> None:
        """Which agent it is of, how it ended, and what the trainer kept for it."""
        one.agent_id = self.choose.choice(["proposer", "solver"])
        one.episode_id = f"e-{self.choose.randint(0, 1)}"
        one.consumer_batch_id = self.choose.choice(["0", "1"])
        one.first_message_length = self.choose.randint(0, one.length)
        one.turns, one.truncated = self.choose.randint(0, 4), self.choose.random() < 0.5
        one.kept_baseline, one.last_value = self.choose.random(), self.choose.random() - 0.5
        cut = self.choose.randint(0, one.length)
        versions = [self.choose.randint(0, CURRENT) for _ in range(2)]
        one.weight_versions = [(0, cut, versions[0]), (cut, one.length, versions[1])]

    def _mask(self, longest: int, first: bool) -> list[int]:
        length = self.choose.randint(2 if first else 0, max(longest, 2))
        kind = self.choose.choice(["all", "all", "some", "none"])
        if kind == "all" or first:
            return [1] * length
        return [int(kind == "some" and self.choose.random() < 0.7) for _ in range(length)]

    def fill(self, samples: Sequence[Sample], settings: Settings) -> None:
        """Draw every token column of samples that have their lengths."""
        count = sum(one.length for one in samples)
        normal = self.numbers.normal
        base = np.minimum(-np.abs(normal(0.0, 1.0, count)), -0.02)
        drift = self.choose.choice([0.0, 0.01, 0.1, 0.4])
        values = {
            "rollout_log_probs": base + normal(0.0, 0.02, count),
            "old_log_probs": base,
            "ref_log_probs": base + normal(0.0, 0.2, count),
            "log_probs": base + normal(0.0, drift, count),
            "teacher_log_probs": base + normal(0.0, 0.3, count),
        }
        values = {name: np.minimum(one, -0.01) for name, one in values.items()}
        # Of tokens so far apart a rejection may leave a group without any, whose mean is a NaN.
        rejects = bool(settings.loss.rejection) or settings.loss.veto is not None
        if self.short.random() < 0.25 and not rejects:
            decide(values, [one.length for one in samples], self.short)
        if settings.reward.baseline_counts == "kept":
            # A group all of whose tokens are rejected has a NaN for a baseline.
            sizes = np.array([one.length for one in samples])
            first = (np.cumsum(sizes) - sizes)[sizes > 0]
            values["rollout_log_probs"][first] = values["old_log_probs"][first]
        values |= {
            "entropy": np.abs(normal(0.5, 0.5, count)),
            "values": normal(0.0, 0.6, count),
            "old_values": normal(0.0, 0.5, count) + self._level(),
            "token_rewards": normal(0.0, 0.5, count) + self._level() / 4.0,
            "sum_pi_squared": self.numbers.uniform(0.0, 1.0, count),
        }
        lengths = [one.length for one in samples]
        for name, one in values.items():
            parts = torch.split(torch.from_numpy(one.astype(np.float32)), lengths)
            for sample, part in zip(samples, parts, strict=True):
                sample.columns[name] = part
        faults = torch.from_numpy(self.numbers.integers(0, 3, count).astype(np.uint8))
        for sample, part in zip(samples, torch.split(faults, lengths), strict=True):
            sample.columns["message_faults"] = part
            sample.greedy_reward = self.choose.choice([0.0, 0.25, 1.0])
        if settings.reward.weights:
            self._take_apart(samples, missing=settings.reward.missing == "exclude")

    def _take_apart(self, samples: Sequence[Sample], *, missing: bool) -> None:
        """Components of every reward; some of them missing where the settings have a rule."""
        for one in samples:
            one.components = {
                "answer": one.raw_reward,
                "format": self.choose.choice([0.0, 0.5, 1.0]),
            }
            if missing and self.choose.random() < 0.1:
                one.components = {"answer": one.components["answer"]}


def decide(
    values: dict[str, np.ndarray], lengths: Sequence[int], numbers: np.random.Generator
) -> None:
    """Make log-probs those of short answers: a token or two decide, and the rest is near certain.

    The sampler is behind the trainer at the tokens that decide.
    """
    first = np.concatenate([np.arange(length) for length in (0, *lengths)])
    certain = first >= numbers.integers(1, 4)
    drift = numbers.normal(0.0, 0.6, len(first))
    for name, one in values.items():
        moved = one + drift if name == "rollout_log_probs" else one
        values[name] = np.where(certain, 1e-4 * one, np.minimum(moved, -0.01)).astype(one.dtype)


def trained(settings: Settings, shares: dict[int, list[Sample]]) -> dict[int, list[Expected]]:
    """Scores, estimates and losses of a cohort, and what its ranks record."""
    trainer = ComposedTrainer(settings, shares)
    trainer.score()
    trainer.estimate()
    policy, value = trainer.policy_scalars(), trainer.value_scalars()
    return {rank: [*policy[rank], *value[rank]] for rank in shares}


Drawn = tuple[dict[int, list[Sample]], Mapping[int, Sequence[Expected]]]


def judged(
    folder: Path, settings: Settings, drawn: Sequence[Drawn], stages: Sequence[str]
) -> list[CohortReport]:
    """What a replay says of cohorts of one settings, each by itself."""
    cohorts = loaded(folder, settings, drawn, stages)
    judge_cohorts(cohorts, NoSources())
    for cohort in cohorts:
        finish_report(cohort.report)
    return [cohort.report for cohort in cohorts]


def loaded(
    folder: Path, settings: Settings, drawn: Sequence[Drawn], stages: Sequence[str]
) -> list[LoadedCohort]:
    """Cohorts of one settings in memory, as if each had been loaded by itself.

    They are written as one capture a rank and read back whole; then a cohort has its own rows,
    scalars and report, and is packed with the others as in any replay.
    """
    ranks = sorted({rank for shares, _ in drawn for rank in shares})
    rows: dict[int, list[Sample]] = {rank: [] for rank in ranks}
    for number, (shares, _) in enumerate(drawn):
        for rank, own in shares.items():
            for one in own:
                one.sample_id = f"{number}-{one.sample_id}"
                one.trajectory_id = f"{number}-{one.trajectory_id}"
                one.group = f"{number}-{one.group}"
            rows[rank] += own
    lake = Lake.create(folder)
    _write(lake, rows, settings, stages)
    catalog = catalog_of(lake)
    whole = WholeCohorts(catalog, select(catalog, Selection()))
    ((place, _),) = whole.turns()
    whole_cohort = whole.load(place)
    assert isinstance(whole_cohort, LoadedCohort), whole_cohort
    return list(_parts(whole_cohort, ranks, drawn))


def _write(
    lake: Lake, rows: dict[int, list[Sample]], settings: Settings, stages: Sequence[str]
) -> None:
    for rank, samples in rows.items():
        with lake.capture(
            run_id="r",
            rollout_id=0,
            step_id=0,
            rank=rank,
            expected_ranks=list(rows),
            settings=settings,
            stages=stages,
            parallel=ParallelCoordinates(rank, len(rows)),
        ) as builder:
            builder.samples([record(one) for one in samples], reward_dtype="float32")
            for name in COLUMNS:
                now = name == "log_probs"
                builder.tensor(
                    name,
                    torch.cat([one.columns[name] for one in samples]),
                    source="trainer" if now else None,
                    weight_version=CURRENT if now else None,
                )


def _parts(
    loaded: LoadedCohort, ranks: Sequence[int], drawn: Sequence[Drawn]
) -> Iterator[LoadedCohort]:
    """The cohorts that were written together, each as if it had been loaded by itself."""
    table, report = loaded.table.combine_chunks(), loaded.report
    entries = {one.key.rank: one for one in loaded.owners}
    starts, start = {}, 0
    for rank in ranks:
        starts[rank] = start
        start += loaded.rows[rank]
    for shares, expected in drawn:
        pieces = []
        for rank, own in shares.items():
            pieces.append(table.slice(starts[rank], len(own)))
            starts[rank] += len(own)
        yield replace(
            loaded,
            report=CohortReport(
                report.run_id, report.attempt, report.rollout_id, report.step_id, [*shares]
            ),
            owners=[
                replace(entries[rank], outputs=tuple(_outputs(expected.get(rank, ()))))
                for rank in shares
            ],
            table=pa.concat_tables(pieces),
            rows={rank: len(own) for rank, own in shares.items()},
            micro_batches=dict(
                Counter((rank, one.micro_batch_id) for rank, own in shares.items() for one in own)
            ),
            chained={},
        )


def _outputs(expected: Sequence[Expected]) -> Iterator[Output]:
    unstated = dict.fromkeys(("numerator", "denominator", "micro_batch_id"))
    for one in expected:
        yield from make_outputs(one.stage, one.values, **unstated, scale=1.0, **one.meaning)
