"""Mistakes that a contract check finds before any arithmetic: each has the name of its check."""

from __future__ import annotations

from trajreplay.stages.faults.fault import Fault

SAMPLE = "sample"


def fault(
    check: str, known: str, sentence: str, look: str, *references: str, stage: str = SAMPLE
) -> Fault:
    """A fault that a check of this name finds."""
    return Fault(check, known, stage, sentence, look, references)


FAULTS = (
    fault(
        "log-prob.shifted",
        "log-probs a token late",
        "one column of log-probs lies a token late against another, in each sample",
        "slices [:-1] and [1:] of logits and tokens",
        "K-037",
    ),
    fault(
        "log-prob.packed-shift",
        "packed log-probs one entry short",
        "one column of log-probs lies a token late over the borders of packed samples",
        "entries per sample where log-probs are packed: one for every token, the first one too",
        "K-037",
    ),
    fault(
        "sample.permuted",
        "samples permuted",
        "samples have the log-probs of other samples",
        "the order in which micro-batches are put back; join by sample id",
        "K-011",
        "K-014",
    ),
    fault(
        "rank.doubled",
        "a rank counted twice",
        "a rank holds the samples of another one, under the same ids or others",
        "how data is sharded over ranks; tensor-parallel replicas",
        "K-066",
    ),
    fault(
        "rank.factor",
        "counted once per rank",
        "a scalar of all ranks is a multiple on one rank of what it is on another",
        "the process group of a sum: with or without context parallelism",
        "K-066",
        stage="loss.policy",
    ),
    fault(
        "log-prob.zero",
        "missing log-probs filled in",
        "log-probs that are exactly 0 at trained tokens: missing, and filled in",
        "re-encoded text, trained prompt tokens, parts of resumed responses",
        "K-040",
        "K-013",
        "K-079",
    ),
    fault(
        "log-prob.positive",
        "log-probs above 0",
        "log-probs above 0, which no distribution has",
        "the dtype of logits and of log_softmax",
        "K-050",
    ),
    fault(
        "log-prob.infinite",
        "sampled tokens without a probability",
        "log-probs of -inf at trained tokens",
        "filters (top-k, top-p, a grammar) on one side only; logits that overflow, or are masked",
    ),
    fault(
        "log-prob.quantised",
        "log-probs in reduced precision",
        "values that all fit bfloat16 or float16, of a producer that says float32",
        "the dtype of logits and of the buffers on the way",
        "K-039",
        "K-050",
    ),
    fault(
        "log-prob.most-likely",
        "log-prob of the most likely token",
        "log-probs of the most likely token instead of the sampled one",
        "which entry of the engine's log-probs is taken: that of the sampled id",
        "K-034",
    ),
    fault(
        "log-prob.filtered",
        "log-probs over a filtered set",
        "log-probs that were normalised over what top-p or top-k kept",
        "the engine's log-prob mode: before or after its filters",
        "K-035",
    ),
    fault(
        "log-prob.temperature",
        "sampling temperature on one side of the ratio",
        "log-probs of two columns that were taken at different temperatures",
        "where logits are divided by the temperature: in sampler and trainer alike",
        "K-031",
    ),
    fault(
        "sample.duplicated",
        "duplicated samples",
        "samples with the log-probs of another sample, bit by bit",
        "buffers that are read twice; retries that are kept beside what they retried",
    ),
    fault(
        "group.constant",
        "equal rewards with a spread",
        "a group of equal raw rewards whose rewards are not 0",
        "the filter of groups: equality of raw rewards, not a deviation above 0 or shaped rewards",
        "K-008",
        "K-016",
    ),
    fault(
        "group.filter",
        "groups without a spread that are trained",
        "groups of equal raw rewards among those trained, where settings say that none is",
        "the filter of groups: what it is run on, and its bound; float32 gives equal rewards a "
        "deviation; reward.constant_groups",
        "K-008",
        "K-016",
    ),
    fault(
        "group.one-block",
        "streamed groups normalised as one block",
        "rewards of which no group has the mean 0, and all together have",
        "how rewards are reshaped where samples arrive in batches; reward.grouping",
        "K-001",
        stage="reward.post_process",
    ),
    fault(
        "group.mixed-prompts",
        "groups of several prompts",
        "members of a group with other prompts",
        "the key of a group: the prompt's tokens, as captured",
        "K-013",
    ),
    fault(
        "sample.length",
        "lengths that do not add up",
        "a sample with other tokens than its lengths say",
        "what total_length counts: prompt and response; tokens that were cut, or appended since",
    ),
    fault(
        "sample.mask",
        "a mask that is none",
        "a loss mask with values that are neither 0 nor 1",
        "what was written as loss_mask: weights, ids, or a sum of masks",
    ),
    fault(
        "group.large",
        "groups joined under one id",
        "groups of more members than planned",
        "ids of groups: one that is counted anew each rollout, or a prompt that was drawn twice",
        stage="reward.post_process",
    ),
    fault(
        "group.short",
        "members removed after a group was closed",
        "groups of fewer members than planned",
        "filters between sampling and normalisation: drop whole groups",
        "K-010",
        "K-003",
        stage="reward.post_process",
    ),
    fault(
        "reward.near-epsilon",
        "divided by epsilon alone",
        "rewards of the size of 1 / epsilon",
        "statistics that were never filled; groups without a spread",
        "K-003",
        "K-016",
        stage="reward.post_process",
    ),
    fault(
        "advantage.near-epsilon",
        "divided by epsilon alone",
        "advantages of the size of 1 / epsilon",
        "statistics that were never filled; sets of equal advantages that are whitened",
        "K-003",
        "K-016",
        stage="advantage.estimate",
    ),
    fault(
        "advantage.negative-variance",
        "a variance that came out negative",
        "whitened advantages that are NaN, of a variance by one pass",
        "variances as a mean of squares less a squared mean: take two passes, or float64; "
        "advantage.whiten_one_pass",
        stage="advantage.estimate",
    ),
    fault(
        "kl.negative",
        "the recorded KL was overwritten in place",
        "a KL below 0 by an estimator that never is",
        "in-place arithmetic on the tensor that is recorded: copy it at the moment of use",
        "K-027",
        stage="advantage.kl",
    ),
    fault(
        "kl.edited",
        "the recorded KL was overwritten in place",
        "the reward at the last token of the KL",
        "in-place arithmetic on the tensor that is recorded: copy it at the moment of use",
        "K-027",
        stage="advantage.kl",
    ),
    fault(
        "metric.disagrees",
        "a metric by another definition",
        "a logged metric that its definition does not give",
        "the tokens that it is taken over; ratios before and after they are truncated",
        "K-042",
        "K-053",
        stage="loss.policy",
    ),
    fault(
        "metric.stuck",
        "a metric that cannot move",
        "a clip fraction of exactly 0, with ratios beyond the bounds",
        "what the metric compares: unbounded with bounded losses",
        "K-053",
        stage="loss.policy",
    ),
)
