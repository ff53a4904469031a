"""Names on disk: every key has one name, and every name stands for one key."""

import pytest
from hypothesis import given

from tests.helpers.strategies import ids, keys
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.identity import CaptureKey, make_key
from trajreplay.schema.layout import (
    attempt_path,
    data_path,
    entry_path,
    key_of_entry,
    quoted,
    run_of_attempt,
)

AWKWARD = [
    "a/b c",
    "50%",
    "%2F",
    "a%2Fb",
    "..a",
    "-",
    "run_id=x",
    "a.b.c",
    "r#1?x&y",
    "\u8bad\u7ec3",
    "a+b",
    "'\"\\",
    "*[x]?",
    "~",
    "\u00e9",
]


@given(keys())
def test_a_key_comes_back_from_the_name_of_its_entry(key: CaptureKey) -> None:
    assert key_of_entry(entry_path(key)) == key


@given(ids())
def test_a_run_comes_back_from_the_name_of_its_attempt(run_id: str) -> None:
    assert run_of_attempt(attempt_path(run_id, 7)) == (run_id, 7)


# K-099
@pytest.mark.parametrize("run_id", AWKWARD)
def test_awkward_ids_are_one_safe_folder_and_come_back(run_id: str) -> None:
    key = make_key(run_id, 0, "step", 1, 2, 3)
    folder = quoted(run_id)
    assert folder.isascii()
    assert not set(folder) & set("/\\ *?[]'\"#&")
    assert key_of_entry(entry_path(key)) == key
    assert data_path(key, "steps").split("/")[2] == f"run_id={folder}"


def test_different_ids_have_different_folders() -> None:
    assert len({quoted(one) for one in AWKWARD}) == len(AWKWARD)


def test_a_data_file_never_has_the_same_name_twice() -> None:
    key = make_key("r", 0, "rollout", 1, None, 0)
    assert data_path(key, "rollouts") != data_path(key, "rollouts")


@pytest.mark.parametrize(
    "path",
    [
        "_manifest/entries/run_id=r/attempt=0/rollout_id=1/step.0.0.data.txt",
        "_manifest/entries/run_id=r/attempt=0/rollout_id=1/step.0.0.other.json",
        "_manifest/entries/run_id=r/attempt=0/rollout_id=1/step.-.0.data.json",
        "_manifest/entries/run_id=r/attempt=0/rollout_id=1/rollout.0.0.data.json",
        "_manifest/entries/run_id=r/attempt=0/rollout_id=1/step.0.00.data.json",
        "_manifest/entries/run_id=r/attempt=0/rollout_id=1/step.+0.0.data.json",
        "_manifest/entries/run_id=r/attempt=0/rollout_id=-1/step.0.0.data.json",
        "_manifest/entries/run_id=r/attempt=00/rollout_id=1/step.0.0.data.json",
        "_manifest/entries/run_id=a%2fb/attempt=0/rollout_id=1/step.0.0.data.json",
        "_manifest/entries/run_id=a b/attempt=0/rollout_id=1/step.0.0.data.json",
        "_manifest/entries/run_id=%ff/attempt=0/rollout_id=1/step.0.0.data.json",
        "_manifest/entries/run_id=..%2F..%2Fx%00/attempt=0/rollout_id=1/step.0.0.data.json",
        "_manifest/entries/attempt=0/run_id=r/rollout_id=1/step.0.0.data.json",
        "_manifest/entries/run_id=r/attempt=0/step.0.0.data.json",
        "_manifest/entries/run_id=r/attempt=0/rollout_id=1/x/step.0.0.data.json",
        "elsewhere/run_id=r/attempt=0/rollout_id=1/step.0.0.data.json",
    ],
)
def test_a_name_that_no_key_has_is_refused(path: str) -> None:
    with pytest.raises(DatasetError, match="no capture has this name"):
        key_of_entry(path)


@pytest.mark.parametrize(
    "path", ["_manifest/attempts/run_id=r/x.json", "_manifest/attempts/run_id=r/01.json", "a/b/c"]
)
def test_a_name_that_no_attempt_has_is_refused(path: str) -> None:
    with pytest.raises(DatasetError):
        run_of_attempt(path)
