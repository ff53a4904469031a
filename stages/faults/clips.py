"""Known ways to clip the policy loss wrong: bounds, sides, ratios, surrogates."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from trajreplay.schema.settings import Settings
from trajreplay.stages.block import Block
from trajreplay.stages.compose import PolicyTerms, rollout_weights
from trajreplay.stages.counterfactuals.variants import Variant
from trajreplay.stages.faults.fault import (
    Told,
    WrongLosses,
    each,
    setting,
)
from trajreplay.stages.faults.policy import CLIPPED, STAGE, Columns, fault, inputs, own_terms
from trajreplay.stages.faults.solved import TWO_DIGITS, Misses, solved, together

_UNBOUNDED = 1e30
# Scalars that show a bound best.
_CLIPPED = ("pg_loss", "loss")
# Bounds as people choose them.
_EPSILONS = tuple(one for one in TWO_DIGITS if 1e-4 <= one <= 10.0)
_DUALS = tuple(one for one in TWO_DIGITS if 1.0 < one <= 50.0)


def _eps(block: Block) -> Iterable[Told]:
    own = (setting(block, "loss.eps_clip"), setting(block, "loss.eps_clip_high"))
    tried = {(own[1], own[0]), (own[0], own[0]), (own[1], own[1])}
    tried |= {(low, high) for low in (0.1, 0.2, 0.3) for high in (0.1, 0.2, 0.28, 0.3)}
    for low, high in sorted(tried - {own}):
        yield _bounded_by(low, high)


def _bounded_by(low: float, high: float) -> Told:
    changes = {"loss.eps_clip": low, "loss.eps_clip_high": high}
    return Told(Variant(changes), f"{low:g} below and {high:g} above")


def _eps_solved(block: Block) -> Iterable[Told]:
    """Either bound, or one for both sides: the loss falls as a bound lets more through."""
    misses = Misses(block, STAGE, CLIPPED)
    if not misses.wrong <= {*CLIPPED}:
        return
    own = (setting(block, "loss.eps_clip"), setting(block, "loss.eps_clip_high"))
    ways: tuple[Callable[[float], Told], ...] = (
        lambda one: _bounded_by(one, one),
        lambda one: _bounded_by(own[0], one),
        lambda one: _bounded_by(one, own[1]),
    )
    dual = setting(block, "loss.dual_clip")
    turns = () if dual is None else (abs(dual - 1.0), abs(1.0 - 1.0 / dual))
    for way in ways:
        changed = lambda one, way=way: way(one).variant  # noqa: E731
        yield from map(way, misses.between(changed, _EPSILONS, turns))


def _one_sided(block: Block) -> Iterable[Told]:
    own = (setting(block, "loss.eps_clip"), setting(block, "loss.eps_clip_high"))
    for pair, detail in (
        ((_UNBOUNDED, _UNBOUNDED), "neither above nor below"),
        ((_UNBOUNDED, own[1]), "above only"),
        ((own[0], _UNBOUNDED), "below only"),
    ):
        yield Told(Variant({"loss.eps_clip": pair[0], "loss.eps_clip_high": pair[1]}), detail)


def _clip_with(choose: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Callable[[Block], Variant]:
    """The variant whose clipped loss is chosen otherwise: from plain, bounded and advantage."""

    def variant(block: Block) -> Variant:
        def losses(
            settings: Settings, columns: Columns, mask: Tensor, offsets: Tensor
        ) -> PolicyTerms:
            loss, own = settings.loss, own_terms(block, settings, columns, mask, offsets)
            if "ppo_kl" not in own.terms:
                return own
            ratio = (-own.terms["ppo_kl"]).exp()
            high = loss.eps_clip if loss.eps_clip_high is None else loss.eps_clip_high
            a = columns["advantages"]
            bounded = -a * ratio.clamp(1 - loss.eps_clip, 1 + high)
            chosen = choose(-a * ratio, bounded, a)
            weights = rollout_weights(loss, inputs(block, columns, mask, offsets))
            weighted = chosen if weights is None else chosen * weights
            return own._replace(terms=own.terms | {"pg_loss": weighted})

        return Variant(arithmetic=WrongLosses(losses))

    return variant


def _is_clip(block: Block) -> bool:
    return (setting(block, "loss.surrogate"), setting(block, "loss.ratio")) == ("ppo-clip", "token")


def _dual_on_positive(block: Block) -> Iterable[Told]:
    if not _is_clip(block):
        return
    stated = setting(block, "loss.dual_clip")
    for c in dict.fromkeys([stated or 3.0, 3.0, 2.0]):
        wrong = _clip_with(
            lambda plain, bounded, a, c=c: torch.minimum(torch.maximum(plain, bounded), -c * a)  # type: ignore[misc]
        )
        negative = _clip_with(
            lambda plain, bounded, a, c=c: torch.where(  # type: ignore[misc]
                a < 0, torch.maximum(plain, bounded), -c * a
            )
        )
        yield Told(wrong(block), f"{c:g}")
        yield Told(negative(block), f"{c:g}, and only there,")


def _lower_bound(block: Block) -> Iterable[Told]:
    if _is_clip(block):
        yield Told(_clip_with(lambda plain, bounded, a: torch.minimum(plain, bounded))(block))


def _bounded_alone(block: Block) -> Iterable[Told]:
    if _is_clip(block):
        yield Told(_clip_with(lambda plain, bounded, a: bounded)(block))


def _ratio(block: Block) -> Iterable[Told]:
    names = {
        "token": "of each token",
        "sequence-mean": "of the mean log ratio of the sample",
        "sequence-sum": "of the summed log ratio of the sample",
        "one": "of 1",
    }
    for one, what in names.items():
        if one != setting(block, "loss.ratio"):
            yield Told(Variant({"loss.ratio": one}), what)


def _surrogate(block: Block) -> Iterable[Told]:
    known = ("ppo-clip", "cispo", "sapo", "gmpo", "vespo", "reinforce", "dppo")
    for one in known:
        if one != setting(block, "loss.surrogate"):
            changes: dict[str, object] = {"loss.surrogate": one}
            if one != "ppo-clip":
                changes["loss.dual_clip"] = None
            yield Told(Variant(changes), one)
    for bounds in ("two-sided", "by-sign", "upper-absolute"):
        chosen = setting(block, "loss.surrogate") == "cispo"
        if chosen and bounds != setting(block, "loss.cispo_bounds"):
            yield Told(Variant({"loss.cispo_bounds": bounds}), f"cispo with bounds {bounds}")


def _dual(block: Block) -> Iterable[Told]:
    own = setting(block, "loss.dual_clip")
    for c in (None, 3.0, 2.0, 5.0):
        if c != own:
            yield Told(Variant({"loss.dual_clip": c}), "no dual clip" if c is None else f"{c:g}")


FAULTS = (
    fault(
        "clip-bounds",
        "other clip bounds",
        "the loss clipped at {}",
        "loss.eps_clip and loss.eps_clip_high; TRL's epsilon_high is absolute for CISPO",
        together(_eps, _eps_solved),
        touches=CLIPPED,
    ),
    fault(
        "clip-sides",
        "clipped on one side, or not at all",
        "the loss clipped {}",
        "the clamp of the ratio",
        _one_sided,
        touches=CLIPPED,
    ),
    fault(
        "dual-clip",
        "another dual clip",
        "the loss with the dual clip {}",
        "loss.dual_clip: 3 by default in verl, off elsewhere",
        together(_dual, solved("loss.dual_clip", STAGE, _CLIPPED, _DUALS)),
        touches=CLIPPED,
    ),
    fault(
        "dual-clip-positive",
        "dual clip applied to positive advantages",
        "the loss with the bound {} times A at positive advantages too",
        "the condition A < 0 of the dual clip",
        _dual_on_positive,
        "K-051",
        "https://github.com/THUDM/slime/commit/2b10784d862ce8b15153c9096f9cab5d693bca73",
        touches=CLIPPED,
    ),
    fault(
        "optimistic",
        "the smaller instead of the larger of the two losses",
        "the smaller of plain and clipped loss",
        "max of losses against min of objectives",
        _lower_bound,
        touches=CLIPPED,
    ),
    fault(
        "clipped-alone",
        "only the clipped loss",
        "the clipped loss alone, whatever the plain one is",
        "the maximum of plain and clipped loss",
        _bounded_alone,
        touches=CLIPPED,
    ),
    fault(
        "ratio",
        "another ratio",
        "the loss with the ratio {}",
        "loss.ratio: of tokens, or of the mean or the sum over a sample",
        _ratio,
        "K-046",
        "https://github.com/NVIDIA-NeMo/RL/pull/2269",
    ),
    fault(
        "log-ratio-clamp",
        "another clamp of the log ratio",
        "the loss with log ratios {}",
        "loss.log_ratio_clamp",
        each(
            "loss.log_ratio_clamp",
            (None, (-20.0, 20.0)),
            {None: "that are not clamped", (-20.0, 20.0): "clamped to -20 and 20"}.__getitem__,
        ),
    ),
    fault(
        "surrogate",
        "another surrogate",
        "the loss by the surrogate {}",
        "loss.surrogate",
        _surrogate,
    ),
)
