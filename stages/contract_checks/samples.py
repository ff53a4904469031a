"""Checks of samples, groups and ranks: duplicates, mixed prompts, constant groups, rewards."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import numpy as np

from trajreplay.schema.columns import has_column
from trajreplay.stages.cohorts.packed import list_lengths, packed_values
from trajreplay.stages.contract_checks.columns import Columns, Floats, Found, Together
from trajreplay.stages.report import Finding

# Tokens that two samples, or two ranks, must share before that is no chance.
ENOUGH = 8
DOUBLED = 32
# Two samples are one response by chance, or by a policy that is sure of it, where as many as these
# are expected: as its log-probs say.
RARE = 1e-3
_WITNESSES = ("rollout_log_probs", "old_log_probs", "log_probs")
# A reward below this is as good as 0.
NOISE = 1e-5


def check_samples(given: Together) -> Iterator[Found]:
    """Everything about samples, groups and ranks."""
    names = given.packed.table.column_names
    yield from _duplicates(given)
    if "reward.post_process" not in given.stages:  # which says so itself, and what should be
        yield from given.each(_constant_groups)
        yield from given.each(_normalised_as_one)
    if "tokens" in names:
        yield from given.each(_mixed_prompts)


def _duplicates(given: Together) -> Iterator[Found]:
    """Samples with the same log-probs bit by bit, and ranks that hold nothing else."""
    name = next((one for one in _WITNESSES if given.has(one)), None)
    if name is None:
        return
    for index in range(len(given.spans)):
        if len(given.block.cohorts[index].owners) > 1:
            yield from ((index, one) for one in _short_copies(given.of(index), name))
    rows = (given.lengths >= ENOUGH).nonzero()[0]
    first, second = (
        given.tokens(name)[places].astype(np.float32).view(np.uint32).astype(np.uint64)
        for places in (given.offsets[rows], given.offsets[rows + 1] - 1)
    )
    ends = first << np.uint64(32) | second
    if len(np.unique(ends)) == len(ends):
        return
    for index, mine in given.by_cohort(rows, samples=True):
        if len(np.unique(ends[np.searchsorted(rows, mine)])) < len(mine):
            for finding in _duplicated(given.of(index), name):
                yield index, finding


def _duplicated(given: Columns, name: str) -> Iterator[Finding]:
    """Samples of one cohort that are there twice."""
    values = given.tokens(name)
    bounds = given.offsets.tolist()
    seen: dict[bytes, int] = {}
    first_of = np.full(len(given.lengths), -1, np.int64)
    for row in _alike(given, values):
        found = seen.setdefault(values[bounds[row] : bounds[row + 1]].tobytes(), row)
        if found != row:
            first_of[row] = found
    likely = _likely(given, values)
    doubled = _doubled_rank(given, first_of, likely)
    if doubled is not None:
        yield _copy(given, name, *doubled)
        return
    rare = likely + math.log(max(len(likely), 1)) < math.log(RARE)
    if name != _WITNESSES[0]:
        # Another policy may find unlikely what its sampler was sure of: then it takes many tokens.
        rare &= given.lengths >= DOUBLED
    twice = ((first_of >= 0) & rare).nonzero()[0]
    if not len(twice):
        return
    row, source = int(twice[0]), int(first_of[twice[0]])
    message = (
        f"{len(twice)} samples have the {name} of another sample bit by bit, here of "
        f"{given.table['sample_id'][source].as_py()}"
    )
    yield given.finding("sample.duplicated", "warning", message, sample=row)


def _copy(given: Columns, name: str, rank: int, other: int) -> Finding:
    message = (
        f"rank {rank} holds the samples of rank {other} under other ids, {name} equal bit by "
        "bit: a copy that counts twice; state its tensor rank, or shard the data"
    )
    sample = int((given.ranks == rank).argmax())
    return given.finding("rank.doubled", "error", message, sample=sample, token=0)


def _short_copies(given: Columns, name: str) -> Iterator[Finding]:
    """Ranks of samples too short to be told one by one, which are those of another in a row."""
    values, lengths = given.tokens(name), given.lengths
    seen: dict[bytes, int] = {}
    for rank in np.unique(given.ranks[lengths > 0]).tolist():
        mine = given.ranks == rank
        places = mine.repeat(lengths)
        short = lengths[mine].max() < ENOUGH and int(lengths[mine].sum()) >= DOUBLED
        if not short or np.ptp(own := values[places]) == 0:
            continue
        other = seen.setdefault(lengths[mine].tobytes() + own.tobytes(), rank)
        if other == rank or not _likely(given, values)[mine].sum() < math.log(RARE):
            continue
        groups = given.groups if given.has("group_id") else np.arange(len(lengths))
        if not (groups[mine] == groups[given.ranks == other]).any():
            yield _copy(given, name, rank, other)
            return


def _alike(given: Columns, values: Floats) -> list[int]:
    """Samples long enough, not all of one value, that share length and ends with another."""
    rows = (given.lengths >= ENOUGH).nonzero()[0]
    start, stop = given.offsets[rows], given.offsets[rows + 1]
    first, second, last = values[start], values[start + 1], values[stop - 1]
    varied = ~((first == last) & (last == second))
    bits = f"u{values.itemsize}"
    ends = (one[varied].view(bits).tolist() for one in (first, second, last))
    rows = rows[varied]
    keys = list(zip(given.lengths[rows].tolist(), *ends, strict=True))
    counts = Counter(keys)
    return [row for row, key in zip(rows.tolist(), keys, strict=True) if counts[key] > 1]


def _likely(given: Columns, values: Floats) -> np.ndarray:
    """(S,) The log of the probability of each response, by its log-probs."""
    owner = np.arange(len(given.lengths)).repeat(given.lengths)
    known = np.nan_to_num(values.astype(np.float64), nan=0.0, posinf=0.0)
    return np.bincount(owner, known, len(given.lengths))


def _doubled_rank(
    given: Columns, first_of: np.ndarray, likely: np.ndarray
) -> tuple[int, int] | None:
    """A rank all of whose samples are those of another, each of another one and in no group of it.

    Samples of one prompt may be equal where the policy is sure, and lie on several ranks: together
    they must be unlikely.
    """
    groups = given.groups if given.has("group_id") else np.arange(len(first_of))
    for rank in np.unique(given.ranks).tolist():
        mine = given.ranks == rank
        origins = first_of[mine]
        if int(given.lengths[mine].sum()) < DOUBLED or len(origins) < 2 or (origins < 0).any():
            continue
        others = np.unique(given.ranks[origins])
        alone = len(np.unique(origins)) == len(origins)
        shared = (groups[mine] == groups[origins]).any()
        unlikely = likely[mine].sum() < math.log(RARE)
        if alone and unlikely and not shared and len(others) == 1 and int(others[0]) != rank:
            return rank, int(others[0])
    return None


def _constant_groups(given: Columns) -> Iterator[Finding]:
    """Groups whose raw rewards are all equal, and whose rewards are not 0."""
    reward = given.settings.reward
    centred = reward.baseline in ("mean", "leave-one-out") and reward.grouping == "group"
    # A KL of its own, or the spread of the batch, tells samples of equal raw rewards apart.
    apart = bool(reward.weights) or reward.less_kl or reward.rescale != "none"
    if not centred or apart or not given.has("group_id", "raw_reward", "reward"):
        return
    raw, used, groups = given.scalars("raw_reward"), given.scalars("reward"), given.groups
    if not np.isfinite(raw).all():
        return  # stage reward.raw says so
    size = int(groups.max()) + 1 if len(groups) else 0
    low, high = np.full(size, np.inf), np.full(size, -np.inf)
    np.minimum.at(low, groups, raw)
    np.maximum.at(high, groups, raw)
    whole = np.bincount(groups, minlength=size)[groups] >= np.maximum(_group_sizes(given), 2)
    odd = ((low == high)[groups] & whole & (np.abs(used) > NOISE)).nonzero()[0]
    if len(odd):
        row = int(odd[0])
        count = len(np.unique(groups[odd]))
        message = (
            f"{count} {'groups have' if count > 1 else 'group has'} equal raw rewards and rewards "
            f"that are not 0, here {raw[row]:.6g} and {used[row]:.6g}: a rounding error over "
            "epsilon, or a reward that was shaped after the filter"
        )
        yield given.finding("group.constant", "warning", message, sample=row)


def _normalised_as_one(given: Columns) -> Iterator[Finding]:
    """Rewards that add up to 0 over all samples, and in no group."""
    reward = given.settings.reward
    centred = reward.baseline in ("mean", "leave-one-out") and reward.grouping == "group"
    if not centred or reward.clip_after is not None or not given.has("group_id", "reward"):
        return
    used, groups = given.scalars("reward"), given.groups
    size = int(groups.max()) + 1 if len(groups) else 0
    counts = np.bincount(groups, minlength=size)
    whole = counts[groups] >= np.maximum(_group_sizes(given), 2)
    if size < 2 or not whole.all() or not np.isfinite(used).all() or not used.any():
        return
    scale = float(np.abs(used).mean())
    means = np.bincount(groups, used, size) / counts
    if abs(float(used.mean())) < NOISE * scale and (np.abs(means) > 1e-3 * scale).all():
        row = int(np.abs(means[groups]).argmax())
        message = (
            f"the rewards of all {len(used)} samples have the mean 0 and those of none of the "
            f"{size} groups have, here {means[groups[row]]:.4g}: they were normalised as one block"
        )
        stage = "reward.post_process"
        yield given.finding("group.one-block", "warning", message, sample=row, stage=stage)


def _group_sizes(given: Columns) -> Floats:
    """(S,) Members that the group of each sample has; infinite where a step may hold a part."""
    if given.has("group_size"):
        return given.scalars("group_size")
    unstated = math.inf if has_column(given.table, "source_rollout_id") else 0
    stated = given.settings.reward.n_samples_per_prompt
    return np.full(len(given.groups), unstated if stated is None else stated, np.float64)


def _mixed_prompts(given: Columns) -> Iterator[Finding]:
    """Groups whose members have other prompt tokens."""
    if not given.has("group_id", "tokens", "total_length"):
        return
    total = np.asarray(given.table["total_length"].to_numpy(), np.int64)
    held = list_lengths(given.table["tokens"])
    if not np.array_equal(held, total):
        return  # without the prompt
    prompts = total - given.lengths
    tokens = packed_values(given.table["tokens"]).numpy()
    starts = np.concatenate([[0], np.cumsum(held)])
    first: dict[int, bytes] = {}
    mixed: list[int] = []
    for row, group in enumerate(given.groups.tolist()):
        prompt = tokens[starts[row] : starts[row] + max(int(prompts[row]), 0)].tobytes()
        if first.setdefault(group, prompt) != prompt:
            mixed.append(row)
    if mixed:
        message = (
            f"{len(mixed)} samples have another prompt than the first of their group, here of "
            f"{given.table['group_id'][mixed[0]].as_py()}: groups are of one prompt"
        )
        yield given.finding("group.mixed-prompts", "warning", message, sample=mixed[0])
