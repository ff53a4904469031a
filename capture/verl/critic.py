"""The critic of verl: every value loss of an optimizer step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trajreplay.capture.switching.switches import Switches
from trajreplay.capture.verl.engine import Worker
from trajreplay.capture.verl.rows import lengths_of
from trajreplay.capture.verl.settings import loss_meaning, value_contract, value_settings
from trajreplay.schema.contracts import StageContract

RUN_SUFFIX = "-critic"
_FUNCTION = "value"  # no policy loss of the registry, whose names have ways of their own


class Critic(Worker):
    """Records the value losses of one process.

    A critic takes optimizer steps of its own, so that they are a run of their own.

    Args:
        switches: What to capture; the run has RUN_SUFFIX appended.
    """

    _in_graph = "vpreds"

    def __init__(self, switches: Switches) -> None:
        super().__init__(switches, RUN_SUFFIX)

    def after(self, name: str, given: Mapping[str, Any], result: Any) -> None:
        """Record one micro-batch with its loss."""
        recorder = self._recorder
        assert recorder is not None
        mode, mask = given["loss_agg_mode"], given["response_mask"]
        with recorder.guard("value loss"):
            self.begin(
                lambda: {
                    "settings": value_settings(mode, given["cliprange_value"]),
                    "stages": [StageContract("sample"), value_contract(mode)],
                }
            )
            number = self.next_micro_batch()
            if recorder.is_recording("step"):
                recorder.record_value_loss(
                    number,
                    self.records(lengths_of(mask)),
                    scalars={"value_loss": result[0]},
                    values=given["vpreds"],
                    old_values=given["values"],
                    returns=given["returns"],
                    columns={"loss_mask": mask},
                    **loss_meaning(_FUNCTION, mode, given, mask.shape[1]),
                )
