"""What the V2 matrix says of the means of a loss: over what, and what they do not go with."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from trajreplay.schema.settings import LossSettings, Settings


def over_micro_batches(loss: LossSettings, columns: Collection[str]) -> str:
    """The setting by which means are taken over micro-batches; empty if they are not."""
    terms = own_terms(loss)
    if "micro_batch_id" in columns and "entropy" in columns:
        terms = (*terms, "entropy")  # without these, an entropy that nothing adds is not looked at
    for name in ("mean_over", *(f"{one}_mean_over" for one in terms)):
        if getattr(loss, name) == "micro-batch" and loss.batch_reduction == "mean":
            return f"loss.{name} is 'micro-batch'"
    return ""


def own_terms(loss: LossSettings) -> tuple[str, ...]:
    """What is added to a surrogate and may have a mean of its own: KL and entropy."""
    return tuple(one for one in ("kl_loss", "entropy") if getattr(loss, f"{one}_coef") != 0)


def value_over_micro_batches(settings: Settings) -> str:
    """The same of a value loss."""
    found = settings.value.mean_over
    own = settings.loss.mean_over if found == "same" else found
    if own == "micro-batch" and settings.loss.batch_reduction == "mean":
        return f"{'loss' if found == 'same' else 'value'}.mean_over is 'micro-batch'"
    return ""


def means_over_samples(settings: Settings) -> bool:
    """Whether a mean over samples is taken of anything, so that it matters which of them count."""
    loss = settings.loss
    own = (loss.entropy_aggregation, loss.kl_loss_aggregation)
    names = (loss.aggregation, *own, loss.metrics_aggregation)
    by_rows = loss.aggregation == "constant-norm" and loss.constant_norm_by_rows
    of_samples = any(one.startswith("seq-mean") for one in (*names, settings.value.aggregation))
    return by_rows or (of_samples and loss.batch_reduction == "mean")


def means_over_micro_batches(settings: Settings) -> bool:
    """Whether a mean is taken over micro-batches and then over these."""
    loss = settings.loss
    own = (loss.entropy_mean_over, loss.kl_loss_mean_over)
    return "micro-batch" in (loss.mean_over, *own, settings.value.mean_over)


def mean_contradictions(loss: LossSettings) -> Iterator[str]:
    """What a mean over samples, tokens or a constant does not go with."""
    if loss.count_epsilon < 0:
        yield f"loss.count_epsilon is {loss.count_epsilon:g}, expected 0 or more"
    if loss.aggregation == "constant-norm" and not loss.constant_norm:
        yield "loss.aggregation is 'constant-norm' and loss.constant_norm is not stated"
    if loss.constant_norm is not None and loss.constant_norm <= 0:
        yield f"loss.constant_norm is {loss.constant_norm:g}, expected more than 0"
    if loss.constant_norm_by_rows and loss.aggregation != "constant-norm":
        yield f"loss.constant_norm_by_rows is true and loss.aggregation is {loss.aggregation!r}"
    if loss.fragments == "shared" and loss.aggregation != "seq-mean-token-mean":
        yield f"loss.fragments are 'shared' and loss.aggregation is {loss.aggregation!r}"
    if loss.token_count == "at-least-one" and loss.aggregation != "token-mean":
        yield f"loss.token_count is 'at-least-one' and loss.aggregation is {loss.aggregation!r}"
    if loss.mean_over == "micro-batch":
        if loss.batch_reduction != "mean":
            yield f"loss.mean_over is 'micro-batch' and loss.batch_reduction is {'sum'!r}"
        if loss.fragments == "shared":
            yield "loss.mean_over is 'micro-batch' and loss.fragments are 'shared'"
        if loss.aggregation == "constant-norm":
            yield "loss.mean_over is 'micro-batch' and loss.aggregation is 'constant-norm'"


def own_mean_contradictions(loss: LossSettings) -> Iterator[str]:
    """What terms and metrics that become one number in their own way do not go with."""
    terms = own_terms(loss)
    means = tuple(f"{one}_{kind}" for one in terms for kind in ("aggregation", "mean_over"))
    for name in (*means, "metrics_aggregation"):
        if getattr(loss, name) == "same":
            continue
        if loss.fragments == "shared":
            yield f"loss.{name} is {getattr(loss, name)!r} and loss.fragments are 'shared'"
        if loss.aggregation == "constant-norm" and loss.batch_reduction != "mean":
            yield (
                f"loss.{name} is {getattr(loss, name)!r}, loss.aggregation 'constant-norm' and "
                "loss.batch_reduction 'sum'"
            )
    for name in (f"{one}_mean_over" for one in terms):
        found = getattr(loss, name)
        if found == "micro-batch" and loss.batch_reduction != "mean":
            yield f"loss.{name} is 'micro-batch' and loss.batch_reduction is 'sum'"
        kind = getattr(loss, name.replace("mean_over", "aggregation"))
        if found == "micro-batch" and (kind, loss.aggregation) == ("same", "constant-norm"):
            yield f"loss.{name} is 'micro-batch' and loss.aggregation is 'constant-norm'"
