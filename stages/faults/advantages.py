"""Known ways to get advantages and returns wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from trajreplay.schema.settings import AdvantageSettings, Settings
from trajreplay.stages.block import Block
from trajreplay.stages.compose import AdvantageInputs, estimate_advantages
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
from trajreplay.stages.variants import Variant

_STAGE = "advantage.estimate"
Sets = Callable[[Tensor], Tensor | None]


def _estimate(
    block: Block,
    settings: Settings,
    given: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None],
    advantage: AdvantageSettings | None = None,
    *,
    mask: Tensor | None = None,
    sets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The stage's own arithmetic with something about it changed."""
    reward, own, offsets, kl, values = given
    advantage = advantage or settings.advantage
    packed = block.packed
    shared = {"none": None, "cohort": packed.cohorts, "rank": packed.cohort_ranks}
    found = shared[advantage.whiten]
    if sets is None and found is not None:
        sets = found.repeat_interleave(packed.lengths)
    inputs = AdvantageInputs(
        reward, own if mask is None else mask, offsets, sets, kl, settings.kl.coef, values
    )
    made = estimate_advantages(advantage, inputs)
    return made.advantages, made.returns


def _wrong(function: Callable[..., tuple[Tensor, Tensor]]) -> Variant:
    return Variant(arithmetic=WrongAdvantages(function))


def _whitened_over_masked(block: Block) -> Iterable[Told]:
    if setting(block, "advantage.whiten") == "none" or bool(block.packed.mask.all()):
        return

    def over_all(settings: Settings, *given: Tensor) -> tuple[Tensor, Tensor]:
        plain = replace(settings.advantage, whiten="none", clip=None)
        found, returns = _estimate(block, settings, given, plain)  # type: ignore[arg-type]
        own = settings.advantage
        sets = block.packed.cohorts if own.whiten == "cohort" else block.packed.cohort_ranks
        white = whiten(
            found,
            torch.ones(len(found), dtype=torch.bool),
            set_index=sets.repeat_interleave(block.packed.lengths),
            ddof=own.whiten_ddof,
            epsilon=own.whiten_epsilon,
            form=own.whiten_form,
            scale=own.whiten_scale,
        )
        return (white if own.clip is None else white.clamp(*own.clip)), returns

    yield Told(_wrong(over_all))


def _whitened_in(block: Block) -> Iterable[Told]:
    """Statistics of sets that no setting names."""
    packed = block.packed
    found = {"sample": torch.arange(len(packed.lengths))}
    if held(block, "group_id"):
        found["group"] = packed.groups
    if held(block, "micro_batch_id"):
        found["micro-batch"] = packed.micro_batches
    for what, index in found.items():

        def shared(settings: Settings, *given: Tensor, by: Tensor = index) -> tuple[Tensor, Tensor]:
            own = settings.advantage
            if own.whiten == "none":
                own = replace(own, whiten="cohort")
            own = replace(own, whiten_short="keep")
            sets = by.repeat_interleave(packed.lengths)
            return _estimate(block, settings, given, own, sets=sets)  # type: ignore[arg-type]

        yield Told(_wrong(shared), what)


def _clipped_first(block: Block) -> Iterable[Told]:
    own = block.settings.advantage
    if own.clip is None or own.whiten == "none":
        return
    bounds = own.clip

    def first(settings: Settings, *given: Tensor) -> tuple[Tensor, Tensor]:
        plain = replace(settings.advantage, whiten="none")
        found, returns = _estimate(block, settings, given, plain)  # type: ignore[arg-type]
        sets = (
            block.packed.cohorts if own.whiten == "cohort" else block.packed.cohort_ranks
        ).repeat_interleave(block.packed.lengths)
        white = whiten(
            found.clamp(*bounds),
            given[1],
            set_index=sets,
            ddof=own.whiten_ddof,
            epsilon=own.whiten_epsilon,
            form=own.whiten_form,
            scale=own.whiten_scale,
        )
        return white, returns

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
    def swapped(settings: Settings, *given: Tensor) -> tuple[Tensor, Tensor]:
        advantages, returns = _estimate(block, settings, given)  # type: ignore[arg-type]
        return returns, advantages

    yield Told(_wrong(swapped))


def _negated(block: Block) -> Iterable[Told]:
    def opposite(settings: Settings, *given: Tensor) -> tuple[Tensor, Tensor]:
        advantages, returns = _estimate(block, settings, given)  # type: ignore[arg-type]
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
    if not bool(written.any()) or len(values) != 1 or bool(written.all()):
        return
    value = float(values)

    def spread(settings: Settings, *given: Tensor) -> tuple[Tensor, Tensor]:
        advantages, returns = _estimate(block, settings, given)  # type: ignore[arg-type]
        return torch.where(written, value, advantages).to(advantages.dtype), returns

    yield Told(_wrong(spread), f"{value:g}")


def _rounded(block: Block) -> Iterable[Told]:
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")

        def result(
            settings: Settings, *given: Tensor, to: torch.dtype = dtype
        ) -> tuple[Tensor, Tensor]:
            advantages, returns = _estimate(block, settings, given)  # type: ignore[arg-type]
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
        "whitening statistics of parts",
        "advantages whitened within each {}",
        "the axis of the mean: per row, per group or per micro-batch",
        _whitened_in,
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
