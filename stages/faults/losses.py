"""Known ways to get the policy loss wrong: clips, ratios, columns, masks and signs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from trajreplay.schema.settings import Settings, with_changes
from trajreplay.stages.block import Block
from trajreplay.stages.capability import LOG_PROB_SOURCES
from trajreplay.stages.compose import LossInputs, policy_terms, rollout_weights
from trajreplay.stages.faults.fault import (
    Fault,
    Told,
    Tries,
    WrongLosses,
    each,
    held,
    setting,
    under,
)
from trajreplay.stages.faults.tokens import shifted
from trajreplay.stages.kernels import whiten
from trajreplay.stages.variants import Variant

STAGE = "loss.policy"
_UNBOUNDED = 1e30
Columns = Mapping[str, Tensor]
Terms = dict[str, Tensor]


def own_terms(
    block: Block, settings: Settings, columns: Columns, mask: Tensor, offsets: Tensor
) -> Terms:
    """The terms that the settings give."""
    found = policy_terms(settings.loss, _inputs(block, columns, mask, offsets))
    kept = found.summed | ~mask  # what is masked is left out anyway, and its NaN may be looked for
    return {name: torch.where(kept, one, 0.0) for name, one in found.terms.items()}


def _inputs(block: Block, columns: Columns, mask: Tensor, offsets: Tensor) -> LossInputs:
    batches = block.packed.micro_batches if held(block, "micro_batch_id") else None
    return LossInputs(columns, mask, offsets, batches, block.packed.cohorts)


def changed_terms(block: Block, change: Callable[[Settings, Columns, Terms], Terms]) -> Variant:
    """The variant in which some terms are others."""

    def losses(settings: Settings, columns: Columns, mask: Tensor, offsets: Tensor) -> Terms:
        terms = own_terms(block, settings, columns, mask, offsets)
        return terms | change(settings, columns, terms)

    return Variant(arithmetic=WrongLosses(losses))


def _old(settings: Settings) -> str:
    return LOG_PROB_SOURCES[settings.loss.old_source]


def _eps(block: Block) -> Iterable[Told]:
    own = (setting(block, "loss.eps_clip"), setting(block, "loss.eps_clip_high"))
    tried = {(own[1], own[0]), (own[0], own[0]), (own[1], own[1])}
    tried |= {(low, high) for low in (0.1, 0.2, 0.3) for high in (0.1, 0.2, 0.28, 0.3)}
    for low, high in sorted(tried - {own}):
        changes = {"loss.eps_clip": low, "loss.eps_clip_high": high}
        yield Told(Variant(changes), f"{low:g} below and {high:g} above")


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
        def change(settings: Settings, columns: Columns, terms: Terms) -> Terms:
            loss = settings.loss
            if "ppo_kl" not in terms:
                return {}
            ratio = (-terms["ppo_kl"]).exp()
            high = loss.eps_clip if loss.eps_clip_high is None else loss.eps_clip_high
            a = columns["advantages"]
            plain, bounded = -a * ratio, -a * ratio.clamp(1 - loss.eps_clip, 1 + high)
            return {"pg_loss": choose(plain, bounded, a)}

        return changed_terms(block, change)

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


def _inverted_ratio(block: Block) -> Iterable[Told]:
    old = _old(block.settings)
    if held(block, old, "log_probs"):
        packed = block.packed
        swapped = {"log_probs": packed.tokens(old), old: packed.tokens("log_probs")}
        yield Told(Variant(columns=swapped))


def _columns(block: Block) -> Iterable[Told]:
    """Log-probs of another model or time in the place of the old or current ones."""
    names = ("rollout_log_probs", "old_log_probs", "log_probs", "ref_log_probs")
    old = _old(block.settings)
    for target in (old, "log_probs"):
        for other in names:
            if other != target and held(block, target, other):
                values = block.packed.tokens(other)
                yield Told(Variant(columns={target: values}), f"{other} for {target}")


def _shifted(block: Block) -> Iterable[Told]:
    for name in (_old(block.settings), "log_probs", "advantages", "ref_log_probs", "entropy"):
        if held(block, name):
            for by, word in ((1, "late"), (-1, "early")):
                values = shifted(block.packed.tokens(name), block.packed.offsets, by)
                yield Told(Variant(columns={name: values}), f"{name} one token {word}")


def _mask(block: Block) -> Iterable[Told]:
    packed = block.packed
    mask = packed.mask
    if not bool(mask.all()):
        yield Told(Variant(columns={"loss_mask": torch.ones_like(mask)}), _EVERY)
        yield Told(Variant(columns={"loss_mask": ~mask}), "the inverted mask")
        for by, word in ((1, "late"), (-1, "early")):
            moved = shifted(mask, packed.offsets, by)
            yield Told(Variant(columns={"loss_mask": moved}), f"the mask one token {word}")
            zeroed = moved.clone()
            border = (packed.offsets[:-1] if by > 0 else packed.offsets[1:] - 1)[packed.lengths > 0]
            zeroed[border] = False
            yield Told(Variant(columns={"loss_mask": zeroed}), f"the mask one token {word}, and 0")
            rolled = torch.roll(mask, by)
            yield Told(Variant(columns={"loss_mask": rolled}), f"the packed mask one token {word}")
    for first, word in ((True, "first"), (False, "last")):
        kept = mask.clone()
        kept[(packed.offsets[:-1] if first else packed.offsets[1:] - 1)[packed.lengths > 0]] = False
        if not torch.equal(kept, mask):
            yield Told(Variant(columns={"loss_mask": kept}), f"the mask without the {word} tokens")


_EVERY = "the attention mask: every token of the response"


def _advantages(block: Block) -> Iterable[Told]:
    packed = block.packed
    values = packed.tokens("advantages")
    yield Told(Variant(columns={"advantages": -values}), "the opposite advantages")
    owner = torch.arange(len(packed.lengths)).repeat_interleave(packed.lengths)
    for name in ("reward", "raw_reward"):
        if held(block, name):
            given = packed.scalars(name)[owner]
            yield Told(Variant(columns={"advantages": given}), f"the {name} of the sample")
    if held(block, "returns"):
        yield Told(Variant(columns={"advantages": packed.tokens("returns")}), "the returns")
    if int(packed.mask.sum()) > 1 and bool(torch.isfinite(values).all()):
        white = whiten(values, packed.mask, set_index=packed.cohorts[owner], short="keep")
        yield Told(Variant(columns={"advantages": white}), "advantages that were whitened again")
        means = torch.zeros(len(packed.lengths), dtype=torch.float64)
        means.scatter_reduce_(0, owner, values, "mean", include_self=False)
        yield Told(Variant(columns={"advantages": means[owner]}), "the mean over each sample")
        sums = torch.zeros_like(means).scatter_add_(0, owner, values)
        trained = torch.zeros_like(means).scatter_add_(0, owner, packed.weights)
        over = (sums / trained.clamp(1))[owner]
        detail = "the sum over all tokens of a sample, masked ones too, by its trained tokens"
        yield Told(Variant(columns={"advantages": over}), detail)


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

    def losses(settings: Settings, columns: Columns, mask: Tensor, offsets: Tensor) -> Terms:
        plain = with_changes(settings, {"loss.correction": "none"})
        terms = own_terms(block, plain, columns, mask, offsets)
        changed = {**columns, "old_log_probs": old(columns)}
        weights = rollout_weights(settings.loss, _inputs(block, changed, mask, offsets))
        return terms if weights is None else terms | {"pg_loss": terms["pg_loss"] * weights}

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
            if any(setting(block, name) != one for name, one in changes.items()):
                bound = "" if clamp is None else ", clamped to -10 and 10"
                yield Told(Variant(changes), f"by the estimator {estimator}{bound}")
    weighted = setting(block, "loss.kl_loss_weighted")
    word = "not weighted" if weighted else "weighted by the ratio"
    yield Told(Variant({"loss.kl_loss_weighted": not weighted}), word)


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


def _temperature(block: Block) -> Iterable[Told]:
    old = _old(block.settings)
    if held(block, old, "log_probs"):
        for value in (0.5, 0.6, 0.7, 0.8, 0.9, 1.2):
            for name in (old, "log_probs"):
                scaled = block.packed.tokens(name) / value
                yield Told(Variant(columns={name: scaled}), f"{name} divided by {value:g}")


def fault(name: str, known: str, sentence: str, look: str, tries: Tries, *references: str) -> Fault:
    """A fault of this stage."""
    return Fault(f"loss.{name}", known, STAGE, sentence, look, references, tries)


FAULTS = (
    fault(
        "old-source",
        "old log-probs from elsewhere",
        "the loss with the {} log-probs in the denominator of the ratio",
        "which log-probs are stored as old ones; loss.old_source",
        each("loss.old_source", ("old", "rollout")),
        "K-069",
        "https://github.com/radixark/miles/pull/1829",
    ),
    fault(
        "mask",
        "another mask",
        "the loss over {}",
        "where the loss mask is made, shifted and sliced; attention mask against loss mask",
        _mask,
        "K-013",
        "K-038",
        "https://github.com/verl-project/verl/pull/2543",
    ),
    fault(
        "entropy",
        "entropy bonus with the wrong sign, or none",
        "the loss with the entropy bonus {}",
        "the sign of the bonus: it is subtracted from a loss; loss.entropy_coef",
        _entropy,
        "K-068",
        "https://github.com/nebuly-ai/optimate/pull/250",
    ),
    fault(
        "kl-sign",
        "KL loss subtracted in a minimisation",
        "the loss with its KL term {}",
        "the sign of the KL term: it is added to a loss; loss.kl_loss_coef",
        _kl_loss,
        "K-061",
        "https://github.com/verl-project/verl/pull/179",
    ),
    fault(
        "clip-bounds",
        "other clip bounds",
        "the loss clipped at {}",
        "loss.eps_clip and loss.eps_clip_high; TRL's epsilon_high is absolute for CISPO",
        _eps,
    ),
    fault(
        "clip-sides",
        "clipped on one side, or not at all",
        "the loss clipped {}",
        "the clamp of the ratio",
        _one_sided,
    ),
    fault(
        "dual-clip",
        "another dual clip",
        "the loss with the dual clip {}",
        "loss.dual_clip: 3 by default in verl, off elsewhere",
        _dual,
    ),
    fault(
        "dual-clip-positive",
        "dual clip applied to positive advantages",
        "the loss with the bound {} times A at positive advantages too",
        "the condition A < 0 of the dual clip",
        _dual_on_positive,
        "K-051",
        "https://github.com/THUDM/slime/commit/2b10784d862ce8b15153c9096f9cab5d693bca73",
    ),
    fault(
        "optimistic",
        "the smaller instead of the larger of the two losses",
        "the smaller of plain and clipped loss",
        "max of losses against min of objectives",
        _lower_bound,
    ),
    fault(
        "clipped-alone",
        "only the clipped loss",
        "the clipped loss alone, whatever the plain one is",
        "the maximum of plain and clipped loss",
        _bounded_alone,
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
        "weight-of-current",
        "correction weight from the current policy",
        "the loss weighted by current against rollout log-probs",
        "the numerator of the weight: old, not current log-probs",
        _current_weight,
        "K-043",
        "https://github.com/THUDM/slime/pull/179",
    ),
    fault(
        "weight-inverted",
        "correction weight upside down",
        "the loss weighted by rollout against old log-probs",
        "the order of the operands: old less rollout",
        _inverse_weight,
    ),
    fault(
        "inverted-ratio",
        "old and current log-probs exchanged",
        "the loss with old and current log-probs exchanged",
        "the order of the operands: current less old",
        _inverted_ratio,
    ),
    fault(
        "columns",
        "log-probs of another model or time",
        "the loss with {}",
        "which log-probs are handed to the loss, and when they were recomputed",
        _columns,
        "K-069",
    ),
    fault(
        "advantages",
        "other advantages",
        "the loss with {}",
        "what the loss is handed as advantages",
        _advantages,
        "K-029",
        "https://github.com/areal-project/AReaL/pull/1346",
    ),
    fault(
        "shifted",
        "a column shifted by a token",
        "the loss with {}",
        "slices [:-1] and [1:] of logits, tokens and masks",
        _shifted,
        "K-037",
        "https://github.com/PrimeIntellect-ai/prime-rl/pull/605",
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
    ),
    fault(
        "kl-unstated",
        "a KL loss that the settings do not state",
        "the loss and {}",
        "loss.kl_loss_coef",
        _kl_unstated,
        "K-061",
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
    fault(
        "temperature",
        "log-probs scaled on one side of the ratio",
        "the loss with {}",
        "the temperature of sampler and trainer",
        _temperature,
        "K-031",
        "https://github.com/huggingface/trl/issues/4159",
    ),
    fault(
        "sequence-clip-off",
        "off-policy mask not applied",
        "the loss without the mask of off-policy samples",
        "loss.opsm_delta",
        under(loss__opsm_delta=None),
    ),
)
