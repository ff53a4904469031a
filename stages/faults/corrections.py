"""Known ways to correct the policy loss for its sampler wrong: weights, masks, rejections."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from trajreplay.schema.settings import Settings, with_changes
from trajreplay.stages.block import Block
from trajreplay.stages.compose import PolicyTerms, rollout_weights
from trajreplay.stages.counterfactuals.variants import Variant
from trajreplay.stages.faults.fault import (
    Told,
    WrongLosses,
    held,
    other_batch,
    setting,
    under,
)
from trajreplay.stages.faults.policy import STAGE, Columns, fault, inputs, own_terms
from trajreplay.stages.faults.solved import TWO_DIGITS, Misses

_UNBOUNDED = 1e30
_BOUNDS = ((0.0, 2.0), (0.0, 3.0), (0.0, 5.0), (0.5, 2.0), (0.5, 5.0))
_UPPER = tuple(one for one in TWO_DIGITS if 0.1 <= one <= 50.0)
_LOWER = tuple(one for one in TWO_DIGITS if 0.01 <= one <= 1.0)


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
        for pair in _BOUNDS:
            if pair != bounds:
                yield _bounded_by(*pair)
        misses = Misses(block, STAGE, ("pg_loss", "loss"))
        for one in misses.between(lambda one: _bounded_by(bounds[0], one).variant, _UPPER):
            yield _bounded_by(bounds[0], one)
        for one in misses.between(lambda one: _bounded_by(one, bounds[1]).variant, _LOWER):
            yield _bounded_by(one, bounds[1])


def _bounded_by(low: float, high: float) -> Told:
    changes = {"loss.correction_bounds": (low, high)}
    return Told(Variant(changes), f"the weight in {low:g} to {high:g}")


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
