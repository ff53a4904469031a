"""Known ways to take means of a loss, or of terms of it, over other sets than are configured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from trajreplay.stages.block import Block
from trajreplay.stages.counterfactuals.variants import Variant
from trajreplay.stages.faults.fault import Told, setting
from trajreplay.stages.faults.policy import fault

_NAMES = {"entropy": "entropy", "kl_loss": "KL"}
_SETS = {
    "scope": "the whole step",
    "micro-batch": "each micro-batch, averaged",
    "same": "the set that the surrogate is taken over",
}


def _live(block: Block) -> Iterator[Sequence[str]]:
    """The terms that a loss has beside its surrogate, and each of two alone."""
    live = [one for one in _NAMES if setting(block, f"loss.{one}_coef")]
    yield live
    if len(live) > 1:
        yield from ([one] for one in live)


def _changed(block: Block, kind: str, value: str) -> Iterator[tuple[dict[str, str], str]]:
    """Another value of a setting of terms, and the names of those that it changes."""
    seen: list[dict[str, str]] = []
    for among in _live(block):
        terms = [one for one in among if setting(block, f"loss.{one}_{kind}") != value]
        changes = {f"loss.{one}_{kind}": value for one in terms}
        if changes and changes not in seen:
            seen.append(changes)
            yield changes, " and ".join(_NAMES[one] for one in terms)


def _terms_apart(block: Block) -> Iterable[Told]:
    """Entropy and KL that become one number as the surrogate does, or by a mean of their own."""
    for value in ("same", "token-mean", "seq-mean-token-mean"):
        said = "as the surrogate is" if value == "same" else f"by {value}"
        for changes, terms in _changed(block, "aggregation", value):
            yield Told(Variant(changes), f"{terms} aggregated {said}")


def _mean_over(block: Block) -> Iterable[Told]:
    """Means over the whole of a scalar's scope, or over each micro-batch and then of these."""
    own = setting(block, "loss.mean_over")
    for value, words in _SETS.items():
        if value not in (own, "same"):
            yield Told(Variant({"loss.mean_over": value}), f"every mean over {words}")
        for changes, terms in _changed(block, "mean_over", value):
            yield Told(Variant(changes), f"the mean of {terms} over {words}")


FAULTS = (
    fault(
        "terms-aggregation",
        "entropy and KL aggregated otherwise than the surrogate, or not",
        "the loss with {}",
        "loss.entropy_aggregation and loss.kl_loss_aggregation: token-mean in OpenRLHF, say",
        _terms_apart,
        touches=("entropy_loss", "kl_loss", "loss"),
    ),
    fault(
        "mean-over",
        "means over micro-batches, or over more than one",
        "the loss with {}",
        "loss.mean_over, loss.entropy_mean_over and loss.kl_loss_mean_over: TRL and verl's legacy "
        "actor average the entropy of each micro-batch",
        _mean_over,
    ),
)
