"""The faults that the demo can inject, and what a replay has to say of each."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A mistake of the kind that real trainings make.

    The trainer makes it at the line where it would happen; look for `self._has_fault`.
    """

    name: str
    mistake: str
    stage: str | None = None
    field: str | None = None


FAULTS = {
    fault.name: fault
    for fault in (
        Fault(
            "physical-batch",
            "rewards are normalised over the consumer batch instead of the group",
            "reward.post_process",
            "reward",
        ),
        Fault(
            "kl-sign",
            "the KL is computed from the log-ratio of the wrong sign",
            "advantage.kl",
            "kl",
        ),
        Fault(
            "mask-shift",
            "the optimizer step uses a loss mask shifted by one token",
            "sample",
            "handoff.loss_mask",
        ),
        Fault(
            "stale-old-log-probs",
            "the optimizer step uses old log-probs of an earlier weight version",
            "sample",
            "handoff.old_log_probs",
        ),
        Fault(
            "loss-denominator",
            "each rank divides its loss by its own number of samples",
            "loss.policy",
            "loss",
        ),
        Fault("none", "nothing is wrong"),
    )
}
DEFAULT_FAULT = "physical-batch"
