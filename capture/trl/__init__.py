"""TRL's GRPO trainer, captured without a fork: a callback, or one call."""

from trajreplay.capture.trl.callback import TrajReplayCallback, attach

__all__ = ["TrajReplayCallback", "attach"]
