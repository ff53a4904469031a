"""`trajreplay profiles`: every profile prints, and every difference has a number."""

import json
from itertools import permutations

import pytest

from tests.helpers.cli import run
from tests.stages.test_composed import CHANGES, PLAIN
from trajreplay import with_changes
from trajreplay.schema.settings import PROFILES, SECTIONS, differences
from trajreplay.schema.settings.knobs import kinds
from trajreplay.stages.compose.example import worked_number

SECTION_OF = {
    "reward.raw": "reward",
    "reward.post_process": "reward",
    "advantage.kl": "kl",
    "advantage.estimate": "advantage",
    "loss.policy": "loss",
    "loss.value": "value",
}
# Settings of several micro-batches or fragments; one refuses the lone sample that the example
# has, one is of longer responses, one of how clipped values are counted.
NOT_OF_THE_EXAMPLE = {
    "fragments share their tokens",
    "tokens by micro-batch",
    "samples by micro-batch",
    "sums by micro-batch",
    "steps",
    "steps discounted",
    "pass@k",
    "pass@k, plain",
    "overlong",
    "overlong first message",
    "overlong trained tokens",
    "value clipped by loss",
    # Its response that was cut has a reward of 0, and none is as long as that.
    "cut responses",
    "lengthy and cut responses",
    "overlong, less",
}


def test_profiles_are_listed_with_what_is_peculiar_about_each() -> None:
    found = run("profiles", "--format", "json")
    assert (found.code, found.err) == (0, "")
    rows = json.loads(found.out)
    assert [one["profile"] for one in rows] == [one.label for one in PROFILES.values()]
    assert all(one["doc"] for one in rows)


@pytest.mark.parametrize("form", ["table", "json"])
@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_is_shown_in_full(name: str, form: str) -> None:
    found = run("profiles", name, "--format", form)
    assert (found.code, found.err) == (0, "")
    for section, kind in SECTIONS.items():
        assert all(f"{section}.{field}" in found.out for field in kinds(kind))


@pytest.mark.parametrize(("left", "right"), [*permutations(PROFILES, 2)])
def test_two_profiles_differ_field_by_field_with_a_number(left: str, right: str) -> None:
    found = run("profiles", "diff", left, right, "--format", "json")
    assert (found.code, found.err) == (0, "")
    rows = json.loads(found.out)
    expected = differences(PROFILES[left].settings, PROFILES[right].settings)
    assert [one["setting"] for one in rows] == [*expected]
    for one in rows:
        section = one["setting"].partition(".")[0]
        if section == "value" and "nemo-rl" in (left, right):
            continue  # whose value loss counts values that no column holds
        if section in SECTION_OF.values():
            lone = one["setting"] == "reward.lone"
            assert isinstance(one["number"], float) or (lone and one["number"] == "NaN"), one
            assert isinstance(one["changed"], float) or (lone and one["changed"] == "NaN"), one


@pytest.mark.parametrize(
    ("left", "right", "setting"),
    [
        ("nemo-rl", "verl", "reward.baseline"),
        ("slime", "trl", "reward.epsilon"),
        ("relax", "verl", "loss.dual_clip"),
        ("relax", "openrlhf", "reward.epsilon"),
        ("relax", "verl", "value.factor"),
        ("relax", "verl", "loss.aggregation"),
        ("relax", "verl", "reward.lone"),
        ("relax", "prime-rl", "loss.surrogate"),
        ("relax", "slime", "reward.grouping"),
    ],
)
def test_what_users_hunt_changes_the_number(left: str, right: str, setting: str) -> None:
    rows = json.loads(run("profiles", "diff", left, right, "--format", "json").out)
    (row,) = [one for one in rows if one["setting"] == setting]
    assert row["number"] != row["changed"]


def test_a_profile_that_there_is_not_is_a_usage_error() -> None:
    found = run("profiles", "diff", "verl", "ppo")
    assert found.code == 2
    assert "no profile 'ppo', expected one of relax@1" in found.err


@pytest.mark.parametrize("name", sorted(CHANGES.keys() - NOT_OF_THE_EXAMPLE))
def test_the_worked_example_has_a_number_for_every_setting(name: str) -> None:
    changes, stage = CHANGES[name]
    settings, section = with_changes(PLAIN, changes), SECTION_OF[stage]
    number = worked_number(settings, section)
    assert number is not None
    assert number != worked_number(PLAIN, section)


def test_the_numbers_of_a_difference_are_explained_in_a_table() -> None:
    found = run("profiles", "diff", "verl", "trl")
    assert "number: a worked example under verl; changed: with this field of trl" in found.err
    same = run("profiles", "diff", "verl", "verl")
    assert (same.code, same.out, same.err) == (0, "", "They do not differ.\n")
