"""Mistakes that a check finds in weights, fates and routes: where samples come from."""

from __future__ import annotations

from trajreplay.stages.faults.contracts import fault

FAULTS = (
    fault(
        "weights.mixed",
        "one rollout across weight versions",
        "responses that several weight versions sampled",
        "updates while sequences are open; sampling.partial states that this is meant",
        "K-078",
    ),
    fault(
        "weights.stale",
        "samples older than allowed",
        "samples whose weights are further behind those that train than the settings allow",
        "the queue between sampler and trainer; sampling.max_staleness",
        "K-069",
        "K-071",
    ),
    fault(
        "weights.newer",
        "sampled by newer weights than those that train",
        "samples of newer weights than computed the trainer's log-probs",
        "where versions are counted; which weights recomputed the log-probs",
        "K-071",
    ),
    fault(
        "weights.old-newer",
        "old log-probs recomputed with newer weights",
        "old log-probs of newer weights than the step's own log-probs",
        "when old log-probs are recomputed, and with which weights",
        "K-069",
    ),
    fault(
        "ledger",
        "samples that got lost on the way",
        "fates of samples that do not add up to those that were recorded",
        "queues that are drained, and what is done with groups that no one asked for",
        "K-075",
    ),
    fault(
        "ledger.restart",
        "a restart that skips what was generated and not trained on",
        "buffered samples that the first rollout after a restart has none of",
        "whether the buffer is saved with a checkpoint; where the prompt loader resumes",
        "K-076",
    ),
    fault(
        "route.duplicate",
        "routes that no router chooses",
        "an expert that is named twice for one token and layer",
        "rows of zeros from a cache, dense layers counted as routed ones, shifts by a layer",
        "K-047",
        "K-049",
    ),
    fault(
        "route.dummy",
        "dummy routes in the middle of a sample",
        "the route 0, 1, 2, ... in every layer at a token that is not the last",
        "rows that were never filled: cached prompt tokens, padding",
        "K-049",
    ),
    fault(
        "route.partial",
        "routes that are -1 in part",
        "a row of choices that is negative in part",
        "how rows without a route are marked: -1 throughout",
    ),
    fault(
        "route.range",
        "routes to experts that there are not",
        "a choice beyond the number of experts",
        "global against local expert numbers; the number of experts that is stated",
    ),
    fault(
        "route.missing",
        "tokens without a route",
        "rows of -1, which a replay leaves to the trainer's own router",
        "what the engine returns for cached and resumed tokens",
        "K-049",
    ),
    fault(
        "weights.backwards",
        "weights that go back",
        "a span of a response sampled by older weights than the span before it",
        "engines of one pool that were not updated together",
        "K-073",
    ),
    fault(
        "weights.never-counted",
        "weight version always 0",
        "weight versions that are 0 for ever",
        "which workers the version is sent to",
        "K-071",
    ),
)
