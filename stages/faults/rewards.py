"""Known ways to get the processed rewards wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from trajreplay.schema.errors import StageError
from trajreplay.schema.settings import Settings, with_changes
from trajreplay.stages.block import Block
from trajreplay.stages.compose import RewardInputs, processed_rewards
from trajreplay.stages.faults.fault import (
    Fault,
    Told,
    Tries,
    WrongRewards,
    each,
    held,
    setting,
    under,
)
from trajreplay.stages.kernels import scatter_sum
from trajreplay.stages.variants import Variant

_STAGE = "reward.post_process"
_ISSUE = "https://github.com/"
_TOOL_ROWS = "the rows of a rank, {} at a time,"


def _by_named(column: str, what: str) -> Tries:
    def tries(block: Block) -> Iterable[Told]:
        if not held(block, "group_id", column):
            return
        packed = block.packed
        groups = packed.consumer_batches if column == "consumer_batch_id" else packed.micro_batches
        names = sorted(set(packed.table[column].to_pylist()))
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        plural = what.removesuffix("h") + "hes" if len(names) > 1 else what
        yield Told(_grouped(groups), f"{plural} {shown}")

    return tries


def _grouped(groups: Tensor) -> Variant:
    return Variant({"reward.grouping": "group"}, {"groups": groups})


def _by_batch(block: Block) -> Iterable[Told]:
    if setting(block, "reward.grouping") != "batch":
        yield Told(
            Variant({"reward.grouping": "batch"}), f"all {len(block.packed.lengths)} samples"
        )


def _by_rank(block: Block) -> Iterable[Told]:
    count = int(block.packed.cohort_ranks.max()) + 1
    if held(block, "group_id") and count > 1:
        yield Told(_grouped(block.packed.cohort_ranks), f"{count} ranks")


def _sizes(block: Block) -> list[int]:
    """Group sizes that a stride may have been taken for."""
    stated = setting(block, "reward.n_samples_per_prompt")
    sizes = {stated} if stated else set()
    if held(block, "group_id"):
        counts = torch.bincount(block.packed.groups)
        sizes |= {int(counts.max()), int(counts[counts > 0].mode().values)}
    return sorted(one for one in sizes if one > 1)


def _by_stride(block: Block) -> Iterable[Told]:
    for size in _sizes(block):
        changes = {"reward.grouping": "stride", "reward.n_samples_per_prompt": size}
        yield Told(Variant(changes), str(size))


def _by_stride_of_all(block: Block) -> Iterable[Told]:
    """Rows of all ranks after one another, as a driver holds them."""
    rows = torch.arange(len(block.packed.lengths))
    for size in _sizes(block):
        if held(block, "group_id"):
            yield Told(_grouped(rows // size), str(size))


def _by_position(block: Block) -> Iterable[Told]:
    """Samples of one prompt taken for those of the same number in every prompt."""
    if not held(block, "group_id"):
        return
    groups = block.packed.groups
    order = torch.argsort(groups, stable=True)
    starts = torch.bincount(groups).cumsum(0) - torch.bincount(groups)
    number = torch.empty_like(groups)
    number[order] = torch.arange(len(groups)) - starts[groups[order]]
    yield Told(_grouped(number))
    prompts = len(torch.unique(groups))
    if prompts > 1:
        yield Told(_grouped(torch.arange(len(groups)) % prompts), "")


def _unfilled_tail(block: Block) -> Iterable[Told]:
    """Statistics of full strides only: those of rows after the last one stay 0."""
    rows = torch.arange(len(block.packed.lengths))
    for size in _sizes(block):
        full = len(rows) // size * size
        if full == len(rows):
            continue

        def rewards(
            settings: Settings,
            raw: Tensor,
            groups: Tensor,
            lengths: Tensor,
            full: int = full,
            size: int = size,
        ) -> Tensor:
            found = _normalised(settings, raw, rows // size, lengths)
            tail = raw / settings.reward.epsilon if settings.reward.divide_by_std else raw
            return torch.where(rows < full, found, tail)

        yield Told(Variant(arithmetic=WrongRewards(rewards)), str(size))


def _normalised(settings: Settings, raw: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
    """What the settings make of raw rewards, whatever they say the groups are."""
    own = settings.reward
    if (own.unit, own.rule) != ("sample", "normalise") or own.baseline == "greedy" or own.weights:
        raise StageError("the variant is one of rewards that are normalised sample by sample")
    reward = with_changes(settings, {"reward.grouping": "group"}).reward
    given = RewardInputs(groups, torch.zeros_like(groups), lengths, lengths.double())
    return processed_rewards(reward, raw, given)


def _mean_of(values: Tensor, groups: Tensor) -> Tensor:
    count = int(groups.max()) + 1
    sums = scatter_sum(values, groups, count)
    return (sums / scatter_sum(torch.ones_like(values), groups, count))[groups]


def _no_brackets(block: Block) -> Iterable[Told]:
    def rewards(settings: Settings, raw: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
        reward = settings.reward
        mean = _mean_of(raw, groups)
        count = _mean_of(torch.ones_like(raw), groups) * torch.bincount(groups)[groups]
        spread = _mean_of((raw - mean) ** 2, groups) * count / (count - reward.ddof).clamp(1)
        return raw - mean / (spread.sqrt() + reward.epsilon)

    yield Told(Variant(arithmetic=WrongRewards(rewards)))


def _twice(block: Block) -> Iterable[Told]:
    def rewards(settings: Settings, raw: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
        once = _normalised(settings, raw, groups, lengths)
        return _normalised(settings, once, groups, lengths)

    yield Told(Variant(arithmetic=WrongRewards(rewards)))


def _negated(block: Block) -> Iterable[Told]:
    def rewards(settings: Settings, raw: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
        return -_normalised(settings, raw, groups, lengths)

    yield Told(Variant(arithmetic=WrongRewards(rewards)))


def _without_some(block: Block) -> Iterable[Told]:
    """Samples that a filter took out before the statistics, and that were scored all the same."""
    packed = block.packed
    trained = scatter_sum(
        packed.weights,
        torch.arange(len(packed.lengths)).repeat_interleave(packed.lengths),
        len(packed.lengths),
    )
    kinds_of = {
        "without a response": packed.lengths == 0,
        "without a trainable token": trained == 0,
    }
    if held(block, "truncated"):
        kinds_of["that were cut at the length limit"] = packed.scalars("truncated") != 0
    for what, out in kinds_of.items():
        if bool(out.any()) and not bool(out.all()):
            yield Told(Variant(arithmetic=WrongRewards(_excluding(out))), what)
    missing = _missing_members(block)
    if missing is not None:
        names = [packed.text("sample_id", one) for one in missing.nonzero().squeeze(1).tolist()[:3]]
        more = f" and {int(missing.sum()) - 3} more" if int(missing.sum()) > 3 else ""
        detail = f"{', '.join(map(str, names))}{more}"
        yield Told(Variant(arithmetic=WrongRewards(_excluding(missing))), detail)


def _excluding(out: Tensor) -> Callable[[Settings, Tensor, Tensor, Tensor], Tensor]:
    def rewards(settings: Settings, raw: Tensor, groups: Tensor, lengths: Tensor) -> Tensor:
        """Statistics of the samples that stayed; a sample that did not is scored with them."""
        reward = settings.reward
        kept = (~out).to(raw.dtype)
        size = int(groups.max()) + 1
        count = scatter_sum(kept, groups, size)[groups]
        mean = scatter_sum(raw * kept, groups, size)[groups] / count.clamp(1)
        centred = raw - mean if reward.baseline == "mean" else raw
        if not reward.divide_by_std:
            return centred
        squares = scatter_sum((raw - mean) ** 2 * kept, groups, size)[groups]
        spread = (squares / (count - reward.ddof).clamp(1)).sqrt()
        return centred / (spread + reward.epsilon)

    return rewards


def _missing_members(block: Block) -> Tensor | None:
    """(S,) bool. In each group that differs, the member without which the others are right.

    A group's mean of what was recorded is 0 over the members that were normalised.
    """
    reward = block.settings.reward
    if reward.baseline != "mean" or reward.unit != "sample" or not held(block, "group_id"):
        return None
    groups, recorded = block.packed.groups, block.packed.scalars("reward")
    size = int(groups.max()) + 1
    count = scatter_sum(torch.ones_like(recorded), groups, size)
    total = scatter_sum(recorded, groups, size)
    scale = scatter_sum(recorded.abs(), groups, size)
    off = (total.abs() > 1e-5 * scale) & (count > 2)
    if not bool(off.any()):
        return None
    left = (total[groups] - recorded).abs()  # what the others add up to
    best = torch.full((size,), torch.inf, dtype=left.dtype).scatter_reduce(0, groups, left, "amin")
    chosen = off[groups] & (left == best[groups])
    if not bool((best[off] <= 1e-5 * scale[off]).all()):
        return None
    first = torch.full((size,), len(groups)).scatter_reduce(
        0, groups, torch.where(chosen, torch.arange(len(groups)), len(groups)), "amin"
    )
    out = torch.zeros(len(groups), dtype=torch.bool)
    out[first[off]] = True
    return out


def _rounded(block: Block) -> Iterable[Told]:
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")

        def result(
            settings: Settings,
            raw: Tensor,
            groups: Tensor,
            lengths: Tensor,
            to: torch.dtype = dtype,
        ) -> Tensor:
            return _normalised(settings, raw, groups, lengths).to(to).to(raw.dtype)

        yield Told(Variant(arithmetic=WrongRewards(result)), f"rounded to {name}")
        narrow = block.packed.scalars("raw_reward").to(dtype).double()
        yield Told(Variant(columns={"raw_reward": narrow}), f"of raw rewards in {name}")


def _exchanged_clips(block: Block) -> Iterable[Told]:
    reward = block.settings.reward
    if reward.clip_before != reward.clip_after:
        changes = {"reward.clip_before": reward.clip_after, "reward.clip_after": reward.clip_before}
        yield Told(Variant(changes))


def _fault(
    name: str, known: str, sentence: str, look: str, tries: Tries, *references: str
) -> Fault:
    return Fault(f"reward.{name}", known, _STAGE, sentence, look, references, tries)


FAULTS = (
    _fault(
        "grouped-by-consumer-batch",
        "streamed groups normalised as one block",
        "normalisation over {} instead of the semantic group",
        "how rewards are reshaped where samples arrive in batches; reward.grouping",
        _by_named("consumer_batch_id", "consumer batch"),
        "K-001",
        f"{_ISSUE}redai-studio/Relax/pull/65",
    ),
    _fault(
        "grouped-by-batch",
        "the whole batch as one group",
        "normalisation over {} instead of the semantic group",
        "the fallback for a batch of unexpected size; reward.grouping",
        _by_batch,
        "K-001",
        "K-005",
        f"{_ISSUE}huggingface/trl/issues/3991",
    ),
    _fault(
        "grouped-by-rank",
        "group statistics of what one rank holds",
        "normalisation over the samples of each of {} instead of the semantic group",
        "where rewards are gathered before they are normalised",
        _by_rank,
        "K-001",
    ),
    _fault(
        "grouped-by-micro-batch",
        "group statistics of a forward pass",
        "normalisation over {} instead of the semantic group",
        "where rewards are normalised: before or after the split into micro-batches",
        _by_named("micro_batch_id", "micro-batch"),
    ),
    _fault(
        "grouped-by-stride",
        "groups cut by position",
        f"normalisation over {_TOOL_ROWS} instead of the semantic group",
        "reshapes to (-1, n_samples_per_prompt); reward.grouping",
        _by_stride,
        "K-003",
        f"{_ISSUE}areal-project/AReaL/issues/1419",
    ),
    _fault(
        "grouped-by-stride-of-all",
        "groups cut by position in the gathered batch",
        "normalisation over every {} samples in order of rank and row, not the semantic group",
        "reshapes to (-1, n_samples_per_prompt) after a gather; reward.grouping",
        _by_stride_of_all,
        "K-003",
    ),
    _fault(
        "stride-tail",
        "rows after the last full stride keep statistics of 0",
        "normalisation over every {} samples in order, with mean and deviation 0 for the rest",
        "the loop over strides, where the number of samples is no multiple of the group size",
        _unfilled_tail,
        "K-003",
        f"{_ISSUE}areal-project/AReaL/issues/1419",
    ),
    _fault(
        "grouped-by-position",
        "groups and repeats transposed",
        "normalisation over the samples of one number in each group, not over the group",
        "repeat against repeat_interleave; reshape(n, -1) against reshape(-1, n)",
        _by_position,
    ),
    _fault(
        "grouped-by-prompt",
        "groups of a prompt where another grouping is stated",
        "normalisation over each semantic group",
        "reward.grouping",
        under(reward__grouping="group"),
    ),
    _fault(
        "per-fragment",
        "fan-out trajectories counted once per fragment",
        "normalisation of every fragment instead of every trajectory once",
        "reward.unit",
        under(reward__unit="sample"),
        "K-012",
        f"{_ISSUE}THUDM/slime/pull/2381",
    ),
    _fault(
        "not-normalised",
        "raw rewards used as they are",
        "the shaped raw rewards, not normalised at all",
        "switches of reward normalisation; reward.grouping",
        under(reward__grouping="none"),
    ),
    _fault(
        "not-divided",
        "no scaling where scaling is configured",
        "the rewards less their baseline, not divided by a deviation",
        "the branches of reward scaling; reward.divide_by_std",
        under(reward__divide_by_std=False),
        "K-005",
        f"{_ISSUE}huggingface/trl/issues/3991",
    ),
    _fault(
        "divided",
        "scaling where none is configured",
        "the rewards less their baseline, divided by a deviation",
        "the branches of reward scaling; reward.divide_by_std",
        under(reward__divide_by_std=True),
        "K-005",
        f"{_ISSUE}huggingface/trl/issues/3991",
    ),
    _fault(
        "std-of-other-set",
        "group and batch deviation exchanged",
        "division by the deviation of {}",
        "the branches of reward scaling; reward.std_grouping",
        each(
            "reward.std_grouping",
            ("batch", "same"),
            {"batch": "the whole batch", "same": "the group"}.__getitem__,
        ),
        "K-005",
        f"{_ISSUE}PrimeIntellect-ai/prime-rl/pull/1188",
    ),
    _fault(
        "population-std",
        "deviation with divisor n",
        "division by the deviation with divisor n, where the settings say n - 1",
        "unbiased, correction or ddof of std: torch divides by n - 1, numpy by n; reward.ddof",
        under(reward__ddof=0),
    ),
    _fault(
        "sample-std",
        "deviation with divisor n - 1",
        "division by the deviation with divisor n - 1, where the settings say n",
        "unbiased, correction or ddof of std: torch divides by n - 1, numpy by n; reward.ddof",
        under(reward__ddof=1),
    ),
    _fault(
        "no-brackets",
        "missing brackets in the z-score",
        "r - mean / (std + epsilon): the mean alone is divided",
        "operator precedence in the normalisation",
        _no_brackets,
        "K-015",
        f"{_ISSUE}PrimeIntellect-ai/prime-rl/pull/390",
    ),
    _fault(
        "other-baseline",
        "another baseline",
        "rewards with the baseline {}",
        "reward.baseline; NeMo-RL leaves one out by default",
        each("reward.baseline", ("mean", "leave-one-out", "none", "length-weighted")),
    ),
    _fault(
        "leave-one-out",
        "leave-one-out baseline and deviation",
        "rewards normalised with statistics of the other members of the group",
        "reward.baseline and reward.divisor; NeMo-RL leaves one out by default",
        under(reward__baseline="leave-one-out", reward__divisor="leave-one-out-std"),
    ),
    _fault(
        "other-divisor",
        "another divisor",
        "rewards divided by {}",
        "reward.divisor",
        each("reward.divisor", ("std", "std-around-baseline", "leave-one-out-std", "baseline")),
    ),
    _fault(
        "other-epsilon",
        "another epsilon",
        "normalisation with epsilon {}",
        "reward.epsilon: 1e-6 in most frameworks, 1e-4 in TRL, 1e-5 in AReaL, 1e-9 in OpenRLHF",
        each("reward.epsilon", (1e-4, 1e-5, 1e-6, 1e-9, 1e-8, 1e-3, 0.0), "{:g}".format),
    ),
    _fault(
        "epsilon-place",
        "epsilon elsewhere",
        "normalisation with epsilon {}",
        "whether epsilon is added to the deviation or stands inside the root; reward.epsilon_place",
        each("reward.epsilon_place", ("added", "floored", "inside")),
    ),
    _fault(
        "length-of-tool-tokens",
        "response length measured as a span over tool tokens",
        "the overlong penalty of all response tokens, tool output included",
        "where the length is taken; reward.overlong_counts",
        under(reward__overlong_counts="response"),
        "K-028",
        f"{_ISSUE}OpenRLHF/OpenRLHF/pull/1252",
    ),
    _fault(
        "length-of-trained-tokens",
        "response length measured over trained tokens alone",
        "the overlong penalty of the trained tokens alone",
        "where the length is taken; reward.overlong_counts",
        under(reward__overlong_counts="trained"),
    ),
    _fault(
        "overlong-floor",
        "overlong penalty with another floor",
        "the overlong penalty {}",
        "reward.overlong_floored: floored in OpenRLHF only",
        each(
            "reward.overlong_floored",
            (True, False),
            {True: "that stops growing", False: "that grows without end"}.__getitem__,
        ),
    ),
    _fault(
        "overlong-off",
        "overlong penalty configured and not applied",
        "rewards without the overlong penalty",
        "reward.overlong_max_length",
        under(reward__overlong_max_length=None),
    ),
    _fault(
        "truncation-off",
        "reward of truncated responses left as it is",
        "rewards that do not change where a response was cut",
        "reward.stop_properly_coef",
        under(reward__stop_properly_coef=None),
    ),
    _fault(
        "clip-off",
        "clipping configured and not applied",
        "rewards that are not clipped",
        "reward.clip_before, reward.clip_after",
        under(reward__clip_before=None, reward__clip_after=None),
    ),
    _fault(
        "clip-exchanged",
        "clipping before instead of after normalisation",
        "rewards clipped on the other side of the normalisation",
        "the order of clip and normalisation: OpenRLHF clips after it",
        _exchanged_clips,
    ),
    _fault(
        "lone",
        "a sample alone in its group",
        "normalisation that gives a sample alone in its group {}",
        "reward.lone",
        each(
            "reward.lone",
            ("zero", "keep", "nan"),
            {"zero": "zero", "keep": "its own reward", "nan": "NaN"}.__getitem__,
        ),
    ),
    _fault(
        "missing-counted",
        "one missing reward makes its group NaN",
        "normalisation in which a missing reward makes its whole group NaN",
        "mean against nanmean; reward.missing",
        under(reward__missing="keep"),
        "K-018",
        f"{_ISSUE}modelscope/ms-swift/issues/8123",
    ),
    _fault(
        "missing-excluded",
        "missing rewards left out",
        "normalisation without the rewards that are missing",
        "nanmean against mean; reward.missing",
        under(reward__missing="exclude"),
    ),
    _fault(
        "without-members",
        "statistics of a group that lost members",
        "normalisation without the samples {}",
        "filters between scoring and normalisation",
        _without_some,
        "K-010",
        f"{_ISSUE}PrimeIntellect-ai/prime-rl/pull/2014",
    ),
    _fault(
        "negated",
        "reward with the opposite sign",
        "the opposite of the normalised rewards",
        "signs between reward and advantage",
        _negated,
    ),
    _fault(
        "twice",
        "normalised twice",
        "rewards normalised, and then normalised again",
        "normalisation in both the reward function and the trainer",
        _twice,
    ),
    _fault(
        "precision",
        "rewards in reduced precision",
        "normalised rewards {}",
        "dtype in which rewards are kept",
        _rounded,
        "K-050",
    ),
)
