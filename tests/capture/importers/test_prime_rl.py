"""The import of what prime-rl writes: token exports of its trainer, and rollouts handed to it."""

import json
import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgpack
import pytest

from tests.helpers.dumps import (
    EXPORT,
    PRIME_RL,
    TRANSPORT,
    Tree,
    copied,
    edited,
    imported,
    reasons,
    rows,
    verdicts,
)
from trajreplay import Lake

Lines = list[Tree]
Batches = list[list[Any]]


def exported(rank: int = 0) -> Lines:
    """The lines of the sample."""
    text = (EXPORT / f"rank_{rank}.jsonl").read_text()
    return [json.loads(one) for one in text.splitlines()]


def repacked(folder: Path, edit: Callable[[Batches], object]) -> Path:
    """Change the micro-batches of a copied file."""
    path = folder / "rank_0.bin"
    batches = msgpack.unpackb(path.read_bytes())
    edit(batches)
    path.write_bytes(msgpack.packb(batches))
    return folder


def test_the_log_ratio_is_trainer_minus_inference(lake: Lake) -> None:
    imported(lake, "prime-rl-export", EXPORT)
    found = rows(
        lake,
        "select unnest(log_probs) - unnest(rollout_log_probs) from steps order by sample_id",
    )
    recorded = [
        ratio
        for line in exported()
        for ratio, counts in zip(line["log_importance_ratio"], line["loss_mask"], strict=True)
        if counts
    ]
    assert len(found) == len(recorded) == 4
    for (mine,), theirs in zip(found, recorded, strict=True):
        assert abs(mine - theirs) <= 9e-8


def test_mismatch_is_measured_as_the_trainer_did(lake: Lake) -> None:
    imported(lake, "prime-rl-export", PRIME_RL)
    recorded = [
        (ratio, kl)
        for line in exported()
        for ratio, kl, counts in zip(
            line["log_importance_ratio"], line["mismatch_kl"], line["loss_mask"], strict=True
        )
        if counts
    ]
    for ratio, kl in recorded:
        assert kl == pytest.approx(math.exp(ratio) - 1 - ratio, abs=2e-7)
    (row,) = lake.mismatch(pair="log_probs:rollout_log_probs").table.to_pylist()
    assert row["valid_tokens"] == 4
    assert row["generation_kl"] == pytest.approx(sum(kl for _, kl in recorded) / 4, abs=2e-7)
    assert row["abs_delta_max"] == pytest.approx(max(abs(ratio) for ratio, _ in recorded))


@pytest.mark.parametrize("kind", ["prime-rl-export", "prime-rl-rollout"])
def test_padding_is_trimmed(kind: str, lake: Lake) -> None:
    imported(lake, kind, PRIME_RL)
    found = rows(lake, "select sample_id, total_length, tokens from samples order by 1")
    assert [one[:2] for one in found] == [
        ("rank-0/0/0", 5),
        ("rank-0/0/1", 5),
        ("rank-0/0/2", 7),
    ]
    assert [one[2] for one in found] == [line["token_ids"] for line in exported()]


def test_a_step_is_held_against_the_rollout_that_was_handed_over(
    lake: Lake, tmp_path: Path
) -> None:
    for kind in ("prime-rl-rollout", "prime-rl-export"):
        assert imported(lake, kind, PRIME_RL, profile="prime-rl").status == "imported"
    report = lake.replay(steps=[(5, 0)])
    assert report.exit_code == 3
    assert {one.stage: one.verdict for one in report.cohorts[-1].stages}["sample"] == "pass"

    def shifted(batches: Batches) -> None:
        batches[0][2][16] = 0.25  # an advantage of the last sequence

    other = Lake.create(tmp_path / "other")
    step = repacked(copied(TRANSPORT, tmp_path / "outputs" / "rollouts"), shifted)
    imported(other, "prime-rl-rollout", step, profile="prime-rl")
    imported(other, "prime-rl-export", EXPORT, profile="prime-rl")
    found = other.replay(steps=[(5, 0)])
    assert (found.exit_code, found.first_divergent_stage) == (1, "sample")


def test_a_loss_that_is_not_recorded_is_unverified(lake: Lake) -> None:
    imported(lake, "prime-rl-export", EXPORT)
    assert lake.replay().exit_code == 3
    assert "state them with --profile" in reasons(lake.replay())["loss.policy"]
    stated = Lake.create(lake.path + "-stated")
    imported(stated, "prime-rl-export", EXPORT, profile="prime-rl")
    report = stated.replay()
    assert (report.verdict, report.exit_code) == ("unverified", 3)
    assert verdicts(report)["loss.policy"] == "unverified"
    assert "not recorded over the whole cohort: loss" in reasons(report)["loss.policy"]


def test_null_is_not_a_number(lake: Lake, tmp_path: Path) -> None:
    def overflown(lines: Lines) -> None:
        lines[2]["trainer_logprobs"][5] = None
        lines[2]["log_importance_ratio"][5] = None
        lines[2]["mismatch_kl"][5] = None

    step = copied(EXPORT, tmp_path)
    edited(step / "rank_0.jsonl", overflown)
    imported(lake, "prime-rl-export", step)
    found = rows(lake, "select non_finite from checksums where \"column\" = 'log_probs'")
    assert found == [(1,)]


def test_ranks_are_judged_as_one_step(lake: Lake, tmp_path: Path) -> None:
    step = copied(EXPORT, tmp_path / "run" / "token_exports")
    edited(
        copied(step / "rank_0.jsonl", tmp_path).rename(step / "rank_1.jsonl"),
        lambda lines: [{**one, "rank": 1} for one in lines],
    )
    source = imported(lake, "prime-rl-export", step / "rank_1.jsonl")
    assert [(one[0], one[4]) for one in source.captures] == [("run", 0), ("run", 1)]
    assert rows(lake, "select count(distinct sample_id) from steps") == [(6,)]
    (step / "rank_0.jsonl").unlink()
    again = imported(Lake.create(tmp_path / "other"), "prime-rl-export", step)
    assert "files of rank 1, and none of rank 0" in again.problem


def test_a_rank_without_rows_is_one_of_the_step(lake: Lake, tmp_path: Path) -> None:
    step = copied(EXPORT, tmp_path)
    (step / "rank_1.jsonl").touch()
    source = imported(lake, "prime-rl-export", step)
    assert (source.samples, len(source.captures)) == (3, 2)
    assert lake.validate().ok


def test_a_step_that_is_not_finished_is_refused(lake: Lake, tmp_path: Path) -> None:
    step = copied(EXPORT, tmp_path)
    (step / "STABLE").unlink()
    assert "no STABLE" in imported(lake, "prime-rl-export", step).problem


def test_weights_of_tokens_are_said_to_be_left_out(lake: Lake, tmp_path: Path) -> None:
    step = copied(EXPORT, tmp_path)
    edited(step / "rank_0.jsonl", lambda lines: lines[0].update(rl_weights=[1.0] * 5))
    (note,) = imported(lake, "prime-rl-export", step).notes
    assert note.endswith("rl_weights has no column: not taken")


Edit = Callable[[Lines], object]
BROKEN: dict[str, tuple[Edit, str]] = {
    "another version": (lambda it: it[0].update(schema_version=2), "schema_version is 2"),
    "another step": (lambda it: it[0].update(step=6), "step is 6, expected 5"),
    "another rank": (lambda it: it[0].update(rank=1), "rank is 1, expected 0"),
    "a short column": (lambda it: it[1]["entropy"].pop(), "entropy has 4 values, expected 5"),
    "a log-prob that was changed": (
        lambda it: it[1]["trainer_logprobs"].__setitem__(4, -0.7),
        "line 2: log_importance_ratio is -0.0135748982 at token 4",
    ),
    "a divergence that was changed": (
        lambda it: it[1]["mismatch_kl"].__setitem__(4, 0.1),
        "mismatch_kl is 0.1",
    ),
    "a ratio that is null alone": (
        lambda it: it[1]["log_importance_ratio"].__setitem__(4, None),
        "log_importance_ratio is nan",
    ),
    "no log-probs": (lambda it: it[1].pop("inference_logprobs"), "inference_logprobs is missing"),
    "the same place twice": (lambda it: it[1].update(micro_sequence_idx=0), "occurs 2 times"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_an_export_is_refused_for(what: str, lake: Lake, tmp_path: Path) -> None:
    edit, says = BROKEN[what]
    step = copied(EXPORT, tmp_path)
    edited(step / "rank_0.jsonl", lambda lines: [edit(lines)] and lines)
    source = imported(lake, "prime-rl-export", step)
    assert source.status == "refused"
    assert says in source.problem
    assert lake.info().num_rows == 0


def field(place: int, value: Any) -> Callable[[Batches], object]:
    return lambda batches: batches[0].__setitem__(place, value)


PACKED: dict[str, tuple[Callable[[Batches], object], str]] = {
    "fields of another version": (lambda it: it[0].append(None), "expected a list of 16 fields"),
    "a mask of numbers": (field(1, [1] * 20), "loss_mask is"),
    "ids of another kind": (field(0, [0.5] * 20), "input_ids is"),
    "a number among text": (field(7, ["a", 1]), "env_names is"),
    "a short column": (field(3, [0.0] * 19), "inference_logprobs has 19 values, expected 20"),
    "lengths of another sum": (field(5, [5, 5, 9]), "add up to 19"),
    "a negative length": (field(5, [-5, 15, 10]), "sequence_lengths"),
    "an id beyond 32 bits": (field(0, [1 << 40] * 20), "input_ids has values outside"),
    "padding that is trained on": (field(1, [True] * 20), "of no environment and trained on"),
}


@pytest.mark.parametrize("what", PACKED)
def test_a_rollout_is_refused_for(what: str, lake: Lake, tmp_path: Path) -> None:
    edit, says = PACKED[what]
    source = imported(lake, "prime-rl-rollout", repacked(copied(TRANSPORT, tmp_path), edit))
    assert source.status == "refused"
    assert says in source.problem


BOMBS = {
    "more batches than there are": b"\xdd\xff\xff\xff\xff\xdc\x00\x10\x90" + b"\xc0" * 15,
    "a list of four thousand million": b"\x91\xdc\x00\x10\xdd\xff\xff\xff\xff",
    "lists of lists in lists": b"\x91\xdc\x00\x10" + b"\xdd\x00\xff\xff\xff" * 900,
    "lists in lists": b"\x91\xdc\x00\x10" + b"\x91" * 100_000,
    "no batches": b"\x91\xdc\x00\x10\x90",
    "a list of lists": b"\x91\xdc\x00\x10\xdd" + struct.pack(">I", 500_000) + b"\x90" * 500_000,
    "a text that is not there": b"\x91\xdc\x00\x10\x90\xdb\x7f\xff\xff\xff",
    "bytes after the end": b"\x91\xdc\x00\x10\x90" + b"\xc0" * 15 + b"\x01",
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_packed_bomb_is_refused(what: str, lake: Lake, tmp_path: Path) -> None:
    step = copied(TRANSPORT, tmp_path)
    (step / "rank_0.bin").write_bytes(BOMBS[what])
    source = imported(lake, "prime-rl-rollout", step)
    assert (source.status, source.captures) == ("refused", [])
    assert "step_5" in source.problem


def test_a_list_asks_for_no_more_memory_than_its_file_could_fill(
    lake: Lake, tmp_path: Path
) -> None:
    step = copied(TRANSPORT, tmp_path)
    (step / "rank_0.bin").write_bytes(b"\x91\xdc\x00\x10\xdd\x00\xff\xff\xff")
    assert "exceeds max_array_len(9)" in imported(lake, "prime-rl-rollout", step).problem


def test_a_temperature_that_all_tokens_share_is_kept(lake: Lake) -> None:
    imported(lake, "prime-rl-rollout", PRIME_RL)
    found = lake.inspect(5).to_json()
    assert '"temperature": 1.0' in json.dumps(found)
