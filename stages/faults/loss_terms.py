"""Known ways to get the terms of the policy loss beside its surrogate wrong: entropy, KL."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from trajreplay.schema.settings import Settings, with_changes
from trajreplay.stages.block import Block
from trajreplay.stages.compose import PolicyTerms
from trajreplay.stages.counterfactuals.variants import Variant
from trajreplay.stages.faults.fault import (
    Told,
    Tries,
    WrongLosses,
    held,
    setting,
)
from trajreplay.stages.faults.policy import (
    STAGE,
    Columns,
    fault,
    own_terms,
)
from trajreplay.stages.faults.solved import Misses


def _entropy(block: Block) -> Iterable[Told]:
    coef = setting(block, "loss.entropy_coef")
    if coef:
        yield Told(Variant({"loss.entropy_coef": -coef}), "added instead of subtracted")
        yield Told(Variant({"loss.entropy_coef": 0.0}), "left out")
    elif held(block, "entropy"):
        for other in (0.01, 0.001, 1.0):
            yield Told(Variant({"loss.entropy_coef": other}), f"with coefficient {other:g}")


def _coefficient(name: str) -> Tries:
    """Tries of another coefficient of a term, in which the loss is linear."""

    def tries(block: Block) -> Iterable[Told]:
        own = setting(block, name)
        misses = Misses(block, STAGE, ("loss",))
        if misses.wrong != {"loss"} or not own:
            return  # a term that the settings leave out has tries of its own
        for one, taken in misses.linear(lambda one: Variant({name: one}), own):
            if one not in (own, -own, 0.0):
                yield Told(Variant({name: one}), f"{one:.6g} instead of {own:g}", taken)

    return tries


def _kl_loss(block: Block) -> Iterable[Told]:
    coef = setting(block, "loss.kl_loss_coef")
    if coef:
        yield Told(Variant({"loss.kl_loss_coef": -coef}), "subtracted instead of added")
        yield Told(Variant({"loss.kl_loss_coef": 0.0}), "left out")


def _kl_unstated(block: Block) -> Iterable[Told]:
    if setting(block, "loss.kl_loss_coef") or not held(block, "ref_log_probs"):
        return
    coefs = dict.fromkeys([setting(block, "kl.coef"), 0.001, 0.01, 0.1, 0.04, 0.05])
    for coef in (one for one in coefs if one):
        for estimator in ("k1", "k2", "k3"):
            changes = {"loss.kl_loss_coef": coef, "loss.kl_loss_estimator": estimator}
            yield Told(Variant(changes), f"{coef:g} times the {estimator} of the KL")


def _kl_estimator(block: Block) -> Iterable[Told]:
    if not setting(block, "loss.kl_loss_coef"):
        return
    for estimator in ("k1", "k2", "k3", "abs"):
        for clamp in (None, (-10.0, 10.0)):
            changes = {"loss.kl_loss_estimator": estimator, "loss.kl_loss_clamp": clamp}
            changes["loss.kl_loss_clamped"] = "every"
            if any(setting(block, name) != one for name, one in changes.items()):
                bound = "" if clamp is None else ", clamped to -10 and 10"
                yield Told(Variant(changes), f"by the estimator {estimator}{bound}")
    weighted = setting(block, "loss.kl_loss_weighted")
    word = "not weighted" if weighted else "weighted by the ratio"
    yield Told(Variant({"loss.kl_loss_weighted": not weighted}), word)
    if weighted:
        for one in ("old", "rollout", "ratio"):
            if one != setting(block, "loss.kl_loss_weight"):
                yield Told(Variant({"loss.kl_loss_weight": one}), f"weighted by {one}")


def _kl_roles(block: Block) -> Iterable[Told]:
    """The reference's KL against the policy: its term with both exchanged, and no other term."""
    if not setting(block, "loss.kl_loss_coef"):
        return

    def losses(settings: Settings, columns: Columns, mask: Tensor, offsets: Tensor) -> PolicyTerms:
        own = own_terms(block, settings, columns, mask, offsets)
        pair = {"log_probs": columns["ref_log_probs"], "ref_log_probs": columns["log_probs"]}
        free = with_changes(settings, {"loss.kl_loss_weighted": False})
        found = own_terms(block, free, {**columns, **pair}, mask, offsets)
        return own._replace(terms=own.terms | {"kl_loss": found.terms["kl_loss"]})

    yield Told(Variant(arithmetic=WrongLosses(losses)))


FAULTS = (
    fault(
        "entropy",
        "entropy bonus with the wrong sign, or none",
        "the loss with the entropy bonus {}",
        "the sign of the bonus: it is subtracted from a loss; loss.entropy_coef",
        _entropy,
        "K-068",
        "https://github.com/nebuly-ai/optimate/pull/250",
        touches=("loss",),
    ),
    fault(
        "kl-sign",
        "KL loss subtracted in a minimisation",
        "the loss with its KL term {}",
        "the sign of the KL term: it is added to a loss; loss.kl_loss_coef",
        _kl_loss,
        "K-061",
        "https://github.com/verl-project/verl/pull/179",
        touches=("loss",),
    ),
    fault(
        "entropy-coefficient",
        "another coefficient of the entropy bonus",
        "the loss with the entropy bonus times {}",
        "loss.entropy_coef; a coefficient that is scheduled or adapted",
        _coefficient("loss.entropy_coef"),
        touches=("loss",),
    ),
    fault(
        "kl-coefficient",
        "another coefficient of the KL loss",
        "the loss with its KL term times {}",
        "loss.kl_loss_coef; a coefficient that is scheduled or adapted",
        _coefficient("loss.kl_loss_coef"),
        touches=("loss",),
    ),
    fault(
        "kl-estimator",
        "another estimator of the KL loss",
        "the loss with its KL term {}",
        "loss.kl_loss_estimator and its clamp",
        _kl_estimator,
        touches=("kl_loss", "loss"),
    ),
    fault(
        "kl-roles",
        "policy and reference exchanged in the KL loss",
        "the loss with the KL of the reference against the policy",
        "the order of the operands of the KL loss: current less reference",
        _kl_roles,
        touches=("kl_loss", "loss"),
    ),
    fault(
        "kl-unstated",
        "a KL loss that the settings do not state",
        "the loss and {}",
        "loss.kl_loss_coef",
        _kl_unstated,
        "K-061",
        touches=("loss",),
    ),
)
