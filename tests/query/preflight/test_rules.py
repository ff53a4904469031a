"""Rules as data: each has an example that breaks it and one that does not, and is bounded text."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajreplay.query.preflight import FRAMEWORKS, Rule, built_in, load_rules, preflight
from trajreplay.query.preflight.configs import parse_overrides, parse_value
from trajreplay.query.preflight.evaluation import Undecided
from trajreplay.schema import QueryError

RULES = [rule for framework in FRAMEWORKS for rule in built_in(framework).rules]
VERSIONS = {
    "": None,
    ">=0.22,<1.10": "1.5.0",
    "<0.5": "0.4.0",
    "<0.6": "0.5.0",
    "<0.7": "0.6",
    "<0.8": "0.6.0",
    ">=0.6,<0.8": "0.7.0",
}


def facts_of(rule: Rule) -> dict[str, Any]:
    pairs = (one.partition("=") for one in rule.facts)
    return {name: parse_value(value) for name, _, value in pairs}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_refuses_its_failing_example_and_not_its_passing_one(rule: Rule) -> None:
    for example, broken in ((rule.fails, True), (rule.passes, False)):
        assert example
        report = preflight(
            parse_overrides(example),
            rule.framework,
            version=VERSIONS[rule.versions],
            facts=facts_of(rule),
        )
        found = [one.rule.name for one in report.findings]
        assert (rule.name in found) is broken
        assert rule.name not in report.undecided


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_rule_says_why_what_to_write_and_where_it_is_known_from(rule: Rule) -> None:
    assert rule.why.endswith(".")
    assert rule.instead
    assert rule.source
    heads = {rule.path.split(".")[0], rule.path.split(".")[-1]}
    assert any(head in rule.when or head in " ".join(rule.fails) for head in heads)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_framework_has_rules_and_its_defaults_break_only_what_they_do(
    framework: str,
) -> None:
    assert len(built_in(framework).rules) >= 4
    one_sample = {"slime", "relax"}  # GRPO with one sample a prompt, where nothing is written
    found = [one.rule.name for one in preflight({}, framework).findings]
    assert found == [f"{framework}/group-of-one"] * (framework in one_sample)


@pytest.mark.parametrize("rule", [one for one in RULES if one.versions], ids=lambda one: one.name)
def test_a_rule_of_some_versions_holds_for_those(rule: Rule) -> None:
    assert rule.holds_for(VERSIONS[rule.versions]) is True
    assert rule.holds_for("99") is False
    assert rule.holds_for(None) is None
    report = preflight(parse_overrides(rule.fails), rule.framework, facts=facts_of(rule))
    assert report.undecided[rule.name] == ("version",)


def test_versions_compare_as_numbers() -> None:
    (rule,) = [one for one in RULES if one.name == "trl/loss-scale"]
    holds = {version: rule.holds_for(version) for version in ("0.9", "0.22", "1.9.3", "1.10.0")}
    assert holds == {"0.9": False, "0.22": True, "1.9.3": True, "1.10.0": False}


@pytest.mark.parametrize("version", ["main", "0.6rc1", "0.6.dev3", "1.x", "", "0.6 ", "v"])
def test_a_version_that_is_no_release_is_refused(version: str) -> None:
    with pytest.raises(QueryError, match=r"expected the numbers of a release"):
        preflight({}, "nemo-rl", version=version)


@given(
    st.lists(st.integers(0, 30), min_size=1, max_size=4), st.lists(st.integers(0, 30), min_size=1)
)
def test_releases_compare_number_by_number(version: list[int], bound: list[int]) -> None:
    stated = ".".join(map(str, version))
    width = max(len(version), len(bound))
    left, right = ([*one, *[0] * (width - len(one))] for one in (version, bound))
    for sign, holds in (("<", left < right), (">=", left >= right), ("==", left == right)):
        rule = replace(RULES[0], versions=f"{sign}{'.'.join(map(str, bound))}")
        for text in (stated, f"v{stated}", f"{stated}.post1", f"{stated}+cu128"):
            assert rule.holds_for(text) is holds


def quoted(value: Any) -> Any:
    """Numbers and switches in quotes."""
    if isinstance(value, dict):
        return {key: quoted(one) for key, one in value.items()}
    return str(value).lower() if isinstance(value, bool | int | float) else value


def left_open(value: Any) -> Any:
    """Every setting as an interpolation of the environment."""
    if isinstance(value, dict):
        return {key: left_open(one) for key, one in value.items()}
    return value if value is None else Undecided(text="${oc.env:X}")


@pytest.mark.parametrize("written", [quoted, left_open])
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_no_rule_is_passed_over_in_silence_where_its_settings_do_not_tell(
    rule: Rule, written: Callable[[Any], Any]
) -> None:
    report = preflight(
        written(parse_overrides(rule.fails)),
        rule.framework,
        version=VERSIONS[rule.versions],
        facts=facts_of(rule),
    )
    found = {one.rule.name for one in report.findings}
    assert rule.name in found | report.unread.keys()
    for settings in report.unread.values():
        assert settings
        assert None not in settings.values()


def test_what_hangs_on_a_fact_is_named_and_not_refused() -> None:
    config = {"grpo": {"num_prompts_per_step": 32}}
    report = preflight(config, "nemo-rl")
    assert report.ok
    assert report.undecided["nemo-rl/small-dataset"] == ("dataset_size",)
    assert not preflight(config, "nemo-rl", facts={"dataset_size": 8}).ok


def test_a_fact_or_value_that_no_rule_knows_is_an_error() -> None:
    with pytest.raises(QueryError, match="asks for data_size"):
        preflight({}, "nemo-rl", facts={"data_size": 8})
    with pytest.raises(QueryError, match="expected one of legacy, single-controller"):
        preflight({}, "nemo-rl", facts={"entry": "legcy"})
    with pytest.raises(QueryError, match="expected one of"):
        preflight({}, "nemorl")


def write(path: Path, rule: str, head: str = 'framework = "trl"\nversion = 1\n') -> Path:
    path.write_text(head + rule)
    return path


OWN = """
[[rule]]
name = "house-beta"
when = "beta > 0.1"
path = "beta"
why = "Ours diverged."
instead = "0.04"
"""


def test_users_add_rules_by_file(tmp_path: Path) -> None:
    own = load_rules(write(tmp_path / "own.toml", OWN))
    report = preflight({"beta": 0.5}, "trl", more=[own])
    assert [(one.rule.name, one.value) for one in report.findings] == [("trl/house-beta", 0.5)]
    with pytest.raises(QueryError, match="rules are for trl, the configuration is of verl"):
        preflight({"beta": 0.5}, "verl", more=[own])
    with pytest.raises(QueryError, match="there twice"):
        preflight({}, "trl", more=[own, own])


@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ("[[rule]]\nname = 'a'", "lacks instead, path, when, why"),
        (OWN + "severity = 'fatal'", "severity 'fatal'"),
        (OWN + "colour = 'red'", "unknown colour"),
        (OWN + "fails = 3", "fails is no list"),
        (OWN + "versions = '1.0'", "versions are '1.0'"),
        (OWN.replace("house-beta", "House Beta"), "expected a name"),
        (OWN.replace("beta > 0.1", "__import__('os').system('x')"), "functions are"),
        (OWN.replace("beta > 0.1", "[x for x in y]"), "ListComp is not allowed"),
        (OWN.replace("beta > 0.1", "beta ** 9 ** 9 > 1"), "operator Pow is not allowed"),
        (OWN.replace("beta > 0.1", "beta >"), "condition"),
        (OWN.replace("beta > 0.1", "lambda: 1"), "Lambda is not allowed"),
        (OWN + OWN, "twice"),
        (OWN.replace("beta > 0.1", "starts()"), "starts has 0 arguments"),
        (OWN.replace("beta > 0.1", "fact.sise > 3"), "asks for fact sise, expected one of dataset"),
        (OWN + "facts = ['sise=3']", "asks for fact sise"),
        (OWN + "facts = ['processes']", "expected NAME=VALUE"),
        (OWN + "facts = ['side=x']\n[facts]\nside = ['left']", "fact side is 'x', expected one of"),
        (OWN + "fails = ['bta=0.5']", "is false of its example fails; expected true"),
        (OWN + "fails = ['beta=0.05']", "is false of its example fails; expected true"),
        (OWN + "fails = ['beta=\"0.5\"']", "is not decided of its example fails, which hangs on b"),
        (OWN + "passes = ['beta=0.5']", "is true of its example passes; expected false"),
        (OWN + "fails = ['beta']", "fails: override 'beta': expected path=value"),
        ("rules = 1", "unknown rules"),
        ("[facts]\nsize = 3", "expected tables"),
    ],
)
def test_a_file_of_rules_that_is_malformed_is_refused(
    rule: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(QueryError, match=reason.replace("(", r"\(")):
        load_rules(write(tmp_path / "own.toml", rule))


def test_a_file_of_rules_names_its_framework(tmp_path: Path) -> None:
    with pytest.raises(QueryError, match="framework None"):
        load_rules(write(tmp_path / "own.toml", OWN, head="version = 1\n"))


def merged(examples: list[tuple[str, ...]]) -> dict[str, Any]:
    return parse_overrides([one for example in examples for one in example])


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize("said", FRAMEWORKS)
def test_a_configuration_of_another_framework_never_passes(framework: str, said: str) -> None:
    """What only defaults decide is nothing of the file, and a few names in common are little."""
    config = merged([rule.passes for rule in built_in(framework).rules])
    report = preflight(config, said)
    if said == framework or {said, framework} == {"slime", "relax"}:  # read the same arguments
        assert report.unverified == ""
        return
    assert not report.ok
    if report.verdict == "unverified":
        likely = report.unverified.partition("it looks like one of ")[2].partition(": ")[0]
        assert framework in likely.split(" or ")


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_no_rule_is_silenced_where_its_own_settings_are_there(rule: Rule) -> None:
    report = preflight(parse_overrides(rule.fails), rule.framework, facts=facts_of(rule))
    assert not report.ok or rule.severity == "warning" or rule.name in report.undecided


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_file_without_any_setting_that_rules_read_is_unverified(framework: str) -> None:
    report = preflight({"nothing_of": {"these": 1}}, framework)
    assert "looks like" not in report.unverified
    assert f"the rules of {framework} read is in it" in report.unverified
    assert not report.ok
