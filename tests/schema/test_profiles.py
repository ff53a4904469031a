"""Profiles and the kinds of settings: every field has one, and what is stored comes back."""

import json
import re
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajreplay import SchemaError, Settings, profile, with_changes
from trajreplay.schema.canonical import dump_signed, load_signed
from trajreplay.schema.settings import PROFILES, SECTIONS, differences
from trajreplay.schema.settings.knobs import Kind, kinds

FIELDS = [(section, name) for section, kind in SECTIONS.items() for name in kinds(kind)]
NUMBERS = st.floats(-3e38, 3e38)
INTERVALS = st.tuples(NUMBERS, NUMBERS).map(lambda pair: tuple(sorted(pair)))
BY_KIND: dict[str, st.SearchStrategy[Any]] = {
    "flag": st.booleans(),
    "number": NUMBERS,
    "count": st.integers(0, 2**31 - 1),
    "weights": st.dictionaries(st.text(max_size=3), NUMBERS, max_size=3),
    "interval": INTERVALS,
    "intervals": st.dictionaries(st.text(max_size=3), INTERVALS, max_size=3),
    "names": st.lists(st.text(min_size=1, max_size=3), max_size=3).map(tuple),
}
WRONG: dict[str, tuple[Any, ...]] = {
    "name": ("", 1, True),
    "flag": (1, 0, "true"),
    "number": ("0.5", True, float("nan"), float("inf")),
    "count": (-1, 1.0, True, "8"),
    "weights": ([1.0], "a", {"a": True}, {"a": "1"}, {1: 1.0}, {"a": float("nan")}),
    "interval": ((2.0, 1.0), (1.0,), [0.0, 1.0], 0.5),
    "intervals": ([], (0.0, 1.0), {"a": 1.0}, {"a": (2.0, 1.0)}, {1: (0.0, 1.0)}),
    "names": ("a", ["a"], ("a", ""), ("a", 1)),
}


def _values(kind: Kind) -> st.SearchStrategy[Any]:
    found = BY_KIND[kind.what] if kind.what in BY_KIND else st.sampled_from(kind.known)
    return st.none() | found if kind.optional else found


@st.composite
def changed_settings(draw: st.DrawFn) -> Settings:
    chosen = draw(st.sets(st.sampled_from(FIELDS), max_size=6))
    return with_changes(
        Settings(),
        {
            f"{section}.{name}": draw(_values(kinds(SECTIONS[section])[name]))
            for section, name in sorted(chosen)
        },
    )


@given(changed_settings())
def test_settings_come_back_from_a_signed_tree_as_they_were(settings: Settings) -> None:
    stored = load_signed(dump_signed({"settings": settings.to_json()}), "x")["settings"]
    assert Settings.from_json(stored) == settings
    assert differences(Settings.from_json(json.loads(json.dumps(stored))), settings) == {}


@pytest.mark.parametrize(("section", "name"), FIELDS)
def test_a_value_of_another_kind_is_refused_by_name(section: str, name: str) -> None:
    kind = kinds(SECTIONS[section])[name]
    for wrong in WRONG[kind.what]:
        with pytest.raises(
            SchemaError, match=rf"{name} is .*, expected {re.escape(kind.expected)}"
        ):
            with_changes(Settings(), {f"{section}.{name}": wrong})
    if not kind.optional:
        with pytest.raises(SchemaError, match=f"{name} is None"):
            with_changes(Settings(), {f"{section}.{name}": None})


@pytest.mark.parametrize("section", SECTIONS)
def test_every_field_is_documented(section: str) -> None:
    doc = SECTIONS[section].__doc__ or ""
    assert not [one.name for one in fields(SECTIONS[section]) if one.name not in doc]
    for name, kind in kinds(SECTIONS[section]).items():
        named = [one for one in kind.known if f"`{one}`" in doc]
        elsewhere = (f"As `kl.{name.removeprefix('kl_loss_')}`", f"As loss.{name}")
        assert len(named) == len(kind.known) or any(one in doc for one in elsewhere)


@pytest.mark.parametrize("name", PROFILES)
def test_a_profile_is_found_with_and_without_its_version(name: str) -> None:
    found = profile(name)
    assert profile(found.label) is found
    with pytest.raises(SchemaError, match=f"no profile '{name}@0'"):
        profile(f"{name}@0")


@pytest.mark.parametrize(
    ("name", "changes", "field", "expected"),
    [
        ("trl", {"loss.eps_clip": 0.3}, "loss.eps_clip_high", 0.3),
        ("slime", {"loss.eps_clip": 0.3, "loss.eps_clip_high": 0.2}, "loss.eps_clip_high", 0.2),
        ("verl", {"loss.kl_loss_estimator": "k1"}, "loss.kl_loss_bounds", (None, None)),
        ("verl", {"loss.kl_loss_estimator": "k3"}, "loss.kl_loss_bounds", ((-10.0, 10.0), None)),
        ("verl", {"kl.estimator": "k3"}, "kl.bounds", ((-10.0, 10.0), None)),
        ("verl", {}, "kl.bounds", (None, None)),
        ("openrlhf", {"kl.estimator": "k2"}, "kl.value_clamp", (-10.0, 10.0)),
    ],
)
def test_what_follows_from_a_changed_field_is_what_the_framework_has(
    name: str, changes: dict[str, Any], field: str, expected: Any
) -> None:
    section, _, attribute = field.partition(".")
    found = getattr(with_changes(profile(name).settings, changes), section)
    assert getattr(found, attribute) == expected


def test_what_was_made_of_a_field_follows_it_and_what_was_stated_stays() -> None:
    clamped = with_changes(Settings(), {"kl.estimator": "low_var_kl"})
    assert clamped.kl.value_clamp == (-10.0, 10.0)
    assert with_changes(clamped, {"kl.estimator": "k3"}).kl.value_clamp is None
    stated = with_changes(Settings(), {"loss.eps_clip_high": 0.28})
    assert with_changes(stated, {"loss.eps_clip": 0.1}).loss.eps_clip_high == 0.28


def test_profiles_differ_where_frameworks_do() -> None:
    found = differences(profile("relax").settings, profile("verl").settings)
    assert found["loss.dual_clip"] == (None, 3.0)
    assert found["reward.lone"] == ("zero", "keep")
    assert "reward.epsilon" not in found
    epsilons = {name: one.settings.reward.epsilon for name, one in PROFILES.items()}
    assert (epsilons["trl"], epsilons["openrlhf"], epsilons["slime"]) == (1e-4, 1e-9, 1e-6)


# What frameworks have by default or, of a term that is off by default, once it is on: where names
# are the same and the arithmetic is not (KERNELS 1.2, 1.3 and 1.8 to 1.10).
DEFAULTS: list[tuple[str, dict[str, Any]]] = [
    (
        "reward.epsilon",
        {"relax": 1e-6, "slime": 1e-6, "verl": 1e-6, "trl": 1e-4, "nemo-rl": 1e-6}
        | {"openrlhf": 1e-9, "areal": 1e-5},
    ),
    ("reward.baseline", dict.fromkeys(PROFILES, "mean") | {"nemo-rl": "leave-one-out"}),
    (
        "reward.divisor",
        dict.fromkeys(PROFILES, "std")
        | {"nemo-rl": "leave-one-out-std", "areal": "std-around-baseline"},
    ),
    ("advantage.returns", dict.fromkeys(PROFILES, "estimated") | {"verl": "whitened"}),
    ("value.counts", dict.fromkeys(PROFILES, "trained") | {"nemo-rl": "unshifted"}),
    ("reward.overlong_floored", dict.fromkeys(PROFILES, False) | {"openrlhf": True}),
    ("reward.overlong_counts", {"areal": "trained", "verl": "response", "openrlhf": "response"}),
    ("reward.clip_after", dict.fromkeys(PROFILES) | {"openrlhf": (-10.0, 10.0)}),
    ("loss.dual_clip", dict.fromkeys(PROFILES) | {"verl": 3.0}),
    (
        "loss.cispo_bounds",
        {"relax": "by-sign", "trl": "upper-absolute", "slime": "two-sided", "verl": "two-sided"},
    ),
    (
        "loss.denominator_rows",
        dict.fromkeys(("relax", "slime", "trl", "nemo-rl"), "all")
        | dict.fromkeys(("verl", "openrlhf"), "with-tokens"),
    ),
    ("loss.kl_loss_weighted", {"trl": True, "slime": False, "verl": False}),
    ("loss.kl_loss_weight", {"trl": "ratio"}),
    (
        "loss.kl_loss_clamp",
        dict.fromkeys(("slime", "relax", "trl", "prime-rl"))
        | dict.fromkeys(("verl", "openrlhf", "nemo-rl"), (-10.0, 10.0)),
    ),
    (
        "kl.value_clamp",
        dict.fromkeys(("slime", "relax", "trl"))
        | dict.fromkeys(("openrlhf", "areal", "nemo-rl", "verl"), (-10.0, 10.0)),
    ),
    ("kl.clamped", dict.fromkeys(PROFILES, "every") | {"verl": "k3"}),
    ("advantage.whiten_ddof", dict.fromkeys(PROFILES, 1) | {"openrlhf": 0}),
    (
        "advantage.whiten_form",
        dict.fromkeys(PROFILES, "added") | {"openrlhf": "floored", "areal": "std"},
    ),
    ("advantage.whiten_epsilon", dict.fromkeys(PROFILES, 1e-8) | {"areal": 1e-5}),
    (
        "advantage.whiten_one_pass",
        dict.fromkeys(PROFILES, False) | dict.fromkeys(("slime", "relax"), True),
    ),
    (
        "advantage.whiten_short",
        {"slime": "biased", "relax": "biased", "areal": "keep", "verl": "raise"},
    ),
    (
        "advantage.masking",
        dict.fromkeys(("slime", "relax", "trl"), "through")
        | dict.fromkeys(("verl", "nemo-rl", "areal"), "carry")
        | {"openrlhf": "multiply"},
    ),
    (
        "loss.sapo_clipped",
        dict.fromkeys(PROFILES, "slope") | dict.fromkeys(("verl", "areal"), "nothing"),
    ),
    ("loss.kl_cov_ppo_kl", {"verl": "absolute"}),
    ("kl.log_ratio_clamp", dict.fromkeys(("slime", "openrlhf")) | {"nemo-rl": (-20.0, 20.0)}),
    ("kl.estimator", {"nemo-rl": "k3", "slime": "k1", "areal": "k1"}),
    (
        "value.factor",
        {"relax": 1.0, "slime": 1.0, "verl": 0.5, "openrlhf": 0.5, "nemo-rl": 0.5, "areal": 0.5},
    ),
]


@pytest.mark.parametrize(("label", "expected"), DEFAULTS, ids=[label for label, _ in DEFAULTS])
def test_profiles_have_what_their_frameworks_do(label: str, expected: dict[str, Any]) -> None:
    section, name = label.split(".")
    found = {one: getattr(getattr(PROFILES[one].settings, section), name) for one in expected}
    assert found == expected


@pytest.mark.parametrize("label", ["reward.nothing", "nothing.epsilon", "epsilon"])
def test_a_setting_that_there_is_not_is_refused_by_name(label: str) -> None:
    with pytest.raises(SchemaError, match=f"no setting '{label}'"):
        with_changes(Settings(), {label: 1})


@pytest.mark.parametrize(
    ("handoff", "match"),
    [
        ({"old_logprobs": "recomputed"}, "names 'old_logprobs', expected a column"),
        ({"rank": "exact"}, "names 'rank', expected a column"),
        ({"reward": "masked"}, "is 'masked', expected another: it is no list"),
        ({"kl": "rounded"}, "is 'rounded', expected one of exact"),
    ],
)
def test_a_handoff_that_cannot_be_is_refused_by_name(handoff: dict[str, str], match: str) -> None:
    with pytest.raises(SchemaError, match=match):
        Settings(handoff=handoff)
