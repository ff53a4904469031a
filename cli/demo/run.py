"""The demo from end to end: a fresh lake, the training into it, the replay of it, the verdict."""

import os
import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from trajreplay import DatasetError, Lake
from trajreplay.cli.demo.config import TrainingConfig
from trajreplay.cli.demo.faults import FAULTS, Fault
from trajreplay.cli.demo.launch import train
from trajreplay.cli.options.shared import LAKE_FILE
from trajreplay.cli.shown.report_text import ReportText
from trajreplay.cli.terminal.text import aligned, counted

if TYPE_CHECKING:
    from trajreplay.cli.demo.trainer import RolloutReport
    from trajreplay.stages import CohortReport, Report

_SHOWN_ROLLOUTS = 8
_BAR = 40


def prepare_lake(path: Path, *, force: bool) -> Lake:
    """Make a new lake for the demo.

    Args:
        path: The folder; missing or empty.
        force: Whether a lake that is there already is deleted first.

    Raises:
        DatasetError: Something is there that may not be deleted.
    """
    if path.is_dir() and any(path.iterdir()):
        if not (path / LAKE_FILE).is_file():
            raise DatasetError(
                f"{path} is not empty and no lake, expected a new folder for the demo",
                hint="Name another folder: trajreplay demo --lake PATH",
            )
        if not force:
            raise DatasetError(
                f"{path} is a lake already, expected a new folder for the demo",
                hint="To replace it: add --force. To keep it: name another with --lake PATH.",
            )
        shutil.rmtree(path.resolve())
    return Lake.create(path.resolve())


@dataclass(frozen=True)
class Outcome:
    """What was injected, what was learned, and what the replay found."""

    config: TrainingConfig
    lake_path: Path
    rollouts: list["RolloutReport"]
    report: "Report"

    @property
    def fault(self) -> Fault:
        """The injected fault."""
        return FAULTS[self.config.fault]

    @property
    def diverged(self) -> list["CohortReport"]:
        """The cohorts that the replay found fault with, in order."""
        return [cohort for cohort in self.report.cohorts if cohort.verdict == "diverged"]

    @property
    def is_expected(self) -> bool:
        """Whether the replay found exactly the injected fault: its stage, its field, its start."""
        if {cohort.verdict for cohort in self.report.cohorts} & {"refused", "unverified"}:
            return False
        if self.fault.stage is None:
            return not self.diverged
        return (
            bool(self.diverged)
            and self.diverged[0].rollout_id == self.config.first_faulty_rollout
            and self.fault.field in _divergent_fields(self.diverged[0])
            and {cohort.first_divergent_stage for cohort in self.diverged} == {self.fault.stage}
        )

    def describe(self) -> Iterator[str]:
        """Tell it all, line by line."""
        yield from self._describe_training()
        yield ""
        yield from self._describe_replay()
        yield ""
        yield from self._next_commands()

    def _describe_training(self) -> Iterator[str]:
        config = self.config
        steps = sum(rollout.steps for rollout in self.rollouts)
        yield (
            f"Trained a policy with GRPO on {config.ranks} ranks: "
            f"{counted(len(self.rollouts), 'rollout')} of {config.prompts_per_rollout} prompts "
            f"x {config.samples_per_prompt} samples, {counted(steps, 'optimizer step')}."
        )
        yield ""
        stride = max(1, (len(self.rollouts) - 1) // (_SHOWN_ROLLOUTS - 1))
        yield from aligned(
            ["rollout", "steps", "staleness", "KL", "mean raw reward"],
            [
                [
                    str(rollout.rollout_id),
                    str(rollout.steps),
                    str(rollout.max_staleness),
                    f"{rollout.mean_kl:.2f}",
                    f"{rollout.mean_raw_reward:.3f} {'#' * round(_BAR * rollout.mean_raw_reward)}",
                ]
                for rollout in self.rollouts
                if rollout.rollout_id % stride == 0 or rollout is self.rollouts[-1]
            ],
            [True, True, True, True, False],
        ).splitlines()
        yield ""
        captures = config.ranks * (len(self.rollouts) + steps)
        yield (
            f"Mean raw reward {self.rollouts[0].mean_raw_reward:.3f} at first, "
            f"{self.rollouts[-1].mean_raw_reward:.3f} at last. "
            f"{counted(captures, 'capture')} lie in {self.lake_path}"
        )

    def _describe_replay(self) -> Iterator[str]:
        verdicts = Counter(cohort.verdict for cohort in self.report.cohorts)
        counts = ", ".join(f"{count} {verdict}" for verdict, count in sorted(verdicts.items()))
        yield f"Replayed {counted(len(self.report.cohorts), 'cohort')}: {counts}."
        if self.diverged:
            yield ""
            yield from _render(self.diverged[0])
            yield from self._describe_consequence()
        yield ""
        injected = self.fault.mistake
        if self.fault.stage is not None:
            injected += f", from rollout {self.config.first_faulty_rollout} on"
        yield f"Injected: {self.fault.name}: {injected}."
        if not self.is_expected:
            yield "Found: something else. This is a mistake in trajreplay: please report it."
        elif self.fault.stage is None:
            yield "Found: nothing, as it should be."
        else:
            yield (
                f"Found: exactly that. {self.fault.field} is the first to differ, "
                f"at stage {self.fault.stage} of rollout {self.diverged[0].rollout_id}."
            )

    def _describe_consequence(self) -> Iterator[str]:
        """Tell of the first step whose loss agrees with its inputs, and not with right ones."""
        for cohort in self.report.cohorts:
            for stage in cohort.stages:
                if stage.stage == "loss.policy" and stage.inherited:
                    error = "" if stage.chained_error is None else f" by {stage.chained_error:.3g}"
                    yield ""
                    yield (
                        f"The loss moves too{error}, first at step "
                        f"{cohort.rollout_id}:{cohort.step_id}: it inherits what is wrong."
                    )
                    return

    def _next_commands(self) -> Iterator[str]:
        lake = f"--lake {shlex.quote(str(self.lake_path))}"
        name = "trajreplay" if shutil.which("trajreplay") else _own_path()
        yield "Next:"
        yield f"  {name} info {lake}"
        if self.diverged:
            yield f"  {name} replay {lake} {_selection(self.diverged[0])}"
        yield (
            f"  {name} sql {lake} "
            '"select rollout_id, avg(raw_reward) from rollouts group by 1 order by 1"'
        )
        other = next(fault for fault in FAULTS if fault != self.fault.name)
        yield f"  {name} demo {lake} --force --fault {other}"


def _own_path() -> str:
    """How this command was called, for a shell that would not find it by its name."""
    return os.path.relpath(sys.argv[0]) if sys.argv[0].endswith("trajreplay") else "trajreplay"


def run_demo(
    config: TrainingConfig,
    lake_path: Path,
    *,
    force: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Train, capture and replay.

    Args:
        config: Sizes, seed and fault of the training.
        lake_path: Folder of the lake, which is made anew.
        force: Whether a lake that is there already is deleted first.
        progress: Called with the rollouts done and all of them.

    Raises:
        DatasetError: The folder may not be used.
        CaptureError: The training failed.
    """
    lake = prepare_lake(lake_path, force=force)
    rollouts = []
    progress(0, config.rollouts)
    for rollout in train(config, lake_path):
        rollouts.append(rollout)
        progress(len(rollouts), config.rollouts)
    return Outcome(config, lake_path, rollouts, lake.replay())


def _divergent_fields(cohort: "CohortReport") -> set[str]:
    """Name what differs at the first divergent stage of a cohort."""
    return {
        divergence.field
        for stage in cohort.stages
        if stage.stage == cohort.first_divergent_stage
        for divergence in stage.divergences
    }


def _selection(cohort: "CohortReport") -> str:
    """Say on the command line which cohort is meant."""
    if cohort.step_id is None:
        return f"--rollout {cohort.rollout_id}"
    return f"--step {cohort.rollout_id}:{cohort.step_id}"


def _render(cohort: "CohortReport") -> Iterator[str]:
    """Show one cohort as `trajreplay replay` does, without the verdict over all of them."""
    from trajreplay.stages import Report

    return takewhile(bool, ReportText(Report([cohort])).render().splitlines())
