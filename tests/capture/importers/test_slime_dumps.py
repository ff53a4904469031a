"""Dumps of slime: the numbers of the sample, every layout, and what each one leaves open."""

import json
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.slime_dumps import SLIME, by_rank, dumped, of_rank, rollout, saved, training
from trajreplay import CaptureError, Lake, Settings
from trajreplay.capture.importers import ImportOptions, import_files, importer_of, recognise
from trajreplay.stages.report import Report

_SLIME = ImportOptions(profile="slime")


def taken(*paths: Path, options: ImportOptions | None = None) -> list[dict[str, Any]]:
    """The samples that the steps of some dumps consumed, in the order of the rollout."""
    with Lake.of_files(*paths, options=options) as lake:
        assert lake.imported is not None
        assert not lake.imported.refused
        rows = lake.sql("select * from steps").arrow().to_pylist()
    return sorted(rows, key=lambda row: (row["step_id"], row["sample_id"]))


def replayed(*paths: Path, options: ImportOptions = _SLIME) -> Report:
    with Lake.of_files(*paths, options=options) as lake:
        return lake.replay()


def refusal(*paths: Path, options: ImportOptions | None = None) -> tuple[str, str]:
    with Lake.of_files(*paths, options=options) as lake:
        assert lake.imported is not None
        (one,) = lake.imported.refused
        return one.problem, one.hint


def verdicts(report: Report) -> dict[str, str]:
    """The verdict of each stage of the only step."""
    (step,) = (one for one in report.cohorts if one.step_id is not None)
    return {one.stage: one.verdict for one in step.stages if one.verdict != "not-declared"}


def test_rewards_are_normalised_by_group_and_are_the_advantages_of_every_token() -> None:
    rows = taken(SLIME)
    assert [row["sample_id"] for row in rows] == [f"s-{index}" for index in range(8)]
    assert [row["raw_reward"] for row in rows] == [1.0, 0.0, 0.1, 0.0, 1.0, 1.1, 0.0, 0.0]
    for group in (rows[:4], rows[4:]):
        assert len({row["group_id"] for row in group}) == 1
        raw = [row["raw_reward"] for row in group]
        for row in group:
            expected = (row["raw_reward"] - mean(raw)) / (stdev(raw) + 1e-6)
            assert row["reward"] == pytest.approx(expected, rel=1e-6)
            assert row["advantages"] == [row["reward"]] * row["response_length"]
            assert row["returns"] == row["advantages"]
            assert row["kl"] == [0.0] * row["response_length"]
    assert rows[3]["loss_mask"] == [1, 1, 0, 1, 1]
    assert [row["truncated"] for row in rows] == [False] * 7 + [True]


def test_a_step_holds_what_the_trainer_had_before_the_loss() -> None:
    (row, *_) = taken(SLIME)
    source = training()["samples"][0]
    for column, name in (
        ("old_log_probs", "log_probs"),
        ("ref_log_probs", "ref_log_probs"),
        ("rollout_log_probs", "rollout_log_probs"),
        ("tokens", "tokens"),
    ):
        assert row[column] == source[name].tolist()
    assert [row[name] for name in ("log_probs", "entropy")] == [None, None]


def test_ranks_and_micro_batches_are_those_of_the_schedule() -> None:
    rows = {row["sample_id"]: row for row in taken(SLIME)}
    for rank, indices in enumerate(([0, 2, 4, 6], [1, 3, 5, 7])):
        mine = [rows[f"s-{index}"] for index in indices]
        assert [row["rank"] for row in mine] == [rank] * 4
        assert [row["row"] for row in mine] == [0, 1, 2, 3]
        assert [row["micro_batch_id"] for row in mine] == [
            *[f"mb-{rank}-0"] * 2,
            *[f"mb-{rank}-1"] * 2,
        ]
        assert {row["rollout_partition_id"] for row in mine} == {f"dp-{rank}"}


def test_a_rollout_dump_is_the_source_of_its_step_and_an_evaluation_is_a_run_of_its_own() -> None:
    with Lake.of_files(SLIME) as lake:
        rows = lake.sql("select * from rollouts order by run_id, row").arrow().to_pylist()
    assert [(row["run_id"], row["sample_id"]) for row in rows] == [
        *(("slime", f"s-{index}") for index in range(8)),
        *(("slime-val", f"s-{index}") for index in range(2)),
    ]
    assert [row["raw_reward"] for row in rows[:8]] == training()["raw_reward"]
    assert {row["reward"] for row in rows} == {None}
    assert rows[2]["weight_versions"] == [{"start": 0, "stop": 2, "version": 2}]
    assert {row["prompt"] for row in rows} == {None}


def test_without_settings_a_dump_is_looked_at_and_never_passes() -> None:
    report = replayed(SLIME, options=ImportOptions())
    assert {one.verdict for one in report.cohorts} == {"unverified"}
    assert set(verdicts(report).values()) == {"inspect-only"}
    assert report.exit_code == 3


@pytest.mark.parametrize("path", [SLIME, SLIME / "train_data", SLIME / "train_data" / "0.pt"])
def test_with_the_settings_that_its_user_states_it_is_recomputed(path: Path) -> None:
    report = replayed(path)
    assert (report.exit_code, {one.verdict for one in report.cohorts}) == (0, {"pass"})
    assert verdicts(report) == {
        "sample": "pass",
        "reward.raw": "pass",
        "reward.post_process": "pass",
        "advantage.kl": "pass",
        "advantage.estimate": "pass",
        "loss.policy": "inspect-only",
    }


def test_other_settings_than_those_in_force_diverge_and_are_written_down() -> None:
    options = ImportOptions(profile="slime", changes={"reward.ddof": 0})
    with Lake.of_files(SLIME, options=options) as lake:
        assert verdicts(lake.replay())["reward.post_process"] == "diverged"
        rows = lake.sql("select producer from manifest where kind = 'step'").arrow().to_pylist()
    extra = {json.loads(row["producer"])["extra"]["stated"] for row in rows}
    assert extra == {"slime@1, reward.ddof=0, reward.grouping=group"}


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("advantages", "advantage.estimate"),
        ("rewards", "reward.post_process"),
        ("kl", "advantage.kl"),
        ("loss_masks", "sample"),
        ("rollout_log_probs", "sample"),
    ],
)
def test_a_wrong_value_is_found_where_it_arose(name: str, stage: str, tmp_path: Path) -> None:
    dump = training()
    sample = dump["samples"][3]
    sample[name] = sample[name].roll(1) if name == "loss_masks" else sample[name] + 0.25
    report = replayed(dumped(tmp_path / "run", train=dump))
    (step,) = (one for one in report.cohorts if one.step_id is not None)
    assert (report.exit_code, step.first_divergent_stage) == (1, stage)


def test_samples_that_no_step_took_stay_in_their_rollout_and_cut_groups_are_not_judged(
    tmp_path: Path,
) -> None:
    dump = training()
    dump["samples"] = dump["samples"][:6]
    for shard in dump["dp_shards"]:
        shard["partition"], shard["sample_indices"] = shard["partition"][:3], shard["partition"][:3]
        shard["micro_batch_indices"], shard["global_batch_sizes"] = [[0, 1], [2]], [6]
    report = replayed(dumped(tmp_path / "run", train=dump))
    (step,) = (one for one in report.cohorts if one.step_id is not None)
    (found,) = (one for one in step.stages if one.stage == "reward.post_process")
    assert (found.verdict, found.message) == (
        "inspect-only",
        "some of its groups have samples that other steps or no step consumed",
    )
    with Lake.of_files(tmp_path / "run") as lake:
        rows = lake.sql("select sample_id, step_id from samples order by 1").arrow().to_pylist()
    assert [row["step_id"] for row in rows] == [0] * 6 + [None] * 2


def test_a_rollout_that_fed_two_steps_is_two_steps(tmp_path: Path) -> None:
    dump = training()
    for shard in dump["dp_shards"]:
        shard["num_microbatches"], shard["global_batch_sizes"] = [1, 1], [4, 4]
        shard["micro_batch_indices"] = [[0, 1], [2, 3]]
    rows = taken(dumped(tmp_path / "run", train=dump))
    assert [(row["step_id"], row["sample_id"]) for row in rows] == [
        *((0, f"s-{index}") for index in range(4)),
        *((1, f"s-{index}") for index in range(4, 8)),
    ]
    assert [row["micro_batch_id"] for row in rows[::2]] == [*["mb-0-0"] * 2, *["mb-0-1"] * 2]
    assert replayed(tmp_path / "run").exit_code == 0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda dump: dump["dp_shards"].pop(), "dp_shards take 4 samples of 8"),
        (lambda dump: dump["dp_shards"][0]["partition"].__setitem__(0, 1), "each of them once"),
        (lambda dump: dump["dp_shards"][1].update(sample_indices=[0, 1, 2, 3]), "other samples"),
        (lambda dump: dump["dp_shards"][1].update(global_batch_sizes=[9]), "and step 0 has 8"),
        (lambda dump: dump["dp_shards"][1].update(num_microbatches=[1]), "in one micro-batch"),
        (lambda dump: dump["dp_shards"][1].update(rank=0), "processes [0, 0], expected each"),
        (lambda dump: dump["samples"][2].update(response_lengths=3), "expected response_lengths"),
        (lambda dump: dump["samples"][2].pop("loss_masks"), "loss_masks is missing"),
        (lambda dump: dump["samples"][2].update(sample_index=7), "other samples"),
        (lambda dump: dump.update(format_version=3), "format_version is 3"),
    ],
)
def test_a_dump_that_contradicts_itself_is_refused_whole(
    change: Any, problem: str, tmp_path: Path
) -> None:
    dump = training()
    change(dump)
    found, hint = refusal(saved(dump, tmp_path / "0.pt"))
    assert problem in found
    assert hint


def test_a_response_that_is_longer_than_its_tokens_takes_no_memory(tmp_path: Path) -> None:
    rolled = rollout()
    rolled["samples"][1].update(response_length=2**31 - 1, loss_mask=None)
    problem, _ = refusal(saved(rolled, tmp_path / "0.pt"))
    assert "response_length is 2147483647, expected at most the 5 tokens" in problem


def test_a_train_dump_and_another_rollout_do_not_go_together(tmp_path: Path) -> None:
    other = rollout()
    other["samples"][5]["index"] = 77
    with Lake.of_files(dumped(tmp_path / "run", rolled=other)) as lake:
        assert lake.imported is not None
        (one,) = lake.imported.refused
    assert "row 2 of rank 1 is no sample of the rollout" in one.problem


def test_without_its_rollout_dump_groups_are_unknown_until_they_are_stated(tmp_path: Path) -> None:
    alone = saved(training(), tmp_path / "train_data" / "0.pt")
    assert {row["group_id"] for row in taken(alone)} == {None}
    report = replayed(alone)
    (found,) = (one for one in report.cohorts[0].stages if one.stage == "reward.post_process")
    assert found.verdict == "inspect-only"
    assert "state their size with --group-by-position" in found.message
    stated = ImportOptions(profile="slime", group_by_position=4)
    assert verdicts(replayed(alone, options=stated))["reward.post_process"] == "pass"
    wrong = ImportOptions(profile="slime", group_by_position=2)
    assert verdicts(replayed(alone, options=wrong))["reward.post_process"] == "diverged"


def test_groups_that_are_recorded_are_never_replaced_by_positions() -> None:
    options = ImportOptions(group_by_position=2)
    with Lake.of_files(SLIME, options=options) as lake:
        assert lake.imported is not None
        notes = [note for one in lake.imported.sources for note in one.notes]
        rows = lake.sql("select producer, group_size from steps, manifest").arrow().to_pylist()
    assert sum("groups are recorded" in note for note in notes) == 2
    assert not any("group_by_position" in row["producer"] for row in rows)
    assert {row["group_size"] for row in rows} == {4}


@pytest.mark.parametrize("copies", [1, 2])
def test_the_older_format_with_a_file_a_rank_gives_the_same_samples(
    copies: int, tmp_path: Path
) -> None:
    folder = by_rank(tmp_path / "run", copies=copies)
    saved(rollout(), folder / "rollout_data" / "0.pt")
    for row, same in zip(taken(folder), taken(SLIME), strict=True):
        odd = {name for name in row if row[name] != same[name]}
        assert odd <= {"run_id", "rank"}
    assert replayed(folder).exit_code == 0
    assert replayed(folder / "train_data" / f"0_{2 * copies - 1}.pt").exit_code == 0


def test_a_rank_of_the_older_format_that_is_missing_is_missed(tmp_path: Path) -> None:
    folder = by_rank(tmp_path / "run")
    (folder / "train_data" / "0_1.pt").unlink()
    problem, hint = refusal(folder)
    assert "says that its steps took [8] rollouts, and step 0 has 4" in problem
    assert hint.startswith("Get the files of all ranks")
    copied = by_rank(tmp_path / "copied", copies=2)
    (copied / "train_data" / "0_3.pt").unlink()
    assert "hold the same samples are 0, 1; 2" in refusal(copied)[0]


def test_two_files_of_one_rank_are_refused(tmp_path: Path) -> None:
    folder = by_rank(tmp_path / "run") / "train_data"
    (folder / "0_1.copy").write_bytes((folder / "0_1.pt").read_bytes())
    for path in (folder, folder / "0_0.pt"):
        assert "0_1.copy are both of rank 1 of rollout 0" in refusal(path)[0]


@pytest.mark.parametrize("name", ["rewards", "loss_masks", "raw_reward", "truncated"])
def test_a_copy_keeps_what_its_own_file_says_and_is_held_against_its_owner(
    name: str, tmp_path: Path
) -> None:
    folder = by_rank(tmp_path / "run", copies=2)
    saved(rollout(), folder / "rollout_data" / "0.pt")
    data = of_rank(0)
    data[name][0] = 1 - data[name][0]
    saved({"rollout_id": 0, "rank": 1, "rollout_data": data}, folder / "train_data" / "0_1.pt")
    report = replayed(folder)
    column = {"rewards": "reward", "loss_masks": "loss_mask"}.get(name, name)
    (step,) = (one for one in report.cohorts if one.step_id is not None)
    said = [one.message for one in step.findings if one.check == "copy"]
    assert said == [f"rank 1 is a copy of rank 0 and differs in {column}"]
    assert report.exit_code == 1


def test_a_copy_by_other_numbers_is_refused(tmp_path: Path) -> None:
    folder = by_rank(tmp_path / "run", copies=2)
    data = of_rank(0) | {"sample_indices": [0, 2, 4, 7]}
    saved({"rollout_id": 0, "rank": 1, "rollout_data": data}, folder / "train_data" / "0_1.pt")
    assert "rank 1 holds the samples of rank 0 by other numbers" in refusal(folder)[0]


def test_files_by_rank_go_together_whatever_their_names(tmp_path: Path) -> None:
    for rank in (0, 1):
        content = {"rollout_id": 7, "rank": rank, "rollout_data": of_rank(rank)}
        saved(content, tmp_path / f"train_rank{rank}.pt")
    for path in (tmp_path, tmp_path / "train_rank1.pt"):
        assert {row["rank"] for row in taken(path)} == {0, 1}


def test_a_dump_without_a_schedule_says_that_its_steps_are_unknown(tmp_path: Path) -> None:
    folder = by_rank(tmp_path / "run", layout=False)
    with Lake.of_files(folder) as lake:
        assert lake.imported is not None
        (note,) = lake.imported.sources[0].notes
        rows = lake.sql("select * from steps order by sample_id").arrow().to_pylist()
        (fact,) = {
            json.loads(one["producer"])["extra"]["steps"]
            for one in lake.sql("select producer from manifest").arrow().to_pylist()
        }
    assert "which optimizer step took which sample" in note
    assert fact.startswith("unstated")
    assert {row["micro_batch_id"] for row in rows} == {None}
    assert {row["raw_reward"] for row in rows} == {None}  # those of all ranks, and whose is unsaid


def test_numpy_is_refused_by_name_and_taken_by_a_flag(tmp_path: Path) -> None:
    rolled = rollout()
    for one in rolled["samples"]:
        one["reward"] = np.float64(one["reward"])
        one["rollout_log_probs"] = np.array(one["rollout_log_probs"], np.float32)
    folder = dumped(tmp_path / "run", rolled=rolled)
    problem, hint = refusal(folder / "rollout_data")
    assert "holds numpy._core.multiarray.scalar" in problem
    assert "--allow-numpy" in hint
    allowed = ImportOptions(profile="slime", allow_numpy=True)
    assert verdicts(replayed(folder, options=allowed))["sample"] == "pass"
    for row, same in zip(taken(folder, options=allowed), taken(SLIME), strict=True):
        assert {name for name in row if row[name] != same[name]} == {"run_id"}


def test_a_rank_that_cannot_be_captured_keeps_the_others_out_and_a_dry_run_says_so(
    tmp_path: Path,
) -> None:
    dump = training()
    dump["samples"][2]["log_probs"] = torch.zeros(7)  # on rank 0
    path = saved(dump, tmp_path / "0.pt")
    lake = Lake.create(tmp_path / "lake")
    for store in (lake._store, None):
        (one,) = import_files(store, importer_of("slime"), [path]).sources
        assert one.status == "refused"
        assert "old_log_probs" in one.problem
    assert lake.info().num_rows == 0


def test_what_is_there_with_other_content_keeps_the_others_out(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    with lake.capture(
        run_id="r", rollout_id=0, step_id=0, rank=1, expected_ranks=[0, 1], settings=Settings()
    ):
        pass
    (one,) = lake.import_files(
        "slime", SLIME / "train_data", options=ImportOptions(run="r")
    ).sources
    assert one.status == "refused"
    assert "rank 1 is committed" in one.problem
    lake.refresh()
    ranks = lake.sql("select rank from manifest", allow_partial=True).arrow()["rank"]
    assert ranks.to_pylist() == [1]


def test_what_a_file_is_shows_in_what_it_holds_and_not_in_its_name(tmp_path: Path) -> None:
    saved(training(), tmp_path / "odd" / "name.bin")
    saved({"model": torch.zeros(3), "rollout_id": 0}, tmp_path / "odd" / "0.pt")
    saved(torch.zeros(3), tmp_path / "odd" / "1.pt")
    (tmp_path / "odd" / "2.pt").write_bytes(b"PK\x03\x04")
    assert recognise([tmp_path]).kind == "slime"
    assert [one.name for one in recognise([tmp_path]).find(tmp_path)] == ["name.bin"]
    with pytest.raises(CaptureError, match="nothing at or below it is of a kind"):
        recognise([tmp_path / "odd" / "0.pt"])


@pytest.mark.parametrize("content", [b"", b"PK", b"\x80\x02}", SLIME.name.encode()])
def test_a_broken_file_among_dumps_is_refused_and_not_passed_by(
    content: bytes, tmp_path: Path
) -> None:
    folder = dumped(tmp_path / "run")
    (folder / "rollout_data" / "1.pt").write_bytes(content)
    problem, _ = refusal(folder)
    assert problem.startswith(f"{folder / 'rollout_data' / '1.pt'} holds")
    saved({"model": torch.zeros(3)}, folder / "rollout_data" / "1.pt")
    assert "content is something else, expected that of a dump" in refusal(folder)[0]


def test_a_number_that_several_samples_share_is_told_apart_by_their_order(tmp_path: Path) -> None:
    rolled, dump = rollout(), training()
    for sample in (rolled["samples"][1], rolled["samples"][2]):
        sample.update(index=1, rollout_id=1)
    dump["samples"][2].update(sample_index=1, rollout_ids=1)
    dump["dp_shards"][0].update(sample_indices=[0, 1, 4, 6])
    for shard in dump["dp_shards"]:
        shard["global_batch_sizes"] = [7]
    rows = taken(dumped(tmp_path / "run", train=dump, rolled=rolled))
    names = ["s-0", "s-1.0", "s-1.1", "s-3", "s-4", "s-5", "s-6", "s-7"]
    assert [row["sample_id"] for row in rows] == names
    assert [row["trajectory_id"] for row in rows][:4] == ["r-0", "r-1", "r-1", "r-3"]
    (tmp_path / "run" / "rollout_data" / "0.pt").unlink()
    assert [row["sample_id"] for row in taken(tmp_path / "run")] == names


def routed(rows: list[dict[str, Any]], **changes: Any) -> list[np.ndarray[Any, Any]]:
    """Give each sample choices of 2 of 4 experts in 3 layers, of all its tokens but the last."""
    rng = np.random.default_rng(5)
    given = []
    for row in rows:
        found = rng.integers(0, 4, (len(row["tokens"]) - 1, 3, 2), np.int32)
        given.append(found)
        row.update({"rollout_routed_experts": torch.from_numpy(found), **changes})
    return given


def test_routed_experts_are_routes_of_rollout_and_step(tmp_path: Path) -> None:
    rolled, train = rollout(), training()
    given = routed(rolled["samples"])
    for row in train["samples"]:
        row["rollout_routed_experts"] = torch.from_numpy(given[row["rollout_position"]])
    dumped(tmp_path, train=train, rolled=rolled)
    with Lake.of_files(tmp_path) as lake:
        assert lake.imported is not None
        notes = [note for one in lake.imported.sources for note in one.notes]
        assert not any("rollout_routed_experts" in note for note in notes)
        for step in ("is null", "= 0"):
            rows = lake.sql(
                f"select sample_id, layers, top_k, rollout_experts from routes "
                f"where step_id {step} order by sample_id"
            ).arrow()
            assert [one["rollout_experts"] for one in rows.to_pylist()] == [
                one.reshape(-1).tolist() for one in given
            ]
            assert set(
                zip(*(rows[name].to_pylist() for name in ("layers", "top_k")), strict=True)
            ) == {(3, 2)}


def test_routed_experts_of_numpy_are_taken_where_numpy_is_allowed(tmp_path: Path) -> None:
    rolled = rollout()
    given = routed(rolled["samples"])
    for row, found in zip(rolled["samples"], given, strict=True):
        row["rollout_routed_experts"] = found
    path = saved(rolled, tmp_path / "rollout_data" / "0.pt")
    assert "numpy" in refusal(path)[0]
    with Lake.of_files(path, options=ImportOptions(allow_numpy=True)) as lake:
        assert lake.sql("select count(rollout_experts) as n from routes").arrow().to_pylist() == [
            {"n": len(given)}
        ]


def test_routed_experts_of_another_form_are_named_and_not_taken(tmp_path: Path) -> None:
    rolled = rollout()
    routed(rolled["samples"], rollout_routed_experts=torch.zeros(4, dtype=torch.int32))
    path = saved(rolled, tmp_path / "rollout_data" / "0.pt")
    with Lake.of_files(path) as lake:
        assert lake.imported is not None
        (source,) = lake.imported.sources
        assert any("'rollout_routed_experts'" in note for note in source.notes)


def test_routed_experts_of_other_tokens_are_refused(tmp_path: Path) -> None:
    rolled = rollout()
    (first, *_) = rolled["samples"]
    routed([first])
    first["rollout_routed_experts"] = first["rollout_routed_experts"][:-1]
    path = saved(rolled, tmp_path / "rollout_data" / "0.pt")
    assert "tokens, expected total_length" in refusal(path)[0]
