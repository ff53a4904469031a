"""The checks of a gate, declared once: what each demands and its parameters."""

from __future__ import annotations

from collections.abc import Sequence

from trajreplay.query.routes.policy import STAGES
from trajreplay.query.routes.rules import CONTRACTS
from trajreplay.schema.errors import TrajReplayError
from trajreplay.stages.gate.captured import MISMATCH, MISMATCH_ANY_VERSION
from trajreplay.stages.gate.check import Check, Judged, Parameter
from trajreplay.stages.gate.evidence import Evidence
from trajreplay.stages.gate.of_experts import judge_route_agreement
from trajreplay.stages.gate.of_lake import judge_captures, judge_replay
from trajreplay.stages.gate.of_mismatch import (
    judge_delta_fraction,
    judge_delta_tail,
    judge_generation_kl,
    judge_mismatch_baseline,
)
from trajreplay.stages.gate.of_routes import judge_routes
from trajreplay.stages.gate.of_run import (
    judge_attempt,
    judge_command,
    judge_complete,
    judge_terminal,
)
from trajreplay.stages.gate.of_signal import (
    judge_learning_signal,
    judge_nonzero_loss,
    judge_truncation,
)
from trajreplay.stages.gate.policy import Policy

_SHARE = Parameter("share", "Share of max_steps that is demanded.", "share")
_BELOW = Parameter("below", "What the value has to stay below.", "number")
_ANY_VERSION = Parameter(
    "any_version",
    "Whether tokens count that other weights sampled than recomputed them; else they fail it.",
    "flag",
)
CHECKS = (
    Check("command", "run", "The command ended with exit code 0.", judge_command),
    Check(
        "attempt",
        "run",
        "The attempt recorded steps of its own, and everything that counts fits together.",
        judge_attempt,
        unit="records",
    ),
    Check(
        "complete",
        "run",
        "The loss of every step to max_steps; of an intermediate run at least one, without a gap.",
        judge_complete,
        counts_steps=True,
        unit="steps with a loss",
        reads=("loss",),
    ),
    Check(
        "terminal",
        "run",
        "The attempt's recorder closed after a clean end.",
        judge_terminal,
        unit="closing records",
    ),
    Check(
        "learning_signal",
        "signal",
        "Rewards that differ within a group, and an advantage that is not 0, in enough steps.",
        judge_learning_signal,
        (_SHARE,),
        counts_steps=True,
        unit="steps",
        reads=("signal",),
    ),
    Check(
        "nonzero_loss",
        "signal",
        "A finite loss other than 0 in enough steps.",
        judge_nonzero_loss,
        (_SHARE,),
        counts_steps=True,
        unit="steps",
        reads=("loss",),
    ),
    Check(
        "truncation",
        "signal",
        "Few samples were cut at the length limit, by the mean over steps.",
        judge_truncation,
        (_BELOW,),
        of="step",
        unit="of the samples",
        reads=("signal",),
    ),
    Check(
        "delta_tail",
        "mismatch",
        "No valid token differs by more than 1.0.",
        judge_delta_tail,
        (_ANY_VERSION,),
        of="step",
        unit="nat",
        reads=(MISMATCH,),
    ),
    Check(
        "delta_fraction",
        "mismatch",
        "Few valid tokens of all differ by more than 0.5.",
        judge_delta_fraction,
        (_BELOW, _ANY_VERSION),
        of="step",
        unit="of the valid tokens",
        reads=(MISMATCH,),
    ),
    Check(
        "generation_kl",
        "mismatch",
        "The generation KL (k3) is small by its mean over steps, and never negative.",
        judge_generation_kl,
        (_BELOW, _ANY_VERSION),
        of="step",
        unit="nat",
        reads=(MISMATCH,),
    ),
    Check(
        "mismatch_baseline",
        "mismatch",
        "The mismatch stays near that of the first steps of the run, of all attempts of its chain.",
        judge_mismatch_baseline,
        (
            Parameter("statistic", "What is watched.", "text", ("abs_delta", "generation_kl")),
            Parameter("window", "Steps that are the warm-up.", "count"),
            Parameter("factor", "How many times the warm-up's mean is allowed.", "number"),
            Parameter("patience", "Steps on end that have to be above.", "count"),
            _ANY_VERSION,
        ),
        of="step",
        unit="nat",
        reads=(MISMATCH,),
    ),
    Check(
        "routes",
        "routes",
        "The router-replay traces are valid under the transport contract that is stated.",
        judge_routes,
        (
            Parameter("traces", "Folder of the traces.", "text"),
            Parameter("contract", "How routes travel.", "text", CONTRACTS),
            Parameter("stages", f"Stages that replay, of {', '.join(STAGES)}.", "any"),
            Parameter("layers", "MoE layers, counted from 1.", "any"),
            Parameter("experts", "Experts of a layer.", "any"),
            Parameter("require", "Rules that have to be decided.", "any"),
            Parameter("ignore", "Events that are not known here and are left out.", "any"),
            Parameter("max_fallback_share", "Share of rows left to the own router.", "share"),
            Parameter(
                "traced_steps",
                "Steps that have to be traced in every stage: so many, by name, or all.",
                "steps",
            ),
            Parameter("processes", "The attempt's processes as host:pid.", "any"),
            Parameter("since", "First second since 1970, if after the attempt's start.", "number"),
            Parameter(
                "until", "Last second since 1970, if before the next attempt's start.", "number"
            ),
        ),
    ),
    Check(
        "route_agreement",
        "routes",
        "The experts that the trainer chose, where they were captured, are the sampler's.",
        judge_route_agreement,
        (
            Parameter(
                "at_least", "Share of the routes that have to be; all unless stated.", "share"
            ),
            Parameter(
                "max_fallback_share",
                "Share of rows without a route on a side; that of routes unless stated.",
                "share",
            ),
            Parameter(
                "stages", "Stages that replay; those of routes unless stated.", "list", STAGES
            ),
            Parameter(
                "chosen",
                "Whether choices of some steps and samples alone are enough.",
                "flag",
            ),
        ),
        of="step",
    ),
    Check(
        "captures",
        "captures",
        "No capture is dropped, every set complete, of every step that was recorded.",
        judge_captures,
        (
            Parameter(
                "chosen",
                "Whether captures of some steps alone are enough, as where only some are chosen.",
                "flag",
            ),
        ),
        of="any",
        unit="capture sets",
    ),
    Check(
        "replay",
        "replay",
        "Every cohort recomputes to what was recorded.",
        judge_replay,
        of="any",
    ),
)
CHECKS_BY_NAME = {one.name: one for one in CHECKS}


def sources(policy: Policy, checks: Sequence[Check] = CHECKS) -> frozenset[str]:
    """What the checks of a policy need of the columns of steps, of `captured.SOURCES`."""
    found = set()
    for one in (one for one in checks if one.name in policy.checks):
        any_version = policy.checks[one.name].get("any_version", False)
        for source in one.reads:
            is_any = any_version and source == MISMATCH
            found.add(MISMATCH_ANY_VERSION if is_any else source)
    return frozenset(found)


def judged(check: Check, found: Evidence, policy: Policy) -> Judged:
    """The outcome of a check; what cannot be read fails it."""
    try:
        return check.judge(found, policy, policy.checks.get(check.name, {}))
    except TrajReplayError as error:
        return Judged(False, None, check.demand, error.message)
