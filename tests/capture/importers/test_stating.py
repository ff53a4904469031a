"""What a user says of files that declare no contract themselves."""

import pytest

from trajreplay import CaptureError, SchemaError
from trajreplay.capture.importers import ImportOptions
from trajreplay.capture.importers.stating import (
    NO_SETTINGS,
    groups_by_position,
    refuse_statements,
    stated,
)
from trajreplay.schema import PROFILES

_STAGES = {"sample": "", "reward.post_process": "", "loss.policy": "there is no loss"}


def test_without_settings_nothing_can_be_recomputed() -> None:
    found = stated(ImportOptions(), _STAGES, grouped=True)
    assert {one.stage: (one.capability, one.reason) for one in found.stages} == {
        "sample": ("inspect-only", NO_SETTINGS),
        "reward.post_process": ("inspect-only", NO_SETTINGS),
        "loss.policy": ("inspect-only", "there is no loss"),
    }
    assert found.facts == {}


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_is_taken_as_it_is_and_written_down(name: str) -> None:
    found = stated(ImportOptions(profile=name), _STAGES, grouped=False)
    assert found.settings == PROFILES[name].settings
    assert found.facts == {"stated": PROFILES[name].label}
    assert {one.stage: one.capability for one in found.stages} == {
        "sample": "recompute",
        "reward.post_process": "recompute",
        "loss.policy": "inspect-only",
    }


def test_groups_that_are_known_replace_positions_unless_it_is_said_otherwise() -> None:
    known = stated(ImportOptions(profile="slime"), _STAGES, grouped=True)
    assert known.settings.reward.grouping == "group"
    assert known.facts == {"stated": "slime@1, reward.grouping=group"}
    said = ImportOptions(profile="slime", changes={"reward.grouping": "stride"})
    assert stated(said, _STAGES, grouped=True).settings.reward.grouping == "stride"


def test_changes_without_a_profile_say_too_little() -> None:
    with pytest.raises(CaptureError, match="no profile"):
        stated(ImportOptions(changes={"reward.epsilon": 1e-4}), _STAGES, grouped=True)
    with pytest.raises(SchemaError, match="no profile 'odd'"):
        stated(ImportOptions(profile="odd"), _STAGES, grouped=True)


def test_groups_by_position_are_whole_stated_and_never_taken_for_granted() -> None:
    said = ImportOptions(group_by_position=2)
    assert groups_by_position(said, 4, "x.pt") == ["g-0", "g-0", "g-1", "g-1"]
    assert stated(said, _STAGES, grouped=True).facts == {"group_by_position": "2"}
    assert groups_by_position(ImportOptions(), 3, "x.pt") == [None] * 3
    with pytest.raises(CaptureError, match="3 samples, expected a multiple of"):
        groups_by_position(said, 3, "x.pt")


def test_files_that_say_it_themselves_take_no_statement() -> None:
    refuse_statements(ImportOptions(run="r1", ids="global"), "they do")
    said = ImportOptions(allow_numpy=True, group_by_position=2, profile="trl", changes={"a": 1})
    with pytest.raises(
        CaptureError, match="--allow-numpy, --group-by-position, --profile, --state cannot be said"
    ):
        refuse_statements(said, "they do")
