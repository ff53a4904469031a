"""Events: the heartbeat of a step and the clean end, which a gate counts on, and fates of samples.

All are rows of the table `events`. `detail` of the first two is a JSON object with the fields that
are declared here, NaN and infinities as the words "NaN", "Infinity" and "-Infinity". A field that
is absent or null was not recorded.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trajreplay.schema.errors import SchemaError

HEARTBEAT = "heartbeat"
TERMINAL = "terminal"
ENDED_CLEAN = "ok"
_WORDS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@dataclass(frozen=True)
class EventField:
    """One field of an event's detail.

    Args:
        name: Its key in the JSON object.
        doc: What it is.
        over_ranks: How the values that several ranks recorded of one step become one: their sum,
            their largest, their mean, their mean weighted by `valid_tokens`, or `same`: they must
            be equal.
    """

    name: str
    doc: str
    over_ranks: Literal["sum", "largest", "mean", "weighted", "same"]


# Written for every optimizer step, captured or not.
HEARTBEAT_FIELDS = (
    EventField(
        "step", "Optimizer steps of the job so far, this one included: the first is 1.", "same"
    ),
    EventField("rollout_id", "Rollout of the step.", "same"),
    EventField("step_id", "The step within its rollout.", "same"),
    EventField("loss", "Loss of the step.", "mean"),
    EventField("grad_norm", "Norm of the gradient before it was clipped.", "largest"),
    EventField("reward_mean", "Mean raw reward.", "mean"),
    EventField("reward_std", "Largest deviation of raw rewards within a group.", "largest"),
    EventField("advantage_abs_max", "Largest absolute advantage of a valid token.", "largest"),
    EventField("truncation_rate", "Share of samples cut at the length limit, 0 to 1.", "mean"),
    EventField("valid_tokens", "Tokens that count in the loss.", "sum"),
    EventField("over_0_5", "Valid tokens with |old - rollout| log-prob above 0.5.", "sum"),
    EventField("over_1_0", "Valid tokens with |old - rollout| log-prob above 1.0.", "sum"),
    EventField("abs_delta_max", "Largest |old - rollout| log-prob of a valid token.", "largest"),
    EventField("abs_delta", "Token mean of |old - rollout| log-prob.", "weighted"),
    EventField("generation_kl", "Token mean of k3 with d = old - rollout.", "weighted"),
)
# Written once, by each rank that closes its recorder after a clean end of the training.
TERMINAL_FIELDS = (
    EventField("status", f"{ENDED_CLEAN}, or in a word how it ended otherwise.", "same"),
    EventField("reason", "Why, where it did not end clean.", "same"),
    EventField("steps", "Optimizer steps of the job when it ended.", "same"),
)
# What becomes of a sample of a rollout, in the order in which it does.
GENERATED, SCORED, FILTERED, BUFFERED = "generated", "scored", "filtered", "buffered"
CONSUMED = "consumed"
FATES = (GENERATED, SCORED, FILTERED, BUFFERED, CONSUMED)
_REASON = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}")


def check_fate(fate: str, reason: str) -> None:
    """Refuse a fate that is none, and a reason that is a text and not a word.

    Raises:
        SchemaError: It is so, or a filtered sample has no reason.

    >>> check_fate("filtered", "zero-std")
    """
    if fate not in FATES:
        found = repr(fate) if _REASON.fullmatch(fate) else f"a text of {len(fate)} characters"
        raise SchemaError(f"the fate of a sample is {found}, expected one of {', '.join(FATES)}")
    if (fate == FILTERED or reason) and not _REASON.fullmatch(reason):
        raise SchemaError(
            f"samples were {fate} for a reason of {len(reason)} characters, expected a word, such "
            "as zero-std",
            hint="No text is kept here: lower-case letters, digits, dots and dashes, 64 at most.",
        )


FIELDS_OF_EVENT = {HEARTBEAT: HEARTBEAT_FIELDS, TERMINAL: TERMINAL_FIELDS}


def dump_detail(event: str, values: Mapping[str, Any]) -> str:
    """The detail of an event as the JSON text that its row holds.

    Args:
        event: heartbeat or terminal.
        values: Its fields; numbers may be NaN or infinite.

    Raises:
        SchemaError: A field is not declared.

    >>> dump_detail("heartbeat", {"step": 7, "loss": float("nan")})
    '{"loss":"NaN","step":7}'
    """
    known = [one.name for one in FIELDS_OF_EVENT[event]]
    unknown = [name for name in values if name not in known]
    if unknown:
        raise SchemaError(
            f"a {event} has no field {unknown[0]!r}, expected one of {', '.join(known)}"
        )
    plain = {name: _plain(value) for name, value in values.items()}
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)


def load_detail(text: str | None) -> dict[str, Any]:
    """The detail of an event as values.

    Raises:
        SchemaError: It is no JSON object.

    >>> load_detail('{"loss":"NaN","step":7}')
    {'loss': nan, 'step': 7}
    """
    try:
        found = json.loads(text or "{}", parse_constant=_refused)
    except (ValueError, RecursionError) as error:
        raise SchemaError(f"the detail of an event is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise SchemaError(f"the detail of an event is {text!r}, expected a JSON object")
    return {
        name: _WORDS.get(value, value) if isinstance(value, str) else value
        for name, value in found.items()
    }


def _plain(value: Any) -> Any:
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


def _refused(word: str) -> Any:
    raise ValueError(f"found {word}, expected the text {word!r} in quotes")
