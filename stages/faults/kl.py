"""Known ways to get the KL of policy against reference wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from trajreplay.schema.settings import KlSettings, Settings
from trajreplay.stages.block import Block
from trajreplay.stages.capability import LOG_PROB_SOURCES
from trajreplay.stages.compose import kl_tokens
from trajreplay.stages.faults.fault import Fault, Told, Tries, WrongKl, each, held, setting
from trajreplay.stages.faults.tokens import last_trained, shifted
from trajreplay.stages.variants import Variant

_STAGE = "advantage.kl"


def _wrong(function: Callable[[KlSettings, Tensor, Tensor], Tensor]) -> Variant:
    def kl(settings: Settings, policy: Tensor, reference: Tensor) -> Tensor:
        return function(settings.kl, policy, reference)

    return Variant(arithmetic=WrongKl(kl))


def _negated(block: Block) -> Iterable[Told]:
    if setting(block, "kl.coef"):
        yield Told(_wrong(lambda kl, policy, ref: -kl_tokens(kl, policy, ref)))


def _roles(block: Block) -> Iterable[Told]:
    if setting(block, "kl.coef"):
        yield Told(_wrong(lambda kl, policy, ref: kl_tokens(kl, ref, policy)))


def _in_place(block: Block) -> Iterable[Told]:
    """The token reward, built in the tensor that is recorded as the KL."""
    if not setting(block, "kl.coef"):
        return
    packed = block.packed
    for where, at in (
        ("last token", packed.offsets[1:][packed.lengths > 0] - 1),
        ("last trained token", last_trained(packed)),
    ):
        owner = torch.searchsorted(packed.offsets, at, right=True) - 1
        for name in ("reward", "raw_reward"):
            if held(block, name):
                reward = torch.zeros(len(packed.mask), dtype=torch.float64)
                reward[at] = packed.scalars(name)[owner]

                def rewarded(
                    kl: KlSettings, policy: Tensor, ref: Tensor, added: Tensor = reward
                ) -> Tensor:
                    return added.to(policy.dtype) - kl.coef * kl_tokens(kl, policy, ref)

                yield Told(_wrong(rewarded), f"{name} at the {where}")


def _coefficient(block: Block) -> Iterable[Told]:
    if setting(block, "kl.coef"):
        yield Told(_wrong(lambda kl, policy, ref: kl.coef * kl_tokens(kl, policy, ref)), "times")
        yield Told(_wrong(lambda kl, policy, ref: -kl.coef * kl_tokens(kl, policy, ref)), "minus")


def _off(block: Block) -> Iterable[Told]:
    if setting(block, "kl.coef"):
        yield Told(Variant({"kl.coef": 0.0}))


def _on(block: Block) -> Iterable[Told]:
    if not setting(block, "kl.coef"):
        for estimator in ("k1", "k3", "low_var_kl", "k2", "abs"):
            clamp = (-10.0, 10.0) if estimator == "low_var_kl" else None
            changes = {"kl.coef": 1.0, "kl.estimator": estimator, "kl.value_clamp": clamp}
            yield Told(Variant(changes), estimator)


def _estimator(block: Block) -> Iterable[Told]:
    for estimator in ("k1", "k2", "k3", "low_var_kl", "abs"):
        if estimator == setting(block, "kl.estimator"):
            continue
        changes = {"kl.estimator": estimator}
        if estimator == "low_var_kl":
            yield Told(Variant({**changes, "kl.value_clamp": (-10.0, 10.0)}), estimator)
        elif setting(block, "kl.estimator") == "low_var_kl":
            yield Told(Variant({**changes, "kl.value_clamp": None}), f"{estimator}, not clamped")
        yield Told(Variant(changes), estimator)


def _clamp(block: Block) -> Iterable[Told]:
    for bounds in (None, (-10.0, 10.0), (0.0, 10.0)):
        if bounds == setting(block, "kl.value_clamp"):
            continue
        detail = "not clamped" if bounds is None else f"clamped to {bounds[0]:g} and {bounds[1]:g}"
        changes: dict[str, object] = {"kl.value_clamp": bounds}
        if setting(block, "kl.estimator") == "low_var_kl" and bounds is None:
            changes["kl.estimator"] = "k3"  # which low_var_kl is without its clamp
        yield Told(Variant(changes), detail)


def _stale(block: Block) -> Iterable[Told]:
    """Another log-prob column in the place of the policy's or the reference's."""
    policy = LOG_PROB_SOURCES[setting(block, "kl.policy_source")]
    if not setting(block, "kl.coef") or not held(block, policy, "ref_log_probs"):
        return
    for other in ("rollout_log_probs", "old_log_probs", "log_probs"):
        if other != policy and held(block, other):
            values = block.packed.tokens(other)
            yield Told(Variant(columns={policy: values}), f"{other} for {policy}")
            yield Told(Variant(columns={"ref_log_probs": values}), f"{other} for ref_log_probs")


def _shift(block: Block) -> Iterable[Told]:
    policy = LOG_PROB_SOURCES[setting(block, "kl.policy_source")]
    for name in (policy, "ref_log_probs"):
        if setting(block, "kl.coef") and held(block, name):
            for by, word in ((1, "one token late"), (-1, "one token early")):
                values = shifted(block.packed.tokens(name), block.packed.offsets, by)
                yield Told(Variant(columns={name: values}), f"{name} {word}")


def _weighted(block: Block) -> Iterable[Told]:
    if not setting(block, "kl.coef") or not held(block, "log_probs", "old_log_probs"):
        return
    gap = block.packed.tokens("log_probs") - block.packed.tokens("old_log_probs")

    def weighted(kl: KlSettings, policy: Tensor, ref: Tensor) -> Tensor:
        return gap.exp().to(policy.dtype) * kl_tokens(kl, policy, ref)

    yield Told(_wrong(weighted))


def _halved(block: Block) -> Iterable[Told]:
    if setting(block, "kl.estimator") == "k2" and setting(block, "kl.coef"):
        yield Told(_wrong(lambda kl, policy, ref: 2 * kl_tokens(kl, policy, ref)))


def _rounded(block: Block) -> Iterable[Told]:
    if not setting(block, "kl.coef"):
        return
    policy = LOG_PROB_SOURCES[setting(block, "kl.policy_source")]
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")

        def result(kl: KlSettings, mine: Tensor, ref: Tensor, to: torch.dtype = dtype) -> Tensor:
            return kl_tokens(kl, mine, ref).to(to).to(mine.dtype)

        yield Told(_wrong(result), f"rounded to {name}")
        if held(block, policy, "ref_log_probs"):
            narrow = {
                one: block.packed.tokens(one).to(dtype).double()
                for one in (policy, "ref_log_probs")
            }
            yield Told(Variant(columns=narrow), f"of log-probs in {name}")


def _leaked(block: Block) -> Iterable[Told]:
    """0 times NaN is NaN: what is masked by multiplication stays NaN."""
    if not setting(block, "kl.coef"):
        return
    packed = block.packed

    def multiplied(kl: KlSettings, policy: Tensor, ref: Tensor) -> Tensor:
        masked = kl_tokens(kl, policy, ref) * packed.mask
        owner = torch.arange(len(packed.lengths)).repeat_interleave(packed.lengths)
        odd = torch.zeros(len(packed.lengths), dtype=torch.bool)
        odd[owner[masked.isnan()]] = True
        return torch.where(odd[owner], torch.nan, masked)

    if not bool(torch.isfinite(packed.tokens("kl")).all()):
        yield Told(_wrong(multiplied))


def _fault(name: str, known: str, sentence: str, look: str, tries: Tries, *ref: str) -> Fault:
    return Fault(f"kl.{name}", known, _STAGE, sentence, look, ref, tries)


FAULTS = (
    _fault(
        "overwritten",
        "the recorded KL was overwritten in place",
        "the token reward: {}, less the coefficient times the KL",
        "in-place arithmetic on the tensor that is recorded: copy it at the moment of use",
        _in_place,
        "K-027",
        "https://github.com/THUDM/slime/pull/2114",
    ),
    _fault(
        "negated",
        "KL with the opposite sign",
        "the KL with the opposite sign",
        "the order of the operands: log-probs of the policy less those of the reference",
        _negated,
        "K-061",
    ),
    _fault(
        "roles",
        "policy and reference exchanged",
        "the KL of reference against policy",
        "the order of the operands: log-probs of the policy less those of the reference",
        _roles,
    ),
    _fault(
        "estimator",
        "another KL estimator",
        "the KL by the estimator {}",
        "kl.estimator: k3 is clamped in verl, not in slime, whose low_var_kl is",
        _estimator,
    ),
    _fault(
        "clamp",
        "another clamp of the KL",
        "the KL {}",
        "kl.value_clamp: k3 and low_var_kl differ by it in slime, and do not in verl",
        _clamp,
    ),
    _fault(
        "log-ratio-clamp",
        "another clamp of the log ratio",
        "the KL of log ratios {}",
        "kl.log_ratio_clamp",
        each(
            "kl.log_ratio_clamp",
            (None, (-20.0, 20.0)),
            {None: "that are not clamped", (-20.0, 20.0): "clamped to -20 and 20"}.__getitem__,
        ),
    ),
    _fault(
        "times-coefficient",
        "KL already multiplied by its coefficient",
        "the coefficient {} the KL",
        "whether what is recorded is the KL or its penalty",
        _coefficient,
    ),
    _fault(
        "off",
        "KL configured and not computed",
        "zeros",
        "whether a reference model was loaded; kl.coef",
        _off,
    ),
    _fault(
        "on",
        "KL computed where none is configured",
        "the KL by the estimator {}",
        "kl.coef",
        _on,
    ),
    _fault(
        "squared-twice",
        "k2 without the factor a half",
        "the squared log ratio, not halved",
        "the factor of k2",
        _halved,
    ),
    _fault(
        "other-column",
        "log-probs of another model or time",
        "the KL with {}",
        "which log-probs stand for policy and reference; kl.policy_source",
        _stale,
        "K-069",
    ),
    _fault(
        "source",
        "sampler and trainer log-probs exchanged",
        "the KL of the {} log-probs",
        "kl.policy_source",
        each("kl.policy_source", ("old", "rollout")),
    ),
    _fault(
        "shifted",
        "log-probs shifted by a token",
        "the KL with {}",
        "slices [:-1] and [1:] of logits, tokens and masks",
        _shift,
        "K-037",
    ),
    _fault(
        "weighted",
        "KL weighted by the probability ratio",
        "the KL times the ratio of current to old probabilities",
        "switches for the unbiased KL",
        _weighted,
    ),
    _fault(
        "leaked",
        "NaN on a masked token leaks through multiplication",
        "NaN wherever a masked token of the sample has one: 0 times NaN is NaN",
        "masks applied by multiplication: choose with where instead",
        _leaked,
        "K-064",
        "https://github.com/NovaSky-AI/SkyRL/pull/1635",
    ),
    _fault(
        "precision",
        "KL in reduced precision",
        "the KL {}",
        "dtype of log-probs and of the KL",
        _rounded,
        "K-050",
    ),
)
