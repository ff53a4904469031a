"""The import of dumps of text and scores alone: those of verl and AReaL."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers.dumps import AREAL, VERL, Tree, copied, edited, imported, reasons, rows, verdicts
from trajreplay import Lake
from trajreplay.capture.importers import ImportOptions

ROLLOUTS = VERL / "rollout_data_dir" / "3.jsonl"
VALIDATION = VERL / "validation_data_dir" / "3.jsonl"
TASK = AREAL / "17.jsonl"
SCORES = [1.0, 0.0, 0.1, 0.0, 1.0, 1.1, 0.0, 0.0]
Lines = list[Tree]


def of_tasks(lines: Lines) -> Lines:
    """The lines as the newer trainer of verl writes them: in order of their names, no more."""
    kept = ("input", "output", "gts", "score", "step")
    named = [
        {**{name: one[name] for name in kept}, "uid": f"task_{place // 4}_{place % 4}_0"}
        for place, one in enumerate(lines)
    ]
    return sorted(named, key=lambda one: str(one["uid"]))


@pytest.mark.parametrize("newer", [False, True])
def test_groups_and_scores_of_verl_are_those_recorded(
    newer: bool, lake: Lake, tmp_path: Path
) -> None:
    path = copied(ROLLOUTS, tmp_path)
    source = imported(lake, "verl", edited(path, of_tasks) if newer else path)
    assert (source.status, source.samples) == ("imported", 8)
    found = rows(lake, "select group_id, raw_reward from rollouts order by row")
    assert [group for group, _ in found] == ["g-0"] * 4 + ["g-1"] * 4
    assert [score for _, score in found] == pytest.approx(SCORES, abs=1e-7)
    ids = {one for (one,) in rows(lake, "select sample_id from rollouts")}
    assert ids >= ({"task_0_0_0"} if newer else {"req-0000"})


def test_uids_tell_prompts_apart_that_read_the_same(lake: Lake, tmp_path: Path) -> None:
    path = edited(
        copied(ROLLOUTS, tmp_path),
        lambda lines: [{**one, "input": "3+4="} for one in of_tasks(lines)],
    )
    imported(lake, "verl", path)
    assert rows(lake, "select count(distinct group_id) from rollouts") == [(2,)]


def test_validation_of_verl_is_told_by_its_folder(lake: Lake) -> None:
    report = lake.import_files("verl", VERL)
    assert [one.captures[0][0] for one in report.sources] == [
        "rollout_data_dir",
        "validation_data_dir-val",
    ]
    found = rows(lake, "select raw_reward from rollouts where run_id like '%-val' order by row")
    assert [one for (one,) in found] == pytest.approx(SCORES, abs=1e-7)
    # both lie in one run, and neither takes the other's place
    again = Lake.create(lake.path + "-again")
    named = again.import_files("verl", VERL, options=ImportOptions(run="mine"))
    assert [one.captures[0][0] for one in named.sources] == ["mine", "mine-val"]


@pytest.mark.parametrize(
    ("folder", "validates"),
    [("val", True), ("my_valid-data", True), ("values", False), ("retrieval", False)],
)
def test_only_a_whole_word_makes_a_folder_one_of_validation(
    folder: str, validates: bool, lake: Lake, tmp_path: Path
) -> None:
    path = edited(copied(ROLLOUTS, tmp_path / "val" / folder), of_tasks)
    run = imported(lake, "verl", path).captures[0][0]
    assert run == folder + "-val" * validates


@pytest.mark.parametrize(("kind", "path"), [("verl", ROLLOUTS), ("areal", AREAL)])
@pytest.mark.parametrize("profile", [None, "verl"])
def test_scores_alone_are_never_a_pass(
    kind: str, path: Path, profile: str | None, lake: Lake
) -> None:
    imported(lake, kind, path, profile=profile)
    report = lake.replay()
    assert (report.verdict, report.exit_code) == ("unverified", 3)
    assert set(verdicts(report).values()) == {"inspect-only", "not-declared"}
    assert "text and scores alone" in reasons(report)["reward.post_process"]
    assert lake.validate(deep=True).ok


def test_what_has_no_column_is_named(lake: Lake) -> None:
    (note,) = imported(lake, "verl", ROLLOUTS).notes
    assert note.endswith("'acc', 'format', 'pred' have no column: not taken")


def test_text_is_not_kept(lake: Lake) -> None:
    imported(lake, "verl", ROLLOUTS)
    imported(lake, "areal", AREAL)
    found = rows(lake, "select count(prompt), count(response), count(label) from rollouts")
    assert found == [(0, 0, 0)]


def test_text_is_kept_as_the_user_says(lake: Lake) -> None:
    rules = {"prompt": "truncate:5", "response": "hash"}
    imported(lake, "verl", ROLLOUTS, redaction=rules)
    found = rows(lake, "select prompt, response, label from rollouts")
    assert found
    assert max(len(prompt) for prompt, _, _ in found) == 5
    assert all(response.startswith("sha256:") for _, response, _ in found)
    assert {label for _, _, label in found} == {None}
    assert lake.validate().ok
    source = imported(lake, "verl", ROLLOUTS)
    assert source.status == "refused"
    assert "prompt was" in source.problem


def test_a_rule_that_is_none_is_refused(lake: Lake) -> None:
    source = imported(lake, "verl", ROLLOUTS, redaction={"prompt": "keep"})
    assert source.status == "refused"
    assert "redaction of prompt is 'keep'" in source.problem


def test_a_task_of_areal_is_a_group_and_its_version_the_rollout(lake: Lake, tmp_path: Path) -> None:
    version = copied(AREAL, tmp_path / "trial" / "rollout")
    edited(copied(TASK, tmp_path), lambda it: [{**one, "task_id": 18} for one in it[:2]]).rename(
        version / "18.jsonl"
    )
    source = imported(lake, "areal", version / "18.jsonl")
    assert source.captures == [("trial", 0, 2, None, 0)]
    found = rows(
        lake,
        "select group_id, sample_id, raw_reward, response_length, total_length from rollouts "
        "order by row",
    )
    assert found[0] == ("task-17", "task-17/0", 1.0, 1, 5)
    assert found[3] == ("task-17", "task-17/3", 0.0, 5, 9)
    assert [one[0] for one in found] == ["task-17"] * 4 + ["task-18"] * 2


@pytest.mark.parametrize("content", ["", '{"task_id": 18, "samp'])
def test_a_damaged_task_of_areal_is_refused_with_its_version(
    content: str, lake: Lake, tmp_path: Path
) -> None:
    version = copied(AREAL, tmp_path / "trial" / "rollout")
    (version / "18.jsonl").write_text(content)
    source = imported(lake, "areal", version)
    assert source.status == "refused"
    assert "18.jsonl" in source.problem


def test_no_token_of_areal_is_said_to_be_trained(lake: Lake) -> None:
    imported(lake, "areal", AREAL)
    assert rows(lake, "select sum(list_sum(loss_mask)) from rollouts") == [(0,)]
    ((producer,),) = rows(lake, "select producer from manifest")
    assert json.loads(producer)["extra"]["loss_mask"] == "not recorded: 0 throughout"


def test_an_evaluation_of_areal_is_a_run_of_its_own(lake: Lake, tmp_path: Path) -> None:
    source = imported(lake, "areal", copied(AREAL, tmp_path / "trial" / "eval-rollout"))
    assert source.captures[0][0] == "trial-val"


Edit = Callable[[Lines], object]
BROKEN: dict[str, tuple[str, Path, Edit, str]] = {
    "another step": ("verl", ROLLOUTS, lambda it: it[1].update(step=4), "step is 4, expected 3"),
    "the same id twice": (
        "verl",
        ROLLOUTS,
        lambda it: it[1].update(request_id="req-0000"),
        "'req-0000' is there twice",
    ),
    "a score that is text": (
        "verl",
        ROLLOUTS,
        lambda it: it[1].update(score="1"),
        "line 2: score is '1', expected a number",
    ),
    "no score": ("verl", ROLLOUTS, lambda it: it[1].__delitem__("score"), "score is missing"),
    "an input that is none": ("verl", ROLLOUTS, lambda it: it[1].update(input=[1]), "input is"),
    "another version": (
        "areal",
        TASK,
        lambda it: it[1].update(tail_version=3),
        "tail_version is 3, expected 2",
    ),
    "a version that is text": (
        "areal",
        TASK,
        lambda it: it[1].update(head_version="-1"),
        "head_version is '-1', expected a whole number",
    ),
    "a version that is a truth": (
        "areal",
        TASK,
        lambda it: it[1].update(head_version=True),
        "head_version is True, expected a whole number",
    ),
    "another task": ("areal", TASK, lambda it: it[1].update(task_id=18), "task_id is 18"),
    "the same sample twice": (
        "areal",
        TASK,
        lambda it: it[1].update(sample_idx=0),
        "4 lines of 3 samples",
    ),
    "a prompt beyond the sequence": (
        "areal",
        TASK,
        lambda it: it[1].update(prompt_len=6),
        "prompt_len is 6, expected at most seqlen = 5",
    ),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_dump_is_refused_for(what: str, lake: Lake, tmp_path: Path) -> None:
    kind, sample, edit, says = BROKEN[what]
    path = edited(copied(sample, tmp_path / "2"), edit)
    source = imported(lake, kind, path)
    assert source.status == "refused"
    assert says in source.problem
    assert lake.info().num_rows == 0


def test_groups_of_areal_are_recorded_and_not_stated(lake: Lake) -> None:
    source = imported(lake, "areal", AREAL, group_by_position=4)
    assert "--group-by-position cannot be said of these files" in source.problem


def test_a_group_by_position_holds_one_prompt(lake: Lake) -> None:
    source = imported(lake, "verl", ROLLOUTS, group_by_position=8)
    assert "rows 0 to 7 have 2 prompts" in source.problem
