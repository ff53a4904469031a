"""Configurations as files: formats, parents, references, overrides, and bounds."""

import json
from pathlib import Path

import pytest

from trajreplay.query.preflight import load_config
from trajreplay.query.preflight.configs import parse_overrides
from trajreplay.query.preflight.evaluation import Undecided
from trajreplay.schema import QueryError


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", "a: {b: 1, lr: 1e-6, on: true}\n"),
        ("c.json", '{"a": {"b": 1, "lr": 1e-6, "on": true}}'),
        ("c.toml", "[a]\nb = 1\nlr = 1e-6\non = true\n"),
    ],
)
def test_yaml_json_and_toml_say_the_same(tmp_path: Path, name: str, text: str) -> None:
    wanted = {"b": 1, "lr": 1e-6, "on": True}
    found = load_config(write(tmp_path / name, text))
    assert json.dumps(found["a"]).replace('"true"', "true") == json.dumps(
        wanted if name != "c.yaml" else {"b": 1, "lr": 1e-6, "True": True}
    )


def test_parents_come_first_and_the_child_counts(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "a: {x: 1, y: 2}\nb: 3\n")
    write(tmp_path / "middle.yaml", "defaults: base.yaml\na: {y: 5}\n")
    child = write(tmp_path / "child.yaml", "defaults: [middle.yaml]\na: {z: null}\nb: null\n")
    assert load_config(child) == {"a": {"x": 1, "y": 5, "z": None}, "b": None}


def test_parents_in_a_circle_are_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.yaml", "defaults: b.yaml\n")
    write(tmp_path / "b.yaml", "defaults: a.yaml\n")
    with pytest.raises(QueryError, match="circle"):
        load_config(tmp_path / "a.yaml")


def test_what_hydra_composes_is_left_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "defaults:\n  - _self_\n  - actor: dp\na: 1\n")
    assert load_config(path)["a"] == 1


def test_references_are_replaced_and_what_cannot_be_is_undecided(tmp_path: Path) -> None:
    text = "n: 4\na: ${n}\nb: ${a}\nc: ${oc.env:HOME}\nd: x${n}\ne: ${e}\nf: ${nope.x}\n"
    found = load_config(write(tmp_path / "a.yaml", text))
    unknown = {"c": "${oc.env:HOME}", "d": "x${n}", "e": "${e}", "f": "${nope.x}"}
    known = {"n": 4, "a": 4, "b": 4}
    assert found == known | {name: Undecided(text=one) for name, one in unknown.items()}


def test_overrides_are_typed_and_make_what_is_missing(tmp_path: Path) -> None:
    path = write(tmp_path / "a.yaml", "a: {b: 1, c: 2}\nd: text\n")
    overrides = ["a.b=null", "++x.y=[1, 2]", "~a.c", "d.e=1e-6", "f='1'"]
    assert load_config(path, overrides) == {
        "a": {"b": None},
        "d": {"e": 1e-6},
        "x": {"y": [1, 2]},
        "f": "1",
    }


@pytest.mark.parametrize("override", ["a", "=1", "a..b=1", "a.b=[1", "a=!!python/name:os.system"])
def test_what_is_no_override_is_refused(tmp_path: Path, override: str) -> None:
    with pytest.raises(QueryError, match="override"):
        load_config(write(tmp_path / "a.yaml", "a: 1\n"), [override])


BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{chr(98 + n)}: &{chr(98 + n)} [{','.join([f'*{chr(97 + n)}'] * 9)}]\n" for n in range(8)
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\na: 2\n", "twice"),
        ("- 1\n", "expected a mapping"),
        ("a: [1\n", "not to be read"),
        ("a: !!python/object/apply:os.system [x]\n", "not to be read"),
        ("a: &x [*x]\n", "too deep"),
        (BOMB, "more than"),
        ("", "expected a mapping"),
    ],
)
def test_what_is_no_bounded_mapping_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    with pytest.raises(QueryError, match=reason):
        load_config(write(tmp_path / "a.yaml", text))


HUGE = hex(1 << 20_000)  # whose decimal digits Python refuses to write


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.yaml", f"a: {HUGE}\n"),
        ("a.yaml", f"a: [{{{HUGE}: 1}}]\n"),
        ("a.yaml", f"a: {1 << 63}\n"),
        ("a.yaml", f"a: 1{'0' * 5000}\n"),
        ("a.json", f'{{"a": [{1 << 63}]}}'),
        ("a.toml", f"a = {HUGE}\n"),
    ],
)
def test_integers_that_no_setting_can_have_are_refused(
    tmp_path: Path, name: str, text: str
) -> None:
    with pytest.raises(QueryError, match="not to be read"):
        load_config(write(tmp_path / name, text))
    if name == "a.yaml":
        with pytest.raises(QueryError, match="override"):
            parse_overrides([f"a={text.strip().removeprefix('a: ')}"])
    assert load_config(write(tmp_path / "b.json", f'{{"a": {-(1 << 63)}}}')) == {"a": -(1 << 63)}


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(QueryError, match="no file"):
        load_config(tmp_path / "none.yaml")
