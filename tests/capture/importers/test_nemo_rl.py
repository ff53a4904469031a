"""The import of what NeMo-RL logs: its numbers, what is not recorded, and files that are broken."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.dumps import NEMO_RL, Tree, copied, edited, imported, reasons, rows, verdicts
from trajreplay import Lake
from trajreplay.capture.importers import ImportOptions

TRAIN = NEMO_RL / "train_data_step1.jsonl"
STATED: dict[str, Any] = {"profile": "nemo-rl", "group_by_position": 4}
Lines = list[Tree]


def test_leave_one_out_over_its_own_deviation_gives_the_recorded_advantages(lake: Lake) -> None:
    source = imported(lake, "nemo-rl", TRAIN, **STATED)
    assert (source.status, source.samples, source.tokens) == ("imported", 8, 20)
    report = lake.replay()
    assert (report.verdict, report.exit_code) == ("pass", 0)
    found = verdicts(report)
    assert (found["reward.post_process"], found["sample"]) == ("pass", "pass")
    (stage,) = (one for one in report.cohorts[0].stages if one.stage == "reward.post_process")
    assert stage.compared == 8
    assert stage.max_abs_error is not None
    assert stage.max_abs_error < 1e-6
    ((reward, advantages),) = rows(
        lake, "select reward, advantages from rollouts where sample_id = 's-0'"
    )
    assert round(reward, 4) == 16.7429
    assert [round(one, 4) for one in advantages] == [16.7429]


def test_another_baseline_is_named_as_the_first_divergence(lake: Lake) -> None:
    imported(lake, "nemo-rl", TRAIN, **STATED, changes={"reward.divisor": "std"})
    report = lake.replay()
    assert (report.exit_code, report.first_divergent_stage) == (1, "reward.post_process")


def test_padding_is_cut_and_responses_begin_where_tokens_are_trained(lake: Lake) -> None:
    imported(lake, "nemo-rl", TRAIN)
    ((tokens, sampled, trained, mask),) = rows(
        lake,
        "select tokens, rollout_log_probs, old_log_probs, loss_mask from rollouts "
        "where sample_id = 's-3'",
    )
    line = json.loads(TRAIN.read_text().splitlines()[3])
    assert tokens == line["token_ids"][0][:9]
    assert sampled == line["generation_logprobs"][0][4:9]
    assert trained == line["prev_logprobs"][0][4:9]
    assert mask == [1] * 5


def test_train_against_rollout_is_measured(lake: Lake) -> None:
    imported(lake, "nemo-rl", TRAIN)
    lines = [json.loads(one) for one in TRAIN.read_text().splitlines()]
    differences = [
        new - old
        for one in lines
        for new, old, counts in zip(
            one["prev_logprobs"][0],
            one["generation_logprobs"][0],
            one["token_loss_mask"][0],
            strict=True,
        )
        if counts
    ]
    (row,) = lake.mismatch().table.to_pylist()
    assert row["valid_tokens"] == len(differences) == 20
    assert row["generation_kl_k1"] == pytest.approx(-sum(differences) / 20, abs=1e-9)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({}, "groups are not recorded: state their size with --group-by-position"),
        ({"profile": "nemo-rl"}, "groups are not recorded"),
        ({"group_by_position": 4}, "state them with --profile"),
    ],
)
def test_what_nobody_states_is_not_guessed(said: dict[str, Any], reason: str, lake: Lake) -> None:
    imported(lake, "nemo-rl", TRAIN, **said)
    report = lake.replay()
    assert (report.verdict, report.exit_code) == ("unverified", 3)
    assert set(verdicts(report).values()) == {"inspect-only", "not-declared"}
    assert reason in reasons(report)["reward.post_process"]


def test_groups_by_position_are_said_to_be_so(lake: Lake) -> None:
    imported(lake, "nemo-rl", TRAIN, **STATED)
    ((producer,),) = rows(lake, "select producer from manifest")
    extra = json.loads(producer)["extra"]
    assert (extra["group_by_position"], extra["stated"]) == ("4", "nemo-rl@1")
    found = rows(lake, "select group_id, count(*) from rollouts group by 1 order by 1")
    assert found == [("g-0", 4), ("g-1", 4)]


def test_a_group_that_would_be_short_is_refused(lake: Lake) -> None:
    source = imported(lake, "nemo-rl", TRAIN, group_by_position=3)
    assert source.status == "refused"
    assert "8 samples, expected a multiple of --group-by-position 3" in source.problem


def test_validation_is_a_run_of_its_own(lake: Lake) -> None:
    report = lake.import_files("nemo-rl", NEMO_RL, options=ImportOptions(**STATED, run="mine"))
    assert [one.captures[0][:3] for one in report.sources] == [("mine", 0, 1), ("mine-val", 0, 1)]
    assert rows(lake, "select group_id, raw_reward from rollouts where run_id = 'mine-val'") == [
        (None, 1.0)
    ]
    assert lake.replay(run="mine-val").exit_code == 3


def test_after_dynamic_sampling_the_filtered_rewards_are_those_of_the_batch(
    lake: Lake, tmp_path: Path
) -> None:
    def sampled(lines: Lines) -> None:
        for place, one in enumerate(lines):
            one["filtered_rewards"] = one["rewards"]
            one["rewards"] = [float(place)]

    path = edited(copied(TRAIN, tmp_path), sampled)
    imported(lake, "nemo-rl", path, **STATED)
    assert lake.replay().verdict == "pass"


def test_a_sample_that_is_masked_trains_no_token(lake: Lake, tmp_path: Path) -> None:
    path = edited(copied(TRAIN, tmp_path), lambda lines: lines[3].update(sample_loss_mask=[0.0]))
    imported(lake, "nemo-rl", path)
    found = rows(lake, "select response_length, loss_mask from rollouts where sample_id = 's-3'")
    assert found == [(5, [0] * 5)]


def test_advantages_that_differ_from_token_to_token_are_no_reward(
    lake: Lake, tmp_path: Path
) -> None:
    path = edited(copied(TRAIN, tmp_path), lambda lines: lines[3]["advantages"][0].reverse())
    assert imported(lake, "nemo-rl", path, **STATED).status == "imported"  # all equal, reversed

    def token(lines: Lines) -> None:
        lines[3]["advantages"][0][5] = 0.25

    other = edited(copied(TRAIN, tmp_path / "other"), token)
    again = Lake.create(tmp_path / "again")
    imported(again, "nemo-rl", other, **STATED)
    report = again.replay()
    assert report.exit_code == 3
    assert "differ from token to token" in reasons(report)["reward.post_process"]


def test_a_log_without_masks_keeps_its_rewards(lake: Lake, tmp_path: Path) -> None:
    def older(lines: Lines) -> None:
        for one in lines:
            del one["token_loss_mask"], one["advantages"], one["token_ids"]

    source = imported(lake, "nemo-rl", edited(copied(TRAIN, tmp_path), older))
    assert (source.samples, source.tokens) == (8, 0)
    assert "it cannot be told where responses begin" in source.notes[0]
    assert len(rows(lake, "select raw_reward from rollouts where raw_reward is not null")) == 8


Edit = Callable[[Lines], object]
BROKEN: dict[str, tuple[Edit, str]] = {
    "a value that is not wrapped": (lambda it: it[1].update(rewards=1.0), "line 2: rewards is 1.0"),
    "two values in one": (lambda it: it[1].update(rewards=[1.0, 2.0]), "a list of one value"),
    "a line that is lost": (lambda it: it[:2] + it[3:], "idx is 3, expected 2"),
    "a line that is doubled": (lambda it: [*it[:3], *it[2:]], "idx is 2, expected 3"),
    "no index": (lambda it: it[0].pop("idx"), "idx is missing"),
    "a length beyond the arrays": (lambda it: it[0].update(input_lengths=[15]), "has 14 values"),
    "a mask of other numbers": (
        lambda it: it[0].update(token_loss_mask=[[0.5] * 14]),
        "a list of 0 and 1",
    ),
    "a mask of samples of other numbers": (
        lambda it: it[0].update(sample_loss_mask=[0.5]),
        "sample_loss_mask is 0.5",
    ),
    "a number beyond float32": (
        lambda it: it[0].update(advantages=[[1e300] * 14]),
        "numbers that float32 can hold",
    ),
    "text for numbers": (lambda it: it[0].update(prev_logprobs=["[0.1]"]), "prev_logprobs is"),
    "a token below 0": (lambda it: it[0].update(token_ids=[[-1] * 14]), "token_ids is"),
    "a field in one line alone": (lambda it: it[4].__delitem__("advantages"), "line 5: advantages"),
    "an integer larger than any": (lambda it: it[0].update(rewards=[10**400]), "rewards is"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_is_refused_for(what: str, lake: Lake, tmp_path: Path) -> None:
    edit, says = BROKEN[what]
    source = imported(lake, "nemo-rl", edited(copied(TRAIN, tmp_path), edit))
    assert source.status == "refused"
    assert says in source.problem
    assert lake.info().num_rows == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"rewards": [1.0], "idx": 0, "idx": 0}\n', "the same key twice"),
        ('{"rewards": [1.0], "idx": 0}\n\n', "line 2: not standard JSON"),
        ('{"rewards": [1.0], "idx": 0', "not standard JSON"),
        ('{"rewards": [1e999], "idx": 0}', "larger than any float"),
    ],
)
def test_lines_that_are_no_objects_are_refused(
    text: str, says: str, lake: Lake, tmp_path: Path
) -> None:
    path = tmp_path / "train_data_step3.jsonl"
    path.write_text(text)
    source = imported(lake, "nemo-rl", path)
    assert source.status == "refused"
    assert says in source.problem


def test_nan_is_read_as_python_writes_it(lake: Lake, tmp_path: Path) -> None:
    def broken(lines: Lines) -> None:
        lines[3]["prev_logprobs"][0][6] = float("nan")

    imported(lake, "nemo-rl", edited(copied(TRAIN, tmp_path), broken))
    found = rows(lake, "select non_finite from checksums where \"column\" = 'old_log_probs'")
    assert found == [(1,)]
