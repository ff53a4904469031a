"""Known ways to shape rewards wrong: lengths, overlong penalties, clips."""

from __future__ import annotations

from collections.abc import Iterable

from trajreplay.stages.block import Block
from trajreplay.stages.counterfactuals.variants import Variant
from trajreplay.stages.faults.fault import (
    Told,
    each,
    under,
)
from trajreplay.stages.faults.rewards import fault

_ISSUE = "https://github.com/"


def _exchanged_clips(block: Block) -> Iterable[Told]:
    reward = block.settings.reward
    if reward.clip_before != reward.clip_after:
        changes = {"reward.clip_before": reward.clip_after, "reward.clip_after": reward.clip_before}
        yield Told(Variant(changes))


FAULTS = (
    fault(
        "length-of-tool-tokens",
        "response length measured as a span over tool tokens",
        "the overlong penalty of all response tokens, tool output included",
        "where the length is taken; reward.overlong_counts",
        under(reward__overlong_counts="response"),
        "K-028",
        f"{_ISSUE}OpenRLHF/OpenRLHF/pull/1252",
    ),
    fault(
        "length-of-trained-tokens",
        "response length measured over trained tokens alone",
        "the overlong penalty of the trained tokens alone",
        "where the length is taken; reward.overlong_counts",
        under(reward__overlong_counts="trained"),
    ),
    fault(
        "overlong-floor",
        "overlong penalty with another floor",
        "the overlong penalty {}",
        "reward.overlong_floored: floored in OpenRLHF only",
        each(
            "reward.overlong_floored",
            (True, False),
            {True: "that stops growing", False: "that grows without end"}.__getitem__,
        ),
    ),
    fault(
        "overlong-off",
        "overlong penalty configured and not applied",
        "rewards without the overlong penalty",
        "reward.overlong_max_length",
        under(reward__overlong_max_length=None),
    ),
    fault(
        "truncation-off",
        "reward of truncated responses left as it is",
        "rewards that do not change where a response was cut",
        "reward.stop_properly_coef",
        under(reward__stop_properly_coef=None),
    ),
    fault(
        "clip-off",
        "clipping configured and not applied",
        "rewards that are not clipped",
        "reward.clip_before, reward.clip_after",
        under(reward__clip_before=None, reward__clip_after=None),
    ),
    fault(
        "clip-exchanged",
        "clipping before instead of after normalisation",
        "rewards clipped on the other side of the normalisation",
        "the order of clip and normalisation: OpenRLHF clips after it",
        _exchanged_clips,
    ),
)
