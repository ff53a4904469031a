"""Importer of the completions that TRL logs: `completions_<step>.parquet`, text and rewards.

Source: GRPOTrainer.log of trl/trainer/grpo_trainer.py, 1.16.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from trajreplay.capture.importers.completions import (
    NAMES,
    after,
    before,
    check_columns,
    family_of,
    is_completions,
    is_damaged,
    is_reward,
    odd,
    read_table,
    repeats,
    step_of,
    values_of,
)
from trajreplay.capture.importers.places import below_or_damaged, run_of
from trajreplay.capture.importers.registry import Importer, ImportOptions
from trajreplay.capture.importers.stating import Statement, stated, trivial
from trajreplay.capture.importers.texts import TEXT_ALONE, grouped_texts
from trajreplay.schema.bundles.folder import noting_reads
from trajreplay.schema.bundles.record import CaptureRecord
from trajreplay.schema.identity import ProducerInfo
from trajreplay.schema.records import SampleRecord
from trajreplay.schema.settings import with_changes

_FOLDER = "completions"  # inside the folder of the training's output
_NO_TOKENS = "no value of a token is recorded"
_NO_WEIGHTS = "the weights of the rewards are not recorded: --state reward.weights=NAME:WEIGHT;..."
_MERGED = (
    "samples of equal prompts may be of several groups, which TRL takes by position: state their "
    "size with --group-by-position"
)
_WEIGHTS = "reward.weights"


def _find(path: Path) -> Iterator[Path]:
    """The files, those that repeat the one before them under the name of the first of these."""
    if is_completions(path.absolute()):
        yield _first(path.absolute())
        return
    last: Path | None = None
    for one in below_or_damaged(path, is_completions, is_damaged, family_of):
        if is_damaged(one):
            yield one
            continue
        if last is None or last.parent != one.parent or not repeats(one, last):
            yield one
        last = one


def _first(path: Path) -> Path:
    """The first of the files beside one that hold its rows, one after the other."""
    first = path
    for one in filter(is_completions, before(path)):
        if not repeats(first, one):
            break
        first = one
    return first


def _read(path: Path, options: ImportOptions) -> Sequence[CaptureRecord]:
    step, table, folder = step_of(path), read_table(path), path.parent
    if not is_completions(path):  # it can be read, and lies among its like as a damaged one
        raise odd(path, "does not begin and end as a Parquet file of TRL's completions")
    check_columns(path, table, step)
    rewards = [name for name in table.column_names if is_reward(table, name)]
    weights = options.changes.get(_WEIGHTS)
    if weights is not None:
        _check_weights(path, weights, rewards)
        rewards = list(weights)
    samples = list(_samples(table, rewards))
    grouped, facts = grouped_texts(
        samples, [str(one.prompt) for one in samples], options, str(path)
    )
    said = _claimed(options, grouped, stated_weights=weights is not None)
    settings = said.settings
    if weights is None:
        settings = with_changes(settings, {_WEIGHTS: dict.fromkeys(rewards, 1.0)})
        facts["unstated"] = _WEIGHTS
    with noting_reads():  # these are looked at, and not taken
        same = list(_followers(path))
    note = f"{path}: {', '.join(same)} hold the same rows, and are not counted again"
    others = [one for one in table.column_names if one not in (*NAMES, *rewards)]
    left = f"{path}: {', '.join(others[:8])} are no rewards: not taken"
    return [
        CaptureRecord(
            run_id=run_of(options, folder.parent if folder.name == _FOLDER else folder),
            rollout_id=step,
            step_id=None,
            settings=settings,
            samples=grouped,
            stages=said.stages,
            producer=ProducerInfo(
                role="driver", framework="trl", extra={**TEXT_ALONE, **facts, **said.facts}
            ),
            notes=(*([note] if same else []), *([left] if others else [])),
        )
    ]


def _followers(path: Path) -> Iterator[str]:
    """The files after one that repeat it."""
    for one in filter(is_completions, after(path)):
        if not repeats(one, path):
            return
        yield one.name


def _check_weights(path: Path, weights: Any, rewards: Sequence[str]) -> None:
    unknown = sorted(set(weights) - set(rewards))
    if unknown:
        raise odd(path, f"has no rewards {', '.join(unknown[:5])}: it has {', '.join(rewards)}")


def _samples(table: pa.Table, rewards: Sequence[str]) -> Iterator[SampleRecord]:
    values = {name: table[name].to_pylist() for name in rewards}
    prompts, completions = (values_of(table[name]) for name in ("prompt", "completion"))
    for row, advantage in enumerate(table["advantage"].to_pylist()):
        yield SampleRecord(
            f"s-{row}",
            0,
            0,
            [],
            reward=advantage,
            reward_components={name: one[row] for name, one in values.items()},
            prompt=prompts[row],
            response=completions[row],
        )


def _claimed(
    options: ImportOptions, samples: Sequence[SampleRecord], *, stated_weights: bool
) -> Statement:
    """What is claimed: rewards, where weights and groups are known for what they are."""
    size = options.changes.get("reward.n_samples_per_prompt")
    sizes = set(Counter(one.group_id for one in samples).values())
    lack = "" if stated_weights else _NO_WEIGHTS
    if options.group_by_position is None and sizes != {size}:
        lack = lack or _MERGED
    if any(one.reward is None for one in samples):
        lack = lack or "the advantages of some samples are missing"
    claims = {
        **trivial(lack),
        "reward.post_process": lack,
        "advantage.estimate": _NO_TOKENS,
        "loss.policy": _NO_TOKENS,
    }
    return stated(options, claims, grouped=True)


TRL = Importer(
    kind="trl",
    doc="Completions that TRL logs with log_completions: completions_<step>.parquet.",
    find=_find,
    read=_read,
)
