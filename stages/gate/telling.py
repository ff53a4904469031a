"""How a value of a step is recorded, for the reason of a check that misses it."""

from __future__ import annotations

_PAIR = "old_log_probs and rollout_log_probs of every sample"
# What a capture makes it of; the field of a heartbeat has the name of the value.
_MADE_OF = {
    "loss": "scalars={'loss': ...} in record_policy_loss of every micro-batch",
    "reward_std": "raw_reward and group_index in every SampleRecord",
    "advantage_abs_max": "advantages of every sample",
    "truncation_rate": "truncated=True or False in every SampleRecord",
    "valid_tokens": _PAIR,
    "over_0_5": _PAIR,
    "over_1_0": _PAIR,
    "abs_delta_max": _PAIR,
    "abs_delta": _PAIR,
    "generation_kl": _PAIR,
}


def how_to_record(name: str) -> str:
    """What a trainer gives its recorder so that a step has a value.

    >>> how_to_record("truncation_rate")
    'record truncated=True or False in every SampleRecord, or end_step(truncation_rate=...)'
    """
    return f"record {_MADE_OF[name]}, or end_step({name}=...)"
