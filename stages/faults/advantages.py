"""Known ways to get advantages and returns wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product

import torch
from torch import Tensor

from trajreplay.schema.settings import Settings, differences
from trajreplay.stages.advantages import estimated
from trajreplay.stages.block import Block
from trajreplay.stages.faults.fault import (
    Fault,
    Told,
    Tries,
    WrongAdvantages,
    each,
    held,
    setting,
    under,
)
from trajreplay.stages.kernels import whiten
from trajreplay.stages.variants import Variant, varied

_STAGE = "advantage.estimate"
Made = tuple[Tensor, Tensor]


def _own(
    block: Block, settings: Settings, given: tuple[Tensor | None, ...], **changes: object
) -> Made:
    """The stage's own arithmetic, some of its settings changed, from what a kernel is given."""
    found = {name: theirs for name, (_, theirs) in differences(block.settings, settings).items()}
    found |= {f"advantage.{name}": one for name, one in changes.items()}
    reward, _, _, kl, _ = given
    assert reward is not None
    columns = {"reward": reward.double()} | ({} if kl is None else {"kl": kl.double()})
    made = estimated(varied(block, Variant(found, columns), (_STAGE,)), {}, reward.dtype)
    return made["advantages"], made["returns"]


def _white(block: Block, settings: Settings, values: Tensor, mask: Tensor, sets: Tensor) -> Tensor:
    """Values whitened as the settings say, over sets of samples."""
    own = settings.advantage
    return whiten(
        values,
        mask,
        set_index=sets.repeat_interleave(block.packed.lengths),
        ddof=own.whiten_ddof,
        epsilon=own.whiten_epsilon,
        form=own.whiten_form,
        scale=own.whiten_scale,
        short="keep",
    )


def _sets(block: Block, settings: Settings) -> Tensor:
    packed, whole = block.packed, settings.advantage.whiten
    return packed.cohort_ranks if whole == "rank" else packed.cohorts


def _wrong(function: Callable[..., Made]) -> Variant:
    return Variant(arithmetic=WrongAdvantages(function))


def _whitened_over_masked(block: Block) -> Iterable[Told]:
    if setting(block, "advantage.whiten") == "none" or bool(block.packed.mask.all()):
        return

    def over_all(settings: Settings, *given: Tensor) -> Made:
        found, returns = _own(block, settings, given, whiten="none", clip=None)
        every = torch.ones(len(found), dtype=torch.bool)
        white = _white(block, settings, found, every, _sets(block, settings))
        bounds = settings.advantage.clip
        return (white if bounds is None else white.clamp(*bounds)), returns

    yield Told(_wrong(over_all))


def _whitened_in(block: Block) -> Iterable[Told]:
    """Statistics of micro-batches, which no setting names."""
    if not held(block, "micro_batch_id"):
        return

    def shared(settings: Settings, *given: Tensor) -> Made:
        found, returns = _own(block, settings, given, whiten="none", clip=None)
        batches = block.packed.micro_batches
        return _white(block, settings, found, given[1], batches), returns

    yield Told(_wrong(shared), "micro-batch")


def _clipped_first(block: Block) -> Iterable[Told]:
    bounds = setting(block, "advantage.clip")
    if bounds is None or setting(block, "advantage.whiten") == "none":
        return

    def first(settings: Settings, *given: Tensor) -> Made:
        found, returns = _own(block, settings, given, whiten="none", clip=None)
        sets = _sets(block, settings)
        return _white(block, settings, found.clamp(*bounds), given[1], sets), returns

    yield Told(_wrong(first))


def _sign_of_kl(block: Block) -> Iterable[Told]:
    if setting(block, "advantage.kl_in_reward") and held(block, "kl"):
        yield Told(Variant(columns={"kl": -block.packed.tokens("kl")}))


def _masked(block: Block) -> Iterable[Told]:
    for one in ("through", "reset", "carry", "multiply"):
        if one == setting(block, "advantage.masking"):
            continue
        yield Told(Variant({"advantage.masking": one}), _PASSED[one])
        for where in ("last", "last-unmasked"):
            if where != setting(block, "advantage.reward_at"):
                changes = {"advantage.masking": one, "advantage.reward_at": where}
                at = "the last token" if where == "last" else "the last trained token"
                yield Told(Variant(changes), f"{_PASSED[one]}, with the reward at {at}")


_PASSED = {
    "through": "that step through masked tokens as through any other",
    "reset": "that start anew at every masked token",
    "carry": "that are carried past masked tokens",
    "multiply": "in which rewards and values of masked tokens count as 0",
}


def _other_rewards(block: Block) -> Iterable[Told]:
    packed = block.packed
    if held(block, "raw_reward"):
        yield Told(Variant(columns={"reward": packed.scalars("raw_reward")}), "raw rewards")
    reward = packed.scalars("reward")
    orders = {
        "the sample before": torch.roll(torch.arange(len(reward)), 1),
        "the sample after": torch.roll(torch.arange(len(reward)), -1),
        "samples in reverse order": torch.arange(len(reward)).flip(0),
        "samples in order of length": torch.argsort(packed.lengths, stable=True),
        "samples in order of length, longest first": torch.argsort(-packed.lengths, stable=True),
    }
    for what, order in orders.items():
        yield Told(Variant(columns={"reward": reward[order]}), f"the rewards of {what}")


def _exchanged(block: Block) -> Iterable[Told]:
    def swapped(settings: Settings, *given: Tensor) -> Made:
        advantages, returns = _own(block, settings, given)
        return returns, advantages

    yield Told(_wrong(swapped))


def _negated(block: Block) -> Iterable[Told]:
    def opposite(settings: Settings, *given: Tensor) -> Made:
        advantages, returns = _own(block, settings, given)
        return -advantages, returns

    yield Told(_wrong(opposite))


def _overwritten(block: Block) -> Iterable[Told]:
    """A value written to a part of a row that is a broadcast view of one number."""
    packed = block.packed
    if not len(packed.mask):
        return
    recorded = packed.tokens("advantages")
    owner = torch.arange(len(packed.lengths)).repeat_interleave(packed.lengths)
    low = torch.full((len(packed.lengths),), torch.inf, dtype=torch.float64)
    high = torch.full_like(low, -torch.inf)
    low.scatter_reduce_(0, owner, recorded, "amin")
    high.scatter_reduce_(0, owner, recorded, "amax")
    constant = (low == high)[owner]
    reward = packed.scalars("reward")[owner]
    written = constant & ((recorded - reward).abs() > 1e-5 * reward.abs() + 1e-6)
    values = torch.unique(recorded[written])
    own = block.settings.advantage
    stated = (own.invalid_tool_call, own.malformed_thinking)
    if not bool(written.any()) or len(values) != 1:
        return
    value = float(values)
    if bool(written.all()) and value not in stated:
        return  # one number for everything would fit anything

    def spread(settings: Settings, *given: Tensor) -> Made:
        advantages, returns = _own(block, settings, given)
        return torch.where(written, value, advantages).to(advantages.dtype), returns

    yield Told(_wrong(spread), f"{value:g}")


def _wrong_axis(block: Block) -> Iterable[Told]:
    """Statistics of rows taken for those of columns, which only a square shape allows."""
    packed = block.packed
    size = len(packed.lengths)
    if size < 2 or not bool((packed.lengths == size).all()):
        return

    def crossed(settings: Settings, *given: Tensor) -> Made:
        found, returns = _own(block, settings, given, whiten="none", clip=None)
        own = settings.advantage
        x, weights = found.view(size, size), given[1].to(found.dtype).view(size, size)
        count = weights.sum(1)
        centred = x - (x * weights).sum(1) / count.clamp(1)
        squares = (centred**2 * weights).sum(1) / (count - own.whiten_ddof).clamp(1)
        return (centred / (squares + own.whiten_epsilon).sqrt()).flatten(), returns

    yield Told(_wrong(crossed))


def _rounded(block: Block) -> Iterable[Told]:
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")

        def result(settings: Settings, *given: Tensor, to: torch.dtype = dtype) -> Made:
            advantages, returns = _own(block, settings, given)
            return advantages.to(to).to(advantages.dtype), returns.to(to).to(returns.dtype)

        yield Told(_wrong(result), name)


def _estimators(block: Block) -> Iterable[Told]:
    for one in ("grpo", "reinforce++", "reinforce++-baseline", "gae"):
        if one == setting(block, "advantage.estimator"):
            continue
        changes: dict[str, object] = {"advantage.estimator": one}
        if one == "grpo":
            changes["advantage.kl_in_reward"] = False
        yield Told(Variant(changes), one)


def _whiten_switches(block: Block) -> Iterable[Told]:
    names = {
        "none": "no tokens",
        "cohort": "all tokens of the cohort",
        "rank": "the tokens of each rank",
        "group": "the tokens of each group",
        "sample": "the tokens of each sample",
    }
    ranks = int(block.packed.cohort_ranks.max()) + 1
    for one, what in names.items():
        if one != setting(block, "advantage.whiten") and (one != "rank" or ranks > 1):
            yield Told(Variant({"advantage.whiten": one}), what)


def _forms(block: Block) -> Iterable[Told]:
    own = block.settings.advantage
    if own.whiten == "none":
        return
    for ddof, form, epsilon in product((0, 1), ("added", "floored", "std"), (1e-8, 1e-5, 1e-6)):
        found = (ddof, form, epsilon)
        if found != (own.whiten_ddof, own.whiten_form, own.whiten_epsilon):
            changes = {
                "advantage.whiten_ddof": ddof,
                "advantage.whiten_form": form,
                "advantage.whiten_epsilon": epsilon,
            }
            detail = f"with divisor {'n - 1' if ddof else 'n'}, epsilon {epsilon:g} {form}"
            yield Told(Variant(changes), detail)
    yield Told(Variant({"advantage.whiten_one_pass": not own.whiten_one_pass}), "in one pass")
    yield Told(Variant({"advantage.whiten_scale": not own.whiten_scale}), "only centred")


def _fault(name: str, known: str, sentence: str, look: str, tries: Tries, *ref: str) -> Fault:
    return Fault(f"advantage.{name}", known, _STAGE, sentence, look, ref, tries)


FAULTS = (
    _fault(
        "other-rewards",
        "rewards of other samples, or other rewards",
        "advantages made of {}",
        "the order of samples between reward and advantage; write-backs of processed rewards",
        _other_rewards,
        "K-014",
    ),
    _fault(
        "through-masked",
        "returns that step through tool and environment tokens",
        "returns {}",
        "masks inside the recursion; advantage.masking and advantage.reward_at",
        _masked,
        "K-024",
        "K-025",
        "https://github.com/radixark/miles/pull/1827",
    ),
    _fault(
        "reward-at",
        "reward at another token",
        "returns with the reward at the {} token",
        "advantage.reward_at",
        each("advantage.reward_at", ("last", "last-unmasked")),
    ),
    _fault(
        "whitened-over",
        "whitening over another set of tokens",
        "advantages whitened over {}",
        "the process group of the reduction: with or without context parallelism; advantage.whiten",
        _whiten_switches,
        "K-006",
        "https://github.com/THUDM/slime/pull/2235",
    ),
    _fault(
        "whitened-masked",
        "masked tokens in the whitening statistics",
        "advantages whitened with masked tokens counted",
        "whether the mask reaches mean and variance",
        _whitened_over_masked,
    ),
    _fault(
        "whitened-form",
        "whitening by another formula",
        "advantages whitened {}",
        "advantage.whiten_ddof, whiten_form, whiten_epsilon, whiten_one_pass, whiten_scale",
        _forms,
    ),
    _fault(
        "whitened-in-parts",
        "whitening statistics of parts of the batch",
        "advantages whitened within each {}",
        "where advantages are whitened: before or after the split into micro-batches",
        _whitened_in,
    ),
    _fault(
        "wrong-axis",
        "per-row statistics broadcast along the wrong axis",
        "advantages whitened with the statistics of rows broadcast over columns",
        "keepdim of mean and deviation: a square shape hides it",
        _wrong_axis,
        "K-021",
        "https://github.com/OpenRLHF/OpenRLHF/pull/1250",
    ),
    _fault(
        "clip-off",
        "advantage clipping configured and not applied",
        "advantages that are not clipped",
        "advantage.clip",
        under(advantage__clip=None),
    ),
    _fault(
        "clip-first",
        "advantages clipped before instead of after whitening",
        "advantages clipped before they were whitened",
        "the order of clip and whitening",
        _clipped_first,
    ),
    _fault(
        "kl-sign",
        "KL penalty with the opposite sign",
        "returns to which the KL was added, not taken from",
        "the sign of the KL in the token reward",
        _sign_of_kl,
        "K-061",
    ),
    _fault(
        "kl-off",
        "KL penalty configured and not paid",
        "returns without the KL penalty",
        "advantage.kl_in_reward",
        under(advantage__kl_in_reward=False),
    ),
    _fault(
        "estimator",
        "another estimator",
        "advantages by the estimator {}",
        "advantage.estimator",
        _estimators,
    ),
    _fault(
        "gamma",
        "another discount",
        "returns with the discount {}",
        "advantage.gamma",
        each("advantage.gamma", (1.0, 0.99, 0.95, 0.9), "{:g}".format),
    ),
    _fault(
        "lambda",
        "another lambda",
        "advantages with lambda {}",
        "advantage.lam",
        each("advantage.lam", (1.0, 0.95, 0.99, 0.9), "{:g}".format),
    ),
    _fault(
        "exchanged",
        "advantages and returns exchanged",
        "returns under the name of advantages, and the other way round",
        "the order in which both are returned",
        _exchanged,
    ),
    _fault(
        "negated",
        "advantages with the opposite sign",
        "the opposite of the advantages",
        "signs between reward, baseline and advantage",
        _negated,
    ),
    _fault(
        "broadcast-view",
        "a span penalty written into a broadcast view",
        "{} at every token of some samples: a row that is a view of one number",
        "expand before an in-place write: copy the row first",
        _overwritten,
        "K-030",
        "https://github.com/NVIDIA-NeMo/RL/pull/2787",
    ),
    _fault(
        "precision",
        "advantages in reduced precision",
        "advantages rounded to {}",
        "dtype in which advantages are kept",
        _rounded,
    ),
)
