"""Dumps of text and scores alone: what is claimed of them, and which samples are of one prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trajreplay.capture.importers.registry import ImportOptions
from trajreplay.capture.importers.stating import groups_by_position
from trajreplay.schema.errors import CaptureError
from trajreplay.schema.records import SampleRecord

NO_TOKENS = "the files hold text and scores alone, and nothing that was computed from them"
# Facts of a producer.
TEXT_ALONE = {"tokens": "not recorded, and so no lengths"}
GROUPED_BY = "grouped_by"


def grouped_texts(
    samples: Sequence[SampleRecord], prompts: Sequence[str], options: ImportOptions, where: str
) -> tuple[tuple[SampleRecord, ...], dict[str, str]]:
    """Samples with their groups: those of one prompt, or as the user says.

    Args:
        samples: Those of a file, in its order.
        prompts: What tells the prompt of each apart.
        options: What the user said.
        where: The file, for messages.

    Returns:
        The samples, and by what they were grouped, for `ProducerInfo.extra`.

    Raises:
        CaptureError: A group by position would hold two prompts, or be short.
    """
    size = options.group_by_position
    if size is None:
        order: dict[str, int] = {}
        names = [f"g-{order.setdefault(one, len(order))}" for one in prompts]
        facts = {GROUPED_BY: "equal prompts"}
    else:
        names = [one or "" for one in groups_by_position(options, len(samples), where)]
        facts = {}
        for place in range(0, len(samples), size):
            held = set(prompts[place : place + size])
            if len(held) > 1:
                raise CaptureError(
                    f"{where}: rows {place} to {place + size - 1} have {len(held)} prompts, and "
                    f"--group-by-position {size} makes them one group",
                    hint="Give the number of responses to each prompt, or leave it out: samples "
                    "of equal prompts are then one group.",
                )
    grouped = tuple(replace(one, group_id=of) for one, of in zip(samples, names, strict=True))
    return grouped, facts
