"""The import of the completions that TRL logs, and the tensors of the training that they are of."""

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.helpers.dumps import TRL, copied, imported, reasons, rows, verdicts
from trajreplay import Lake, SampleRecord, StageContract
from trajreplay.capture.importers import ImportOptions, completions, import_files, importer_of
from trajreplay.capture.importers.places import opened
from trajreplay.schema import profile, with_changes
from trajreplay.stages.kernels import ppo_clip

FIRST = TRL / "completions_00001.parquet"
WEIGHTS = {"r_digit": 1.0, "r_len": 0.5}
STATED: dict[str, Any] = {
    "profile": "trl",
    "group_by_position": 4,
    "changes": {"reward.weights": WEIGHTS},
}


def rewritten(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    """Change or add columns of a copied file; None takes one away."""
    table = pq.read_table(path)
    for name, values in columns.items():
        if name in table.column_names:
            table = table.drop([name])
        if values is not None:
            table = table.append_column(name, pa.array(values))
    pq.write_table(table, path, **options)
    return path


def test_the_recorded_advantages_follow_from_the_weighted_rewards(lake: Lake) -> None:
    report = lake.import_files("trl", TRL, options=ImportOptions(**STATED))
    assert [(one.status, one.samples) for one in report.sources] == [("imported", 64)] * 2
    replayed = lake.replay()
    assert (replayed.verdict, replayed.exit_code) == ("pass", 0)
    for cohort in replayed.cohorts:
        (stage,) = (one for one in cohort.stages if one.stage == "reward.post_process")
        assert (stage.verdict, stage.compared) == ("pass", 64)
        assert stage.max_abs_error is not None
        assert stage.max_abs_error < 2.3e-7


@pytest.mark.parametrize(
    "changes",
    [
        {"reward.weights": {"r_digit": 1.0, "r_len": 1.0}},
        {"reward.weights": WEIGHTS, "reward.epsilon": 1e-6},
        {"reward.weights": WEIGHTS, "reward.ddof": 0},
    ],
)
def test_other_settings_give_other_advantages(changes: dict[str, Any], lake: Lake) -> None:
    imported(lake, "trl", FIRST, **{**STATED, "changes": changes})
    report = lake.replay()
    assert (report.exit_code, report.first_divergent_stage) == (1, "reward.post_process")


def test_rows_that_are_written_at_two_steps_count_once(lake: Lake) -> None:
    report = lake.import_files("trl", TRL)
    assert [Path(one.path).name for one in report.sources] == [
        "completions_00001.parquet",
        "completions_00003.parquet",
    ]
    assert "completions_00002.parquet hold the same rows" in report.sources[0].notes[0]
    assert rows(lake, "select rollout_id, count(*) from rollouts group by 1 order by 1") == [
        (1, 64),
        (3, 64),
    ]


def test_files_that_are_named_each_count_once(lake: Lake) -> None:
    report = lake.import_files("trl", *sorted(TRL.glob("*.parquet")))
    assert [one.captures[0][2] for one in report.sources] == [1, 3]


def test_a_repeat_that_is_alone_is_taken(lake: Lake, tmp_path: Path) -> None:
    path = copied(TRL / "completions_00002.parquet", tmp_path / "out" / "completions")
    source = imported(lake, "trl", path)
    assert source.captures == [("out", 0, 2, None, 0)]


def test_a_reward_that_a_function_did_not_give_is_missing(lake: Lake) -> None:
    imported(lake, "trl", FIRST)
    table = pq.read_table(FIRST)
    found = rows(lake, "select reward_components from rollouts order by row")
    nulls = [row for row, (parts,) in enumerate(found) if parts[1] != parts[1]]
    assert nulls == [row for row, one in enumerate(table["r_len"].to_pylist()) if one is None]
    assert len(nulls) == 9
    assert [parts[0] for (parts,) in found] == table["r_digit"].to_pylist()


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({}, "the weights of the rewards are not recorded"),
        ({"profile": "trl", "group_by_position": 4}, "the weights of the rewards"),
        (
            {"profile": "trl", "changes": {"reward.weights": WEIGHTS}},
            "samples of equal prompts may be of several groups",
        ),
    ],
)
def test_what_nobody_states_is_not_guessed(said: dict[str, Any], reason: str, lake: Lake) -> None:
    imported(lake, "trl", FIRST, **said)
    report = lake.replay()
    assert (report.verdict, report.exit_code) == ("unverified", 3)
    assert set(verdicts(report).values()) == {"inspect-only", "not-declared"}
    assert reason in reasons(report)["reward.post_process"]


def test_equal_prompts_are_groups_where_their_number_is_stated(lake: Lake, tmp_path: Path) -> None:
    prompts = [f"p{row // 4}" for row in range(64)]
    path = rewritten(copied(FIRST, tmp_path), {"prompt": prompts})
    changes = {"reward.weights": WEIGHTS, "reward.n_samples_per_prompt": 4}
    imported(lake, "trl", path, profile="trl", changes=changes)
    assert lake.replay().verdict == "pass"
    ((producer,),) = rows(lake, "select producer from manifest")
    assert json.loads(producer)["extra"]["grouped_by"] == "equal prompts"


def test_a_group_by_position_holds_one_prompt(lake: Lake, tmp_path: Path) -> None:
    path = rewritten(copied(FIRST, tmp_path), {"prompt": [str(row // 3) for row in range(64)]})
    assert "rows 0 to 3 have 2 prompts" in imported(lake, "trl", path, **STATED).problem


def test_columns_that_a_user_logged_beside_are_no_rewards(lake: Lake, tmp_path: Path) -> None:
    mine = {"difficulty": [0.5] * 64, "answer": ["7"] * 64}
    path = rewritten(copied(FIRST, tmp_path), mine)
    source = imported(lake, "trl", path, **STATED)
    assert source.notes[-1].endswith("difficulty, answer are no rewards: not taken")
    assert lake.replay().verdict == "pass"


BROKEN: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "another step": ({"step": [2] * 64}, {}, "holds steps [2], expected 1"),
    "a prompt that is missing": ({"prompt": [None, *["a"] * 63]}, {}, "prompt is missing in 1"),
    "a prompt that is a number": ({"prompt": [1] * 64}, {}, "prompt is int64, expected text"),
    "advantages of text": ({"advantage": ["a"] * 64}, {}, "advantage is string"),
    "no reward of that name": ({"r_len": None}, {}, "has no rewards r_len: it has r_digit"),
    "another compression": ({}, {"compression": "zstd"}, "is compressed as ZSTD"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_file_is_refused_for(what: str, lake: Lake, tmp_path: Path) -> None:
    columns, options, says = BROKEN[what]
    path = rewritten(copied(FIRST, tmp_path), columns, **options)
    source = imported(lake, "trl", path, **STATED)
    assert source.status == "refused"
    assert says in source.problem
    assert lake.info().num_rows == 0


def test_an_advantage_that_is_missing_leaves_the_stage_unverified(
    lake: Lake, tmp_path: Path
) -> None:
    path = rewritten(copied(FIRST, tmp_path), {"advantage": [None, *[0.0] * 63]})
    imported(lake, "trl", path, **STATED)
    assert lake.replay().exit_code == 3


def captured() -> dict[str, Any]:
    """The tensors of the training that the completions are of."""
    found: dict[str, Any] = torch.load(TRL / "capture_1.16.0.pt", weights_only=True)
    return found


def test_the_tensors_of_the_same_training_hold_the_same_rewards(lake: Lake) -> None:
    lake.import_files("trl", TRL, options=ImportOptions(**STATED))
    for rollout_id, generation in zip((1, 3), captured()["generations"], strict=True):
        found = rows(
            lake,
            f"select reward, reward_components from rollouts where rollout_id = {rollout_id} "
            "order by row",
        )
        advantages = torch.tensor([one for one, _ in found])
        assert torch.equal(advantages, generation["advantages"])
        parts = torch.tensor([one for _, one in found], dtype=torch.float32)
        assert torch.equal(parts.nan_to_num(9.0), generation["rewards_per_func"].nan_to_num(9.0))


def test_the_loss_of_the_same_training_is_recomputed_exactly() -> None:
    for one in captured()["losses"]:
        inputs = one["inputs"]
        mask = inputs["completion_mask"]
        advantages = inputs["advantages"].unsqueeze(1).expand_as(mask)
        tokens = ppo_clip(
            one["per_token_logps"].flatten(),
            inputs["old_per_token_logps"].flatten(),
            advantages.flatten(),
        )
        summed = (tokens.pg_loss.view_as(mask) * mask).sum()
        found = summed / (inputs["num_items_in_batch"] * one["ga"] / one["spg"])
        assert torch.equal(found, one["loss"])


def test_the_steps_of_the_same_training_replay(lake: Lake) -> None:
    found = captured()
    settings = with_changes(
        profile("trl").settings, {"loss.correction": "none", "loss.correction_bounds": None}
    )
    for step in range(4):
        losses = [one for one in found["losses"] if one["global_step"] == step]
        with lake.capture(
            run_id="r",
            rollout_id=step // 2,
            step_id=step,
            rank=0,
            expected_ranks=[0],
            settings=settings,
            stages=["sample", StageContract("loss.policy", scalars=("loss",))],
        ) as capture:
            capture.samples([one for batch in losses for one in _records(batch)])
            for name, of in (("log_probs", None), ("old_log_probs", "old_per_token_logps")):
                capture.tensor(name, [row for batch in losses for row in _cut(batch, of)])
            capture.tensor(
                "advantages",
                [
                    torch.full((int(length),), float(value))
                    for batch in losses
                    for length, value in zip(
                        batch["inputs"]["completion_mask"].sum(1),
                        batch["inputs"]["advantages"],
                        strict=True,
                    )
                ],
            )
            for batch in losses:
                capture.expected(
                    "loss.policy",
                    scope="micro_batch",
                    micro_batch_id=str(batch["_step"]),
                    reduction="sum",
                    scale=batch["spg"] / (int(batch["inputs"]["num_items_in_batch"]) * batch["ga"]),
                    loss=float(batch["loss"]),
                )
    report = lake.replay()
    assert (report.verdict, report.exit_code) == ("pass", 0)
    errors = [
        one.max_abs_error
        for cohort in report.cohorts
        for one in cohort.stages
        if one.stage == "loss.policy"
    ]
    assert len(errors) == 4
    assert max(one for one in errors if one is not None) < 3e-8


def _cut(batch: dict[str, Any], of: str | None) -> list[torch.Tensor]:
    values = batch["per_token_logps"] if of is None else batch["inputs"][of]
    lengths = batch["inputs"]["completion_mask"].sum(1).tolist()
    return [row[:length] for row, length in zip(values, lengths, strict=True)]


def _records(batch: dict[str, Any]) -> list[SampleRecord]:
    inputs = batch["inputs"]
    return [
        SampleRecord(
            f"s-{number}",
            int(mask.sum()),
            int(mask.sum() + prompt.sum()),
            mask[: int(mask.sum())],
            micro_batch_id=str(batch["_step"]),
        )
        for number, mask, prompt in zip(
            inputs["tr_row_id"].tolist(),
            inputs["completion_mask"],
            inputs["prompt_mask"],
            strict=True,
        )
    ]


@pytest.mark.parametrize("name", ["prompt", "extra"])
def test_text_that_a_dictionary_repeats_without_end_is_refused(
    name: str, lake: Lake, tmp_path: Path
) -> None:
    count = 1 << 16
    columns: dict[str, Any] = {
        "step": [1] * count,
        "prompt": ["a"] * count,
        "completion": ["b"] * count,
        "advantage": [0.0] * count,
    }
    columns[name] = pa.DictionaryArray.from_arrays([0] * count, ["x" * (1 << 15)])
    path = tmp_path / FIRST.name
    pq.write_table(pa.table(columns), path, store_schema=False)
    assert path.stat().st_size < 1 << 20
    source = imported(lake, "trl", path)
    assert source.status == "refused"
    assert f"{name} has 2,147,483,648 bytes of text" in source.problem


@pytest.mark.parametrize("truthful", [True, False])
def test_text_that_takes_its_beginning_from_the_text_before_is_refused(
    truthful: bool, lake: Lake, tmp_path: Path
) -> None:
    count = 1 << 12
    columns = {
        "step": [1] * count,
        "prompt": ["x" * (1 << 13)] * count,
        "completion": ["b"] * count,
        "advantage": [0.0] * count,
    }
    path = tmp_path / FIRST.name
    pq.write_table(
        pa.table(columns),
        path,
        use_dictionary=False,
        store_schema=False,
        write_statistics=False,
        column_encoding={"prompt": "DELTA_BYTE_ARRAY"},
    )
    if not truthful:  # a footer that says plain (0) where the pages are (7, doubled)
        content = path.read_bytes()
        assert content.count(b"\x19\x25\x06\x0e") == 1
        path.write_bytes(content.replace(b"\x19\x25\x06\x0e", b"\x19\x25\x06\x00"))
    assert path.stat().st_size < 1 << 17
    before = pa.default_memory_pool().bytes_allocated()
    source = imported(lake, "trl", path)
    assert source.status == "refused"
    assert "pages encoded as DELTA_BYTE_ARRAY" in source.problem
    assert pa.default_memory_pool().bytes_allocated() <= before


def test_lists_beside_are_not_read(lake: Lake, tmp_path: Path) -> None:
    path = rewritten(copied(FIRST, tmp_path), {"extra": [[1, 2]] * 64})
    source = imported(lake, "trl", path, **STATED)
    assert source.status == "imported"
    assert any("extra" in note for note in source.notes)


@pytest.mark.parametrize("named", [False, True])
def test_each_file_of_a_long_training_is_opened_a_few_times(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opens = Counter[Path]()

    def counted(path: Path) -> BinaryIO:
        opens[path] += 1
        return opened(path)

    monkeypatch.setattr(completions, "opened", counted)
    most = {}
    for count in (6, 24):
        folder = tmp_path / str(count)
        folder.mkdir()
        for step in range(1, count + 1):
            path = Path(shutil.copy(FIRST, folder / f"completions_{step:05d}.parquet"))
            advantages = pq.read_table(FIRST)["advantage"].to_pylist()
            changed = [one + step // 2 for one in advantages]
            rewritten(path, {"step": [step] * len(changed), "advantage": changed})
        opens.clear()
        paths = sorted(folder.iterdir()) if named else [folder]
        report = import_files(None, importer_of("trl"), paths)
        assert {one.status for one in report.sources} == {"checked"}
        assert len(report.sources) == count // 2 + 1
        assert sum("hold the same rows" in note for one in report.sources for note in one.notes)
        most[count] = max(opens.values())
    assert most[24] <= most[6]
