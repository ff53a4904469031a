"""Known ways to get the KL of policy against reference wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from trajreplay.schema.settings import KL_ESTIMATORS, KlSettings, Settings
from trajreplay.stages.block import Block
from trajreplay.stages.compose import (
    kl_tokens,
)
from trajreplay.stages.counterfactuals.variants import Variant
from trajreplay.stages.faults.fault import (
    Fault,
    Told,
    Tries,
    WrongKl,
    each,
    held,
    setting,
)
from trajreplay.stages.faults.solved import TWO_DIGITS, solved_bounds, together
from trajreplay.stages.faults.tokens import last_trained

STAGE = "advantage.kl"


def wrong(function: Callable[[KlSettings, Tensor, Tensor], Tensor]) -> Variant:
    """The variant by other arithmetic: from settings, policy and reference."""

    def kl(settings: Settings, policy: Tensor, reference: Tensor) -> Tensor:
        return function(settings.kl, policy, reference)

    return Variant(arithmetic=WrongKl(kl))


def _negated(block: Block) -> Iterable[Told]:
    if setting(block, "kl.coef"):
        yield Told(wrong(lambda kl, policy, ref: -kl_tokens(kl, policy, ref)))


def _roles(block: Block) -> Iterable[Told]:
    if setting(block, "kl.coef"):
        yield Told(wrong(lambda kl, policy, ref: kl_tokens(kl, ref, policy)))


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

                yield Told(wrong(rewarded), f"{name} at the {where}")


def _coefficient(block: Block) -> Iterable[Told]:
    if setting(block, "kl.coef"):
        yield Told(wrong(lambda kl, policy, ref: kl.coef * kl_tokens(kl, policy, ref)), "times")
        yield Told(wrong(lambda kl, policy, ref: -kl.coef * kl_tokens(kl, policy, ref)), "minus")


def _off(block: Block) -> Iterable[Told]:
    if setting(block, "kl.coef"):
        yield Told(Variant({"kl.coef": 0.0}))


def _on(block: Block) -> Iterable[Told]:
    if not setting(block, "kl.coef"):
        for estimator in KL_ESTIMATORS:
            clamp = (-10.0, 10.0) if estimator == "low_var_kl" else None
            changes = {"kl.coef": 1.0, "kl.estimator": estimator, "kl.value_clamp": clamp}
            changes["kl.clamped"] = "every"
            yield Told(Variant(changes), estimator)


def _estimator(block: Block) -> Iterable[Told]:
    for estimator in KL_ESTIMATORS:
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
        changes: dict[str, object] = {"kl.value_clamp": bounds, "kl.clamped": "every"}
        if setting(block, "kl.estimator") == "low_var_kl" and bounds is None:
            changes["kl.estimator"] = "k3"  # which low_var_kl is without its clamp
        yield Told(Variant(changes), detail)


def _clamp_solved(block: Block) -> Iterable[Told]:
    for one in solved_bounds("kl.value_clamp", STAGE, ("kl",), TWO_DIGITS)(block):
        both = one.variant.with_(Variant({"kl.clamped": "every"}))
        yield Told(both, f"clamped to {one.detail}")


def _weighted(block: Block) -> Iterable[Told]:
    if not setting(block, "kl.coef") or not held(block, "log_probs", "old_log_probs"):
        return
    gap = block.packed.tokens("log_probs") - block.packed.tokens("old_log_probs")

    def weighted(kl: KlSettings, policy: Tensor, ref: Tensor) -> Tensor:
        return gap.exp().to(policy.dtype) * kl_tokens(kl, policy, ref)

    yield Told(wrong(weighted))


def _halved(block: Block) -> Iterable[Told]:
    if setting(block, "kl.estimator") == "k2" and setting(block, "kl.coef"):
        yield Told(wrong(lambda kl, policy, ref: 2 * kl_tokens(kl, policy, ref)))


def fault(name: str, known: str, sentence: str, look: str, tries: Tries, *ref: str) -> Fault:
    """A fault of this stage."""
    return Fault(f"kl.{name}", known, STAGE, sentence, look, ref, tries)


FAULTS = (
    fault(
        "overwritten",
        "the recorded KL was overwritten in place",
        "the token reward: {}, less the coefficient times the KL",
        "in-place arithmetic on the tensor that is recorded: copy it at the moment of use",
        _in_place,
        "K-027",
        "https://github.com/THUDM/slime/pull/2114",
    ),
    fault(
        "negated",
        "KL with the opposite sign",
        "the KL with the opposite sign",
        "the order of the operands: log-probs of the policy less those of the reference",
        _negated,
        "K-061",
    ),
    fault(
        "roles",
        "policy and reference exchanged",
        "the KL of reference against policy",
        "the order of the operands: log-probs of the policy less those of the reference",
        _roles,
    ),
    fault(
        "estimator",
        "another KL estimator",
        "the KL by the estimator {}",
        "kl.estimator: k3 is clamped in verl, not in slime, whose low_var_kl is",
        _estimator,
    ),
    fault(
        "clamp",
        "another clamp of the KL",
        "the KL {}",
        "kl.value_clamp: k3 and low_var_kl differ by it in slime, and do not in verl",
        together(_clamp, _clamp_solved),
    ),
    fault(
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
    fault(
        "times-coefficient",
        "KL already multiplied by its coefficient",
        "the coefficient {} the KL",
        "whether what is recorded is the KL or its penalty",
        _coefficient,
    ),
    fault(
        "off",
        "KL configured and not computed",
        "zeros",
        "whether a reference model was loaded; kl.coef",
        _off,
    ),
    fault(
        "on",
        "KL computed where none is configured",
        "the KL by the estimator {}",
        "kl.coef",
        _on,
    ),
    fault(
        "squared-twice",
        "k2 without the factor a half",
        "the squared log ratio, not halved",
        "the factor of k2",
        _halved,
    ),
    fault(
        "weighted",
        "KL weighted by the probability ratio",
        "the KL times the ratio of current to old probabilities",
        "switches for the unbiased KL",
        _weighted,
    ),
)
