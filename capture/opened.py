"""The rollout and the step that a training is in, from begin to end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trajreplay.capture.declared import UNKNOWN, check_said, whole
from trajreplay.capture.guarded import Level, guarded, uncompiled
from trajreplay.capture.losses import Losses
from trajreplay.capture.reasons import kind_of, reason_of
from trajreplay.capture.taking.copies import Copier
from trajreplay.capture.taking.heartbeat import Beat, Heartbeats
from trajreplay.capture.taking.pending import Pending
from trajreplay.capture.taking.values import settled
from trajreplay.capture.writing.outlet import Outlet
from trajreplay.schema.errors import CaptureError, listed, shown

if TYPE_CHECKING:
    from trajreplay.capture.switching.switches import Switches
    from trajreplay.schema import RecomputeConfig, SampleRecord, Settings, StageContract

Stages = Sequence["str | StageContract"]


class Opened(Losses):
    """What a recorder that records is told of the open rollout and step; see `Recorder`.

    Args:
        switches: What is captured.
        outlet: Takes what is ended.
        heartbeats: Takes a few numbers of every step.
        settings: The arithmetic in force, unless a rollout or step says otherwise.
        stages: Stages that can be recomputed, of rollouts and of steps.
    """

    enabled = True

    def __init__(
        self,
        switches: Switches,
        outlet: Outlet,
        heartbeats: Heartbeats,
        settings: Settings | RecomputeConfig | None,
        stages: Mapping[Level, Stages],
    ) -> None:
        self._settings, self._strict = settings, switches.strict
        self._gradients = switches.gradients
        self._stages, self._outlet = stages, outlet
        self._checked: list[tuple[Any, Any]] = []  # the last settings and stages that were
        self._open: dict[Level, Pending | None] = {}
        self._given_up: set[Level] = set()  # what was dropped while the training goes on with it
        self._routing: Mapping[str, Any] = {}
        self._beat: Beat | None = None
        self._heartbeats = heartbeats

    @guarded
    def describe_routes(
        self, num_experts: int | None = None, layer_numbers: Sequence[int] | None = None
    ) -> None:
        """As of `Recorder`."""
        numbers = None if layer_numbers is None else tuple(layer_numbers)
        self._routing = {"num_experts": num_experts, "layer_numbers": numbers}

    @guarded
    def begin_rollout(self, rollout_id: int, **options: Any) -> None:
        """As of `Recorder`."""
        self._begin("rollout", rollout_id, None, options)

    @guarded
    def begin_step(self, rollout_id: int, step_id: int, **options: Any) -> None:
        """As of `Recorder`."""
        self._settle_beat({})  # of a step that was begun and never ended
        self._begin("step", rollout_id, step_id, options)

    def _begin(
        self, level: Level, rollout_id: int, step_id: int | None, given: Mapping[str, Any]
    ) -> None:
        uncompiled(self)
        self._given_up.add(level)  # unless it begins as it should
        if (before := self._open.pop(level, None)) is not None:
            before.fail(f"it was not ended when {level} {shown(rollout_id)} began")
            self._outlet.take(before)
        rollout_id = whole("rollout_id", rollout_id)
        if level == "step":
            step_id = whole("step_id", step_id)
            self._beat = Beat(rollout_id, step_id)
        self._given_up.discard(level)
        if (fate := self._outlet.fate(rollout_id, step_id)) == "none":
            self._open[level] = None
            return
        problem = None
        try:
            options = self._options(level, **given)
        except Exception as error:  # noqa: BLE001 - the capture is noted, and says so
            options, problem = UNKNOWN, error
        pending = self._open[level] = Pending(
            rollout_id,
            step_id,
            options,
            Copier(self._outlet.slots, self._outlet.limit_bytes(fate)),
            held=fate == "held",
            routing=self._routing,
        )
        if problem is not None:
            pending.fail(f"begin_{level}: {reason_of(problem)}")
            self._tell(f"begin_{level}", problem)

    def _options(
        self,
        level: Level,
        *,
        settings: Settings | RecomputeConfig | None = None,
        stages: Stages | None = None,
        cohort_size: int | None = None,
    ) -> Mapping[str, Any]:
        """What a capture says of itself."""
        known = self._settings if settings is None else settings
        these = self._stages[level] if stages is None else stages
        if known is None:
            raise CaptureError(
                f"the settings of a {level} are not known, expected those in force",
                hint=f"Give settings to enable, or to begin_{level}.",
            )
        stated = settings is not None or stages is not None  # the others were checked at start
        if stated and not any(known is one and these is two for one, two in self._checked):
            check_said(known, these)
            self._checked = [*self._checked[-1:], (known, these)]
        size = None if cohort_size is None else whole("cohort_size", cohort_size)
        return {"settings": known, "stages": these, "cohort_size": size}

    @guarded
    def record(
        self,
        samples: Sequence[SampleRecord],
        *,
        origins: Mapping[str, Mapping[str, Any]] | None = None,
        **columns: Any,
    ) -> None:
        """As of `Recorder`."""
        if (pending := self._recording("rollout")) is not None:
            pending.append(samples, columns, origins)

    @guarded
    def note(self, fate: str, sample_ids: Sequence[str], reason: str = "") -> None:
        """As of `Recorder`."""
        if (pending := self._recording("rollout")) is not None:
            pending.ledger.note(fate, sample_ids, reason)

    @guarded
    def record_scalars(
        self, stage: str, scalars: Mapping[str, Any], *, scope: str = "rank", **meaning: Any
    ) -> None:
        """As of `Recorder`."""
        if (pending := self._recording("step")) is not None:
            pending.scalars.note(stage, scalars, {"scope": scope, **meaning})

    def _recording(self, level: Level) -> Pending | None:
        """The open capture; None where it is not selected, or is given up already."""
        if level in self._given_up:
            return None
        if level not in self._open:
            raise CaptureError(
                f"something is recorded of a {level}, and none was begun",
                hint=f"Call begin_{level}() before, and end_{level}() after.",
            )
        pending = self._open[level]
        return None if pending is None or pending.problems else pending

    @guarded
    def end_rollout(self) -> None:
        """As of `Recorder`."""
        self._end("rollout")

    @guarded
    def end_step(self, **scalars: Any) -> None:
        """As of `Recorder`."""
        holds = self._outlet.holds_steps
        if holds:
            self._outlet.look()  # before one more step makes the ring let go of the oldest
        beat = self._settle_beat(scalars)
        pending = self._end("step")
        if holds and beat is not None:
            told: dict[str, list[Any]] = {} if pending is None else pending.scalars.seen
            for name, value in scalars.items():
                told.setdefault(name, []).append(_looked_at(value))
            # Also what came after its capture was given up.
            told.setdefault("loss", []).extend(beat.losses)
            self._outlet.check(str(beat), told)

    def _settle_beat(self, scalars: Mapping[str, Any]) -> Beat | None:
        """Note the heartbeat of the open step, whatever became of its capture."""
        beat, self._beat = self._beat, None
        if beat is not None:
            self._heartbeats.add(beat, scalars)
        return beat

    def _end(self, level: Level) -> Pending | None:
        if level in self._given_up:
            self._given_up.remove(level)
            return None
        if level not in self._open:
            raise CaptureError(f"a {level} ends, and none was begun")
        if (pending := self._open[level]) is not None:
            try:  # while it is open, so that a problem is one of its own
                self._settle(level, pending)
            except Exception as error:  # noqa: BLE001 - as of a guarded method
                self.failed("gradients", error)
        del self._open[level]
        if pending is not None:
            self._outlet.take(pending)
        return pending

    def _settle(self, level: Level, pending: Pending) -> None:
        blind = pending.settle()
        if pending.origins.differing:
            differing = listed(sorted(pending.origins.differing), 3)
            self._outlet.background.warn(
                "origins",
                f"{pending}: micro-batches differ in the {differing}, "
                "which is left out; give each the same origins, or end the step between them",
            )
        if blind and self._gradients and level == "step" and not pending.problems:
            self._outlet.background.warn(
                "gradients",
                f"{pending}: no gradient is recorded of {blind} micro-batches: their log_probs "
                "are in no graph; hand over the tensor that the loss is computed from",
            )

    def is_recording(self, level: str) -> bool:
        """As of `Recorder`."""
        told: Mapping[str, Pending | None] = self._open  # type: ignore[assignment]
        pending = told.get(level)
        return pending is not None and not pending.problems

    def _tell(self, where: str, error: Exception) -> None:
        """Warn, once of each problem; raise where that is asked for."""
        if self._strict:
            raise error
        self._outlet.background.warn(f"{where} {kind_of(error)}", f"{where}: {error!r:.500}")


def _looked_at(value: Any) -> Any:
    """A number that a trigger looks at, or a tuple of several; None where it is none."""
    try:
        return settled(value)
    except CaptureError:
        return None
