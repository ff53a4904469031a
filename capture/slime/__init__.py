"""slime: its rollouts and its optimizer steps, by functions that its own options name."""

from trajreplay.capture.slime.rollouts import record_rollout
from trajreplay.capture.slime.steps import record_steps

__all__ = ["record_rollout", "record_steps"]
