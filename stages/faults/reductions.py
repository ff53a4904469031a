"""Known ways to add token losses up wrong: denominators, factors, metrics, NaN and dtypes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from trajreplay.schema.settings import Settings
from trajreplay.stages.block import Block
from trajreplay.stages.faults.fault import Told, each, held, setting
from trajreplay.stages.faults.losses import STAGE, Columns, Terms, changed_terms, fault
from trajreplay.stages.kernels import scatter_sum
from trajreplay.stages.variants import Variant

_COEFS = ("pg_loss", "entropy_loss", "kl_loss")


def _weighted(block: Block, weights: Tensor, *, loss_only: bool) -> Variant:
    """Every term, or only the loss, times a weight of each token."""

    def change(settings: Settings, columns: Columns, terms: Terms) -> Terms:
        loss = settings.loss
        if not loss_only:
            return {name: one * weights.to(one.dtype) for name, one in terms.items()}
        total = terms["pg_loss"]
        if "entropy_loss" in terms:
            total = total - loss.entropy_coef * terms["entropy_loss"]
        if "kl_loss" in terms:
            total = total + loss.kl_loss_coef * terms["kl_loss"]
        return {"loss": total * weights.to(total.dtype)}

    return changed_terms(block, change)


def _both(block: Block, weights: Tensor, detail: str) -> Iterable[Told]:
    if bool((weights != 1).any()) and bool(torch.isfinite(weights).all()):
        yield Told(_weighted(block, weights, loss_only=False), detail)
        yield Told(_weighted(block, weights, loss_only=True), f"{detail}, the loss alone")


def _trained(block: Block) -> tuple[Tensor, Tensor]:
    """Trainable tokens of each sample, and the sample of each token."""
    packed = block.packed
    owner = torch.arange(len(packed.lengths)).repeat_interleave(packed.lengths)
    return scatter_sum(packed.weights, owner, len(packed.lengths)), owner


def _by_parts(block: Block) -> Iterable[Told]:
    """A mean of the means of ranks or micro-batches instead of one mean over all."""
    packed = block.packed
    trained, owner = _trained(block)
    parts = {"rank": (packed.cohort_ranks, torch.zeros_like(packed.cohort_ranks))}
    if held(block, "micro_batch_id"):
        zeros = torch.zeros_like(packed.micro_batches)
        parts["micro-batch"] = (packed.micro_batches, zeros)
        parts["micro-batch of a rank"] = (packed.micro_batches, packed.cohort_ranks)
    by_tokens = setting(block, "loss.aggregation") == "token-mean"
    stated = _stated_denominator(block)
    for what, (part, whole) in parts.items():
        for counts, told in ((trained, "tokens"), (torch.ones_like(trained), "samples")):
            if told == "samples" and by_tokens:
                continue
            own = scatter_sum(counts, part, int(part.max()) + 1)
            every = scatter_sum(counts, whole, int(whole.max()) + 1)
            pairs = torch.unique(torch.stack([part, whole]), dim=1)
            number = torch.bincount(pairs[1], minlength=len(every)).double()
            weights = every[whole] / (number[whole] * own[part].clamp(1))
            yield from _both(block, weights[owner], f"{what} by its own {told}")
            if stated is not None:
                weights = stated / own[part].clamp(1)
                detail = f"{what} by its own {told}, not by the {stated:g} that are stated"
                yield from _both(block, weights[owner], detail)


def _stated_denominator(block: Block) -> float | None:
    """What the recorded scalars say that they were divided by, where they agree."""
    (cohort,) = block.cohorts
    outputs = [one for entry in cohort.owners for one in entry.outputs if one.stage == STAGE]
    found = {one.denominator for one in outputs if one.values is None}
    return next(iter(found)) if len(found) == 1 else None


def _per_token(block: Block) -> Iterable[Told]:
    """Denominators that count masked tokens, or none."""
    packed = block.packed
    trained, owner = _trained(block)
    lengths = packed.lengths.double()
    by_tokens = setting(block, "loss.aggregation") == "token-mean"
    if by_tokens:
        ratio = (trained.sum() / lengths.sum().clamp(1)).expand(len(owner))
    else:
        ratio = (trained.clamp(1) / lengths.clamp(1))[owner]
    yield from _both(block, ratio, "all response tokens, masked ones too")
    if not by_tokens and len(lengths):
        longest = (trained.clamp(1) / lengths.max().clamp(1))[owner]
        yield from _both(block, longest, "the longest response")


def _dropped(block: Block) -> Iterable[Told]:
    trained, owner = _trained(block)
    by_tokens = setting(block, "loss.aggregation") == "token-mean"
    count = trained.sum().expand(len(owner)) if by_tokens else trained.clamp(1)[owner]
    yield from _both(block, count, "1")


def _aggregation(block: Block) -> Iterable[Told]:
    longest = float(block.packed.lengths.max()) if len(block.packed.lengths) else 1.0
    for one in ("seq-mean-token-mean", "token-mean", "seq-mean-token-sum"):
        if one != setting(block, "loss.aggregation"):
            yield Told(Variant({"loss.aggregation": one}), one)
    if setting(block, "loss.aggregation") != "constant-norm":
        changes = {"loss.aggregation": "constant-norm", "loss.constant_norm": longest}
        yield Told(Variant(changes), "constant-norm by the longest response")


def _factor_words(block: Block) -> dict[float, str]:
    """Numbers of this cohort that a loss is divided or multiplied by, and what they count."""
    (cohort,) = block.cohorts
    owners = cohort.owners
    context = max(one.parallel.context_size for one in owners)
    found: dict[float, str] = {}
    counts = {
        "the micro-batches of a rank": len({one for _, one in cohort.micro_batches if one}),
        "the micro-batches": sum(one is not None for _, one in cohort.micro_batches),
        "the ranks": len({one.key.rank for one in owners}),
        "the context-parallel ranks": context,
        "the samples": sum(cohort.rows.values()),
        "the data-parallel ranks": max(one.parallel.data_size for one in owners),
    }
    for what, count in counts.items():
        if count > 1:
            known = found.get(float(count))
            found[float(count)] = f"{known} or {what}" if known else what
    return found


def _factors(block: Block) -> Iterable[Told]:
    """A factor between what was recorded and what is right, where it is a plausible one."""
    from trajreplay.stages.values import recompute
    from trajreplay.stages.variants import varied

    words = _factor_words(block)
    own = varied(block, Variant(), (STAGE,))
    differing = [one for one in recompute(own, STAGE) if bool(one.disagree.any())]
    ratios = torch.cat(
        [(one.recorded / one.recomputed)[one.disagree] for one in differing]
        or [torch.zeros(0, dtype=torch.float64)]
    )
    finite = ratios[torch.isfinite(ratios) & (ratios > 0)]
    if len(finite) != len(ratios) or not len(ratios):
        return
    factor = float(ratios.median())
    whole = round(factor) if factor > 1 else round(1 / factor)
    exact = float(whole) if factor > 1 else 1 / whole
    if whole < 2 or whole > 65536 or abs(factor / exact - 1) > 1e-4:
        return
    scales = {one.field: exact for one in differing}
    counted = words.get(float(whole), "")
    what = f"{'times' if factor > 1 else 'divided by'} {whole}"
    yield Told(Variant(scales=scales), f"{what}{f', {counted}' if counted else ''}")


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
    trained, owner = _trained(block)
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
    _, owner = _trained(block)

    def overflowing(settings: Settings, columns: Columns, terms: Terms) -> Terms:
        gap = (columns["old_log_probs"] - columns["rollout_log_probs"]).float()
        odd = torch.isinf(gap.exp())
        rows = torch.zeros(len(block.packed.lengths), dtype=torch.bool)
        rows[owner[odd & block.packed.mask]] = True
        return {"pg_loss": torch.where(rows[owner], torch.nan, terms["pg_loss"])}

    yield Told(changed_terms(block, overflowing))


def _precision(block: Block) -> Iterable[Told]:
    names = [
        one
        for one in ("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "entropy")
        if held(block, one)
    ]
    for dtype in (torch.bfloat16, torch.float16):
        label = str(dtype).removeprefix("torch.")
        narrow = {one: block.packed.tokens(one).to(dtype).double() for one in names}
        yield Told(Variant(columns=narrow), f"log-probs in {label}")
        for one in names:
            yield Told(Variant(columns={one: narrow[one]}), f"{one} in {label}")
        advantages = block.packed.tokens("advantages").to(dtype).double()
        yield Told(Variant(columns={"advantages": advantages}), f"advantages in {label}")


FAULTS = (
    fault(
        "parts-averaged",
        "each rank, or micro-batch, divides by its own count",
        "the mean of the losses of each {}",
        "where the token count is reduced over ranks and accumulation steps",
        _by_parts,
        "K-056",
        "https://github.com/PrimeIntellect-ai/prime-rl/pull/2562",
    ),
    fault(
        "denominator-dropped",
        "summed and not averaged: the smaller instead of the larger of token count and 1",
        "the loss with the denominator {}",
        "min against max of the token count and 1",
        _dropped,
        "K-059",
        "https://github.com/PrimeIntellect-ai/prime-rl/pull/816",
    ),
    fault(
        "denominator",
        "tool or truncated tokens in the denominator",
        "the loss divided by {}",
        "which mask the denominator is counted with",
        _per_token,
        "K-060",
        "https://github.com/THUDM/slime/pull/365",
    ),
    fault(
        "factor",
        "divided or multiplied once more",
        "the loss {}",
        "factors of gradient accumulation, data and context parallelism",
        _factors,
        "K-055",
        "K-057",
        "K-066",
        "https://github.com/modelscope/ms-swift/issues/10117",
    ),
    fault(
        "aggregation",
        "another aggregation",
        "the loss aggregated by {}",
        "loss.aggregation",
        _aggregation,
        "K-055",
        "https://github.com/verl-project/verl/issues/3741",
    ),
    fault(
        "denominator-rows",
        "samples without tokens in the denominator",
        "the mean over {} samples",
        "loss.denominator_rows: verl counts those with tokens",
        each("loss.denominator_rows", ("all", "with-tokens")),
    ),
    fault(
        "fragments",
        "denominators of fragments or of trajectories",
        "the mean over tokens of {} trajectory",
        "loss.fragments",
        each(
            "loss.fragments",
            ("own", "shared"),
            {"own": "each fragment, not of its", "shared": "the whole"}.__getitem__,
        ),
    ),
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
