"""The stages, what each reads and writes, and what a capture claims about them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from trajreplay.schema.errors import SchemaError, named

Capability = Literal["recompute", "recorded-only", "inspect-only", "unsupported"]
CAPABILITIES: tuple[Capability, ...] = (
    "recompute",
    "recorded-only",
    "inspect-only",
    "unsupported",
)
Level = Literal["sample", "group", "cohort"]
CONTRACT_VERSION = "v2"
REIMPLEMENTED, REUSE = "reimplemented", "reuse"
# Stages that a user's own kernel can recompute.
REUSABLE = (
    "reward.post_process",
    "advantage.kl",
    "advantage.estimate",
    "loss.policy",
    "loss.value",
)
_REUSE = re.compile(rf"{REUSE}(?::([\w.-]+))?")


@dataclass(frozen=True)
class Stage:
    """The declaration of one stage.

    Args:
        name: Its name in reports and contracts.
        level: What must be whole before it can be computed.
        inputs: Columns it reads; some only under some settings, see `stages/capability.py`.
        outputs: Columns it writes.
        scalars: Scalars it writes, recorded as outputs.
        settings: Sections of the settings that it reads.
        tolerance: Why its results may differ from float64 arithmetic at all.
        equation: The arithmetic, plainly.
        source: Where the arithmetic is published.
    """

    name: str
    level: Level
    inputs: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    scalars: tuple[str, ...] = ()
    settings: tuple[str, ...] = ()
    tolerance: str = "none: values are compared bit by bit"
    equation: str = ""
    source: str = "by definition"


STAGES: tuple[Stage, ...] = (
    Stage(
        "sample",
        "sample",
        ("sample_id", "group_id", "response_length", "total_length", "loss_mask"),
        settings=("handoff",),
        equation="lengths agree, ids are unique, what a step consumed is what its rollout recorded",
    ),
    Stage(
        "reward.raw",
        "sample",
        ("raw_reward", "reward_components", "token_rewards"),
        scalars=("raw_rewards",),
        equation="raw_reward is finite and equals what was recorded beside it, the weighted sum of "
        "its components or the sum of its token rewards, and what a reward function that is given "
        "returns",
    ),
    Stage(
        "reward.post_process",
        "group",
        (
            *("raw_reward", "reward_components", "token_rewards", "greedy_reward", "group_id"),
            *("consumer_batch_id", "trajectory_id", "fragment_index", "truncated", "turns"),
            *("agent_id", "episode_id", "kept_baseline", "total_length", "first_message_length"),
            *("old_log_probs", "rollout_log_probs", "ref_log_probs"),
        ),
        outputs=("reward",),
        scalars=("rewards",),
        settings=("reward",),
        tolerance="float32 mean and deviation of a group, divided by deviation + epsilon",
        equation="reward_i = (r_i - mean_g) / (std_g + epsilon)",
        source="Shao et al. 2024, arXiv:2402.03300, section 4.1.2",
    ),
    Stage(
        "advantage.kl",
        "sample",
        ("old_log_probs", "rollout_log_probs", "ref_log_probs"),
        outputs=("kl",),
        settings=("kl",),
        tolerance="a few float32 operations a token, one of them exp",
        equation="k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d, with d = log_probs - ref_log_probs",
        source="Schulman 2020, Approximating KL divergence",
    ),
    Stage(
        "advantage.estimate",
        "sample",
        (
            *("reward", "response_length", "token_rewards", "kl", "old_values", "greedy_reward"),
            *("old_log_probs", "teacher_log_probs", "sum_pi_squared", "message_faults"),
            *("last_value", "truncated", "rollout_log_probs", "group_id", "consumer_batch_id"),
        ),
        outputs=("advantages", "returns"),
        settings=("advantage",),
        tolerance="one rounding to the recorded dtype",
        equation="advantages_it = reward_i for every response token t",
        source="Shao et al. 2024, arXiv:2402.03300, section 4.1.2",
    ),
    Stage(
        "loss.policy",
        "cohort",
        (
            *("log_probs", "old_log_probs", "rollout_log_probs", "ref_log_probs", "entropy"),
            *("advantages", "loss_mask", "micro_batch_id", "raw_reward", "weight_versions"),
        ),
        scalars=("loss", "pg_loss", "entropy_loss", "pg_clipfrac", "ppo_kl", "kl_loss", "nll_loss"),
        settings=("loss",),
        tolerance="float32 exp per token, then sums over tokens and samples",
        equation="pg_t = max(-A_t r_t, -A_t clip(r_t)); loss = sum_i mean_t pg - c sum_i mean_t H",
        source="Schulman et al. 2017, arXiv:1707.06347; Yu et al. 2025, arXiv:2503.14476",
    ),
    Stage(
        "loss.value",
        "cohort",
        ("values", "old_values", "returns", "loss_mask"),
        scalars=("value_loss", "value_clipfrac"),
        settings=("value",),
        tolerance="float32 squares per token, then sums over tokens and samples",
        equation="v_t = f max((V - R)^2, (V_old + clamp(V - V_old, -c, c) - R)^2)",
        source="Schulman et al. 2017, arXiv:1707.06347",
    ),
)
STAGE_NAMES = tuple(stage.name for stage in STAGES)
V1_STAGES = STAGE_NAMES[:6]
_BY_NAME = {stage.name: stage for stage in STAGES}

# Which stage answers for a recorded column: the one that writes it, else `sample`.
STAGE_OF_COLUMN = {column: stage.name for stage in STAGES for column in stage.outputs} | {
    "raw_reward": "reward.raw"
}


def stage_named(name: str) -> Stage:
    """Look a stage up.

    Raises:
        SchemaError: There is none of that name.
    """
    if name not in _BY_NAME:
        raise SchemaError(
            f"unknown stage {named(name)}, expected one of {', '.join(STAGE_NAMES)}",
            hint="To list the stages: trajreplay schema --stages",
            stage=name,
        )
    return _BY_NAME[name]


@dataclass(frozen=True)
class StageContract:
    """What a capture claims about one stage.

    Args:
        stage: Name of the stage.
        capability: recompute, recorded-only, inspect-only or unsupported.
        version: Version of the stage's contract.
        reason: Why it is less than recompute.
        implementation: reimplemented, or reuse of the producer's own function: `reuse` is the
            entry point of the stage's name in the group `trajreplay.kernels`, `reuse:NAME` the
            entry point `STAGE:NAME`.
        scalars: Of a loss, the scalars that its producer computes at all, the loss among them;
            those of the stage that the settings bring if none are named. What is recorded is
            compared either way; what is named and missing leaves the stage unverified.

    >>> StageContract("loss.policy", implementation="reuse:mine").kernel
    'loss.policy:mine'
    """

    stage: str
    capability: Capability = "recompute"
    version: str = CONTRACT_VERSION
    reason: str = ""
    implementation: str = REIMPLEMENTED
    scalars: Sequence[str] = ()

    def __post_init__(self) -> None:
        known = stage_named(self.stage).scalars
        named = self.scalars.split(",") if isinstance(self.scalars, str) else self.scalars
        object.__setattr__(self, "scalars", tuple(named))
        if self.scalars and (
            not self.stage.startswith("loss.")
            or not set(self.scalars) <= set(known)
            or known[0] not in self.scalars
        ):
            raise SchemaError(
                f"stage {self.stage}: scalars are {', '.join(self.scalars)}, expected, of a loss, "
                f"{known[0] if known else 'none'} and others of {', '.join(known)}"
            )
        if self.capability not in CAPABILITIES:
            raise SchemaError(
                f"stage {self.stage}: capability is {self.capability!r}, "
                f"expected one of {', '.join(CAPABILITIES)}"
            )

    @property
    def kernel(self) -> str | None:
        """The entry point that recomputes the stage; None for the stage's own arithmetic.

        In a contract of version v1, and as any other text, the implementation is a remark.
        """
        found = _REUSE.fullmatch(self.implementation) if self.version != "v1" else None
        if found is None:
            return None
        return f"{self.stage}:{found[1]}" if found[1] else self.stage

    def check_implementation(self) -> None:
        """Refuse to declare an implementation that no replay would find.

        Raises:
            SchemaError: It is not of a known form, or the stage takes no kernel.
        """
        if self.implementation == REIMPLEMENTED:
            return
        if not _REUSE.fullmatch(self.implementation):
            raise SchemaError(
                f"stage {self.stage}: implementation is {self.implementation!r}, expected "
                f"{REIMPLEMENTED}, {REUSE} or {REUSE}:NAME",
                hint="NAME is that of an entry point STAGE:NAME in the group trajreplay.kernels.",
                stage=self.stage,
            )
        if self.stage not in REUSABLE:
            raise SchemaError(
                f"stage {self.stage} is declared {self.implementation!r} and takes no kernel, "
                f"expected one of {', '.join(REUSABLE)}",
                hint=f"Declare it as {REIMPLEMENTED!r}; a reward function is given to the replay.",
                stage=self.stage,
            )

    def to_json(self) -> dict[str, Any]:
        """All fields but the stage's name, which is the key under which they are stored."""
        named = {"scalars": ",".join(self.scalars)} if self.scalars else {}
        return {
            "capability": self.capability,
            "version": self.version,
            "reason": self.reason,
            "implementation": self.implementation,
            **named,
        }
