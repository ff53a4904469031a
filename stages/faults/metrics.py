"""Known ways to record scalars of the policy loss wrong: metrics, NaN, dtypes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial

import torch

from trajreplay.schema.settings import Settings
from trajreplay.stages.block import Block
from trajreplay.stages.counterfactuals.variants import Variant
from trajreplay.stages.faults.fault import (
    Told,
    held,
    setting,
)
from trajreplay.stages.faults.policy import (
    STAGE,
    Columns,
    Terms,
    changed_terms,
    fault,
    own_terms,
    trained_tokens,
)
from trajreplay.stages.faults.precision import (
    computed_in,
    computing_dtypes,
    recorded_scalars,
    rounding_dtypes,
)


def _metrics(block: Block) -> Iterable[Told]:
    def outside(settings: Settings, columns: Columns, terms: Terms) -> Terms:
        ratio = (-terms["ppo_kl"]).exp()
        loss = settings.loss
        high = loss.eps_clip if loss.eps_clip_high is None else loss.eps_clip_high
        out = (ratio < 1 - loss.eps_clip) | (ratio > 1 + high)
        return {"pg_clipfrac": out.to(ratio.dtype)}

    def zero(settings: Settings, columns: Columns, terms: Terms) -> Terms:
        return {"pg_clipfrac": torch.zeros_like(terms["pg_loss"])}

    def one(settings: Settings, columns: Columns, terms: Terms) -> Terms:
        return {"pg_clipfrac": torch.ones_like(terms["pg_loss"])}

    def opposite(settings: Settings, columns: Columns, terms: Terms) -> Terms:
        return {"ppo_kl": -terms["ppo_kl"]}

    def square(settings: Settings, columns: Columns, terms: Terms) -> Terms:
        return {"ppo_kl": terms["ppo_kl"] ** 2 / 2}

    def k3(settings: Settings, columns: Columns, terms: Terms) -> Terms:
        return {"ppo_kl": torch.expm1(-terms["ppo_kl"]) + terms["ppo_kl"]}

    def rollout(settings: Settings, columns: Columns, terms: Terms) -> Terms:
        packed = block.packed
        gap = packed.tokens("rollout_log_probs") - packed.tokens("log_probs")
        return {"ppo_kl": gap.to(terms["pg_loss"].dtype)}

    if "ppo_kl" not in _fields(block):
        return
    yield Told(changed_terms(block, zero), "a clip fraction of 0")
    yield Told(changed_terms(block, outside), "a clip fraction of all ratios outside the bounds")
    yield Told(changed_terms(block, one), "a clip fraction of 1")
    yield Told(changed_terms(block, opposite), "the ppo_kl with the opposite sign")
    yield Told(changed_terms(block, square), "the ppo_kl as half the squared log ratio")
    yield Told(changed_terms(block, k3), "the ppo_kl by k3")
    if held(block, "rollout_log_probs", "log_probs"):
        yield Told(changed_terms(block, rollout), "the ppo_kl against the rollout log-probs")


def _fields(block: Block) -> set[str]:
    loss = block.settings.loss
    return set() if loss.surrogate == "reinforce" else {"ppo_kl"}


def _nan(block: Block) -> Iterable[Told]:
    """Why a scalar that has a value was recorded as NaN."""
    bad = {
        one.field
        for entry in block.cohorts[0].owners
        for one in entry.outputs
        if one.stage == STAGE and one.value is not None and one.value != one.value
    }
    if not bad:
        return
    packed = block.packed
    trained, owner = trained_tokens(block)
    empty = ((trained == 0) & (packed.lengths > 0))[owner]

    def leaked(settings: Settings, columns: Columns, terms: Terms) -> Terms:
        made: Terms = {}
        for name in bad & set(terms):
            odd = torch.zeros(len(packed.lengths), dtype=torch.bool)
            odd[owner[~torch.isfinite(terms[name])]] = True
            made[name] = torch.where(odd[owner], torch.nan, terms[name])
        return made

    def divided(settings: Settings, columns: Columns, terms: Terms) -> Terms:
        return {
            name: torch.where(empty, torch.nan if name in bad else 0.0, one)
            for name, one in terms.items()
        }

    if not bool(packed.mask.all()):
        yield Told(changed_terms(block, leaked), "NaN: a masked token that is not finite, times 0")
    if bool(empty.any()):
        over = replace(changed_terms(block, divided), columns={"loss_mask": packed.mask | empty})
        yield Told(over, "NaN: 0 / 0, the mean over the tokens of a sample that has none to train")


def _infinite_weight(block: Block) -> Iterable[Told]:
    """A mask that multiplies a weight which float32 cannot hold."""
    if setting(block, "loss.correction") == "none":
        return
    if not held(block, "old_log_probs", "rollout_log_probs"):
        return
    packed, (_, owner) = block.packed, trained_tokens(block)
    gap = packed.tokens("old_log_probs") - packed.tokens("rollout_log_probs")
    odd = torch.isinf(gap.float().exp()) & packed.mask
    if not bool(odd.any()):
        return
    rows = torch.zeros(len(packed.lengths), dtype=torch.bool)
    rows[owner[odd]] = True

    def overflowing(settings: Settings, columns: Columns, terms: Terms) -> Terms:
        # What float32 cannot hold is infinite elsewhere too, such as in a KL of the same weight.
        narrow = {name: one.float().to(one.dtype) for name, one in terms.items()}
        return narrow | {"pg_loss": torch.where(rows[owner], torch.nan, terms["pg_loss"])}

    yield Told(changed_terms(block, overflowing))


def _precision(block: Block) -> Iterable[Told]:
    names = [
        one
        for one in ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "entropy")
        if held(block, one)
    ]
    for dtype, label in computing_dtypes(recorded_scalars(block, STAGE)):
        yield Told(computed_in(dtype, partial(own_terms, block)), f"token losses in {label}")
    for dtype, label in rounding_dtypes():
        narrow = {one: block.packed.tokens(one).to(dtype).double() for one in names}
        yield Told(Variant(columns=narrow), f"log-probs in {label}")
        for one in names:
            yield Told(Variant(columns={one: narrow[one]}), f"{one} in {label}")
        advantages = block.packed.tokens("advantages").to(dtype).double()
        yield Told(Variant(columns={"advantages": advantages}), f"advantages in {label}")


FAULTS = (
    fault(
        "metric",
        "a metric by another definition",
        "{}",
        "the definition of the metric; the loss itself may be right",
        _metrics,
        "K-053",
        "https://github.com/verl-project/verl/pull/972",
    ),
    fault(
        "nan",
        "0 times NaN, or 0 / 0",
        "{}",
        "masks applied by multiplication, means without a guard for no tokens",
        _nan,
        "K-064",
        "K-065",
        "https://github.com/NovaSky-AI/SkyRL/pull/1635",
    ),
    fault(
        "infinite-weight",
        "sequence mask times an infinite weight",
        "NaN where a weight that float32 cannot hold is masked by 0",
        "masks applied by multiplication: choose with where, or clamp the exponent",
        _infinite_weight,
        "K-044",
        "https://github.com/OpenRLHF/OpenRLHF/issues/1295",
    ),
    fault(
        "precision",
        "the loss in reduced precision",
        "the loss of {}",
        "dtype of what the loss is handed",
        _precision,
        "K-039",
        "K-050",
        "https://github.com/OpenRLHF/OpenRLHF/pull/634",
    ),
)
