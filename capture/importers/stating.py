"""What a dump does not say and its user may: its settings, its groups, and so what is claimed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trajreplay.capture.importers.registry import ImportOptions
from trajreplay.schema.contracts import StageContract
from trajreplay.schema.errors import CaptureError
from trajreplay.schema.settings import Settings
from trajreplay.schema.settings.profiles import profile, with_changes

NO_SETTINGS = "the files do not say with which settings it was computed: state them with --profile"
BY_POSITION = "group_by_position"  # facts of a producer
STATED = "stated"
_GROUPING = "reward.grouping"


@dataclass(frozen=True)
class Statement:
    """What is claimed of the captures of a dump.

    Args:
        settings: The arithmetic in force as stated; that where nothing is set if it is not.
        stages: What is claimed of each stage.
        facts: Who stated what, for `ProducerInfo.extra`.
    """

    settings: Settings
    stages: tuple[StageContract, ...]
    facts: dict[str, str] = field(default_factory=dict)


def stated(options: ImportOptions, stages: Mapping[str, str], *, grouped: bool) -> Statement:
    """Settle what is claimed of a dump, which itself declares no contract.

    A stage can be recomputed where the dump has what it takes and its user states the settings;
    every other one can only be looked at, with the reason.

    Args:
        options: What the user said.
        stages: The stages of which the dump holds something, each with what it lacks to be
            recomputed; empty where it lacks nothing.
        grouped: Whether the samples have groups. Then a framework that groups by position is held
            to them: positions are those in its own process, and rows lie by rank.

    Raises:
        CaptureError: Settings are changed of which no profile was named.
        SchemaError: There is no such profile or setting.
    """
    facts = {}
    if options.group_by_position is not None:
        facts[BY_POSITION] = str(options.group_by_position)
    if options.profile is None:
        if options.changes:
            raise CaptureError(
                f"{', '.join(options.changes)} is stated and no profile, so that the other "
                "settings are unknown",
                hint="Name the framework that made the files: --profile NAME",
            )
        contracts = [
            StageContract(name, "inspect-only", reason=lack or NO_SETTINGS)
            for name, lack in stages.items()
        ]
        return Statement(Settings(), tuple(contracts), facts)
    base = profile(options.profile)
    changes = dict(options.changes)
    if grouped and base.settings.reward.grouping == "stride":
        changes.setdefault(_GROUPING, "group")
    facts[STATED] = ", ".join([base.label, *(f"{one}={value}" for one, value in changes.items())])
    contracts = [
        StageContract(name, "inspect-only", reason=lack) if lack else StageContract(name)
        for name, lack in stages.items()
    ]
    return Statement(with_changes(base.settings, changes), tuple(contracts), facts)


def trivial(lack: str) -> dict[str, str]:
    """The claims of the stages that almost any file passes: worth a verdict only beside another.

    Args:
        lack: What the stage lacks that would be beside them; empty where it lacks nothing.
    """
    reason = lack and f"nothing else can be recomputed, and so this proves nothing: {lack}"
    return dict.fromkeys(("sample", "reward.raw"), reason)


def groups_by_position(options: ImportOptions, samples: int, where: str) -> list[str | None]:
    """The groups of samples of which a file records none: as the user states them, else unknown.

    Args:
        options: What the user said.
        samples: How many there are, in the order of the file.
        where: The file, for messages.

    Raises:
        CaptureError: The last group would be short.
    """
    size = options.group_by_position
    if size is None:
        return [None] * samples
    if samples % size:
        raise CaptureError(
            f"{where}: {samples} samples, expected a multiple of --group-by-position {size}",
            hint="Give the number of responses to each prompt, or leave it out: groups are then "
            "unknown.",
        )
    return [f"g-{place // size}" for place in range(samples)]


def refuse_statements(options: ImportOptions, why: str) -> None:
    """Refuse what a user states of files that say it themselves.

    Raises:
        CaptureError: Something was stated.
    """
    given = {
        "--allow-numpy": options.allow_numpy,
        "--group-by-position": options.group_by_position is not None,
        "--profile": options.profile is not None,
        "--state": bool(options.changes),
    }
    names = [name for name, on in given.items() if on]
    if names:
        raise CaptureError(
            f"{', '.join(names)} cannot be said of these files: {why}", hint="Leave it out."
        )
