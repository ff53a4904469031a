"""What a trainer says of captures before there is anything of them, checked before it is used."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trajreplay.schema.errors import CaptureError, SchemaError, TrajReplayError, shown
from trajreplay.schema.identity import ParallelCoordinates, ProducerInfo, check_count, make_key
from trajreplay.schema.policy import Redaction
from trajreplay.schema.settings import Settings

if TYPE_CHECKING:
    from trajreplay.schema import RecomputeConfig, StageContract

_MOST_CHARACTERS = 128
_MOST_EXTRA = 32
_LARGEST = 2**63 - 1
# What is noted of a capture whose own settings and stages are none.
UNKNOWN: Mapping[str, Any] = {"settings": Settings(), "stages": (), "cohort_size": None}


def whole(name: str, value: Any) -> int:
    """A count as a trainer holds it: an int, or a number of numpy or torch.

    Raises:
        CaptureError: It is none, or negative.

    >>> import numpy as np
    >>> whole("step_id", np.int64(3))
    3
    """
    if type(value) is int and 0 <= value <= _LARGEST:
        return value
    try:
        number = int(operator.index(value))
        check_count(name, value if isinstance(value, bool) else number, limit=_LARGEST)
    except (TypeError, ValueError, RuntimeError, SchemaError) as error:
        raise CaptureError(
            f"{name} is {shown(value)}, expected a whole number from 0 on",
            hint=f"Give {name} as the trainer counts it.",
        ) from error
    return number


def check_said(
    settings: Settings | RecomputeConfig | None,
    stages: Sequence[str | StageContract],
    cohort_size: int | None = None,
    *,
    producer: ProducerInfo | None = None,
    parallel: ParallelCoordinates | None = None,
) -> None:
    """Refuse what no capture could say of itself.

    Args:
        settings: The arithmetic in force; None where each capture states its own.
        stages: Stages that can be recomputed.
        cohort_size: Samples of the cohort, where known.
        producer: The program that captures.
        parallel: Where its rank stands.

    Raises:
        SchemaError: Something is wrong.
    """
    from trajreplay.writer.draft import make_draft

    producer, parallel = producer or ProducerInfo(), parallel or ParallelCoordinates()
    try:
        _check_producer(producer)
        make_draft(
            make_key("r", 0, "rollout", 0, None, 0),
            [0],
            Settings() if settings is None else settings,
            producer=producer,
            parallel=parallel,
            stages=stages,
            redaction=Redaction({}),
            owner=None,
            cohort_size=cohort_size,
            tolerances={},
        )
    except TrajReplayError as error:
        raise SchemaError(error.message, hint=error.hint) from error
    except (TypeError, ValueError, AttributeError) as error:
        kinds = [type(one).__name__ for one in (settings, stages, producer, parallel)]
        raise SchemaError(
            f"settings, stages, producer and coordinates are {', '.join(kinds)}, expected "
            "Settings or RecomputeConfig, names of stages, ProducerInfo and ParallelCoordinates"
        ) from error


def _check_producer(producer: ProducerInfo) -> None:
    """Refuse texts where words are expected: no text is kept of a training."""
    told = producer.to_json()
    extra: Mapping[Any, Any] = told.pop("extra")
    words = [*told.items(), *(("extra", one) for pair in extra.items() for one in pair)]
    odd = [
        name
        for name, value in words
        if not (isinstance(value, str) and len(value) <= _MOST_CHARACTERS and _is_a_line(value))
    ]
    if odd or len(extra) > _MOST_EXTRA:
        found = f"{odd[0]} is none" if odd else f"extra has {len(extra)}"
        raise SchemaError(
            f"of the producer {found}, expected texts of one line with {_MOST_CHARACTERS} "
            f"characters at most, {_MOST_EXTRA} in extra"
        )


def _is_a_line(text: str) -> bool:
    return not text or text.isprintable()
