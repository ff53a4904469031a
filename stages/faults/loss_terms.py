"""Known ways to get the terms of the policy loss wrong: entropy, KL, weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from trajreplay.schema.settings import Settings, with_changes
from trajreplay.stages.block import Block
from trajreplay.stages.compose import PolicyTerms, rollout_weights
from trajreplay.stages.faults.fault import (
    Told,
    Tries,
    WrongLosses,
    held,
    other_batch,
    setting,
    under,
)
from trajreplay.stages.faults.policy import (
    STAGE,
    Columns,
    fault,
    inputs,
    own_terms,
)
from trajreplay.stages.faults.solved import Misses
from trajreplay.stages.variants import Variant

_UNBOUNDED = 1e30


def _correction(block: Block) -> Iterable[Told]:
    bounds = setting(block, "loss.correction_bounds")
    kind = setting(block, "loss.correction")
    if kind != "none":
        yield Told(Variant({"loss.correction": "none"}), "no weight")
    for other in ("tis", "icepop", "sequence-tis", "sequence-mask", "geometric-mask"):
        if other != kind and held(block, "rollout_log_probs", "old_log_probs"):
            for pair in dict.fromkeys([bounds or (0.0, 2.0), (0.0, 2.0), (0.0, 3.0), (0.5, 2.0)]):
                changes = {"loss.correction": other, "loss.correction_bounds": pair}
                yield Told(Variant(changes), f"the weight {other} in {pair[0]:g} to {pair[1]:g}")
    if kind != "none" and bounds is not None:
        free = {"loss.correction_bounds": (0.0, _UNBOUNDED)}
        yield Told(Variant(free), "the weight without bounds")


def _weighed_with(block: Block, old: Callable[[Columns], Tensor]) -> Variant:
    """The variant whose correction reads other log-probs as the old ones than the ratio does."""

    def losses(settings: Settings, columns: Columns, mask: Tensor, offsets: Tensor) -> PolicyTerms:
        plain = with_changes(settings, {"loss.correction": "none"})
        own = own_terms(block, plain, columns, mask, offsets)
        changed = {**columns, "old_log_probs": old(columns)}
        weights = rollout_weights(settings.loss, inputs(block, changed, mask, offsets))
        if weights is None:
            return own
        return own._replace(terms=own.terms | {"pg_loss": own.terms["pg_loss"] * weights})

    return Variant(arithmetic=WrongLosses(losses))


def _current_weight(block: Block) -> Iterable[Told]:
    if setting(block, "loss.correction") != "none":
        yield Told(_weighed_with(block, lambda columns: columns["log_probs"]))


def _inverse_weight(block: Block) -> Iterable[Told]:
    if setting(block, "loss.correction") != "none":
        yield Told(
            _weighed_with(
                block, lambda columns: 2 * columns["rollout_log_probs"] - columns["old_log_probs"]
            )
        )


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


def _rejects(block: Block) -> bool:
    own = block.settings.loss
    return bool(own.rejection) or own.veto is not None or own.m2_threshold is not None


def _rejection_off(block: Block) -> Iterable[Told]:
    if _rejects(block):
        changes: dict[str, object] = {
            "loss.rejection": {},
            "loss.veto": None,
            "loss.m2_threshold": None,
        }
        yield Told(Variant({**changes, "loss.rejection_denominator": "original"}))


def _rejection_denominator(block: Block) -> Iterable[Told]:
    if _rejects(block):
        words = {"original": "all trained tokens", "kept": "the tokens that were kept"}
        for one, said in words.items():
            if one != setting(block, "loss.rejection_denominator"):
                yield Told(Variant({"loss.rejection_denominator": one}), said)


def _correction_norm(block: Block) -> Iterable[Told]:
    if setting(block, "loss.correction") == "none":
        return
    words = {"none": "as they are", "token": "over their mean", "sequence": "over that of samples"}
    for one, said in words.items():
        if one != setting(block, "loss.correction_norm"):
            yield Told(Variant({"loss.correction_norm": one}), said)


FAULTS = (
    fault(
        "other-batch",
        "statistics of a step for those of a rollout, or the other way round",
        "the loss with weights over their mean {}",
        "layout.batch",
        other_batch,
    ),
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
        "weight-of-current",
        "correction weight from the current policy",
        "the loss weighted by current against rollout log-probs",
        "the numerator of the weight: old, not current log-probs",
        _current_weight,
        "K-043",
        "https://github.com/THUDM/slime/pull/179",
        touches=("pg_loss", "loss"),
    ),
    fault(
        "weight-inverted",
        "correction weight upside down",
        "the loss weighted by rollout against old log-probs",
        "the order of the operands: old less rollout",
        _inverse_weight,
        touches=("pg_loss", "loss"),
    ),
    fault(
        "correction",
        "another correction for the rollout",
        "the loss with {}",
        "loss.correction and loss.correction_bounds",
        _correction,
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
        "kl-unstated",
        "a KL loss that the settings do not state",
        "the loss and {}",
        "loss.kl_loss_coef",
        _kl_unstated,
        "K-061",
        touches=("loss",),
    ),
    fault(
        "sequence-clip-off",
        "off-policy mask not applied",
        "the loss without the mask of off-policy samples",
        "loss.opsm_delta",
        under(loss__opsm_delta=None),
    ),
    fault(
        "rejection-off",
        "rejection of off-policy tokens not applied",
        "the loss of all trained tokens, none rejected",
        "loss.rejection, loss.veto and loss.m2_threshold",
        _rejection_off,
    ),
    fault(
        "rejection-denominator",
        "rejected tokens in the denominator, or not",
        "the loss divided by {}",
        "loss.rejection_denominator: verl changes the mask, MIS and AReaL do not",
        _rejection_denominator,
    ),
    fault(
        "correction-norm",
        "correction weights over their mean, or not",
        "the loss with correction weights {}",
        "loss.correction_norm",
        _correction_norm,
        touches=("pg_loss", "loss"),
    ),
)
