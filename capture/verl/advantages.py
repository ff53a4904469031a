"""The driver of verl: what its advantage estimator was given and gave, one rollout a call."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from trajreplay.capture.enabling import enable
from trajreplay.capture.recorder import Recorder
from trajreplay.capture.switching.switches import Switches
from trajreplay.capture.verl.rows import lengths_of, producer, shown_rewards
from trajreplay.capture.verl.settings import (
    BY_TOKEN,
    WHITENED,
    advantage_settings,
    advantage_stages,
)
from trajreplay.schema.records import SampleRecord
from trajreplay.schema.settings import Settings

RUN_SUFFIX = "-driver"
_STEPS = "global_steps"


class Driver:
    """Records advantages where they are computed.

    verl hands a loss no name of a sample, so that what the driver made and what an actor consumed
    cannot be put side by side: the driver's rollouts are a run of their own.

    Args:
        switches: What to capture; the run has RUN_SUFFIX appended.
    """

    def __init__(self, switches: Switches) -> None:
        self.switches = replace(switches, run_id=switches.run_id + RUN_SUFFIX)
        self._recorder: Recorder | None = None
        self._rollout_id = 0

    def before(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
    ) -> Mapping[str, Any] | None:
        """What an estimator is called with, by name, before it writes into it."""
        if self._recorder is None:
            self._recorder = Recorder()  # whatever goes wrong below goes wrong once
            self._rollout_id = _rollouts_before()
            self._recorder = enable(
                self.switches,
                rank=0,
                resume_rollout_id=self._rollout_id or None,
                expected_ranks=[0],
                producer=producer("driver"),
                alone=True,
                shared=False,
            )
        if not self._recorder.enabled:
            return None
        given = inspect.signature(function).bind(*args, **kwargs)
        given.apply_defaults()
        seen = {**given.arguments.pop("kwargs", {}), **given.arguments}
        seen["token_level_rewards"] = seen["token_level_rewards"].detach().clone()
        return seen

    def after(self, name: str, seen: Mapping[str, Any], result: Any) -> None:
        """Record one rollout."""
        recorder = self._recorder
        assert recorder is not None
        rollout_id, self._rollout_id = self._rollout_id, self._rollout_id + 1
        with recorder.guard("advantages"):
            self._record(recorder, rollout_id, name, seen, result)

    def _record(
        self,
        recorder: Recorder,
        rollout_id: int,
        name: str,
        seen: Mapping[str, Any],
        result: Any,
    ) -> None:
        advantages, returns = result
        rewards, mask = seen["token_level_rewards"], seen["response_mask"]
        raw = rewards.sum(1).tolist()
        shown: list[float | None] = [None] * len(raw)
        if name not in WHITENED:
            shown = raw if name in BY_TOKEN else shown_rewards(advantages, mask)
        numbers: dict[Any, int] = {}  # of prompts, whose names in verl may be texts
        index = seen.get("index")
        if index is None:
            index = range(len(raw))
        groups = [numbers.setdefault(one, len(numbers)) for one in index]
        records = [
            SampleRecord(
                f"s-{row}",
                length,
                length,
                (),
                group_index=groups[row],
                raw_reward=raw[row],
                reward=shown[row],
            )
            for row, length in enumerate(lengths_of(mask))
        ]
        with recorder.rollout(
            rollout_id,
            settings=advantage_settings(name, seen),
            stages=advantage_stages(name, None not in shown),
            cohort_size=len(records),
        ):
            recorder.record(
                records,
                loss_mask=mask,
                token_rewards=rewards,
                advantages=advantages,
                returns=returns,
                values=seen.get("values"),
            )

    def failed(self, error: Exception) -> None:
        """An estimate could not be looked at: the lake says that its rollout is not there."""
        rollout_id, self._rollout_id = self._rollout_id, self._rollout_id + 1
        if self._recorder is not None:
            self._recorder.begin_rollout(rollout_id, settings=Settings())
            self._recorder.drop(f"estimate-not-seen:{type(error).__name__}")
            self._recorder.end_rollout()

    def close(self) -> None:
        """End recording."""
        if self._recorder is not None:
            self._recorder.close()


def _rollouts_before() -> int:
    """Rollouts that the trainer took before this one, those of a checkpoint included.

    The trainer is among those who called. 0 where none says.
    """
    frame = sys._getframe(1)
    while frame is not None:
        found = frame.f_locals.get("self")
        steps = getattr(found, _STEPS, None) if hasattr(type(found), "fit") else None
        if type(steps) is int:
            return max(0, steps - 1)  # it counts the one that it is at
        frame = frame.f_back  # type: ignore[assignment]
    return 0
