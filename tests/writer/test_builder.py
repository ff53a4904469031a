"""The capture block: whole or absent, and what it refuses to represent."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.captures import data_files, entries_of, read_rows, record, sample, start, verify
from trajreplay import CaptureError, Lake, ParallelCoordinates, SchemaError, Settings
from trajreplay.schema.contracts import StageContract
from trajreplay.schema.entry import Output
from trajreplay.schema.lakefile import open_lake
from trajreplay.schema.policy import KEY, Tolerance
from trajreplay.schema.recompute import RecomputeConfig
from trajreplay.writer import CaptureBuilder
from trajreplay.writer.copying import copy_capture


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def nothing(lake: Lake) -> bool:
    """Whether the lake holds no entry, no data and nothing unfinished."""
    left = list((Path(lake.path) / "_tmp").glob("*"))
    return not entries_of(lake) and not data_files(lake) and not left


def test_leaving_the_block_commits(lake: Lake) -> None:
    with start(lake) as capture:
        capture.samples([sample(0), sample(1, 3)])
        capture.tensor("log_probs", [[-1.0, -2.0], [-3.0, -4.0, -5.0]])
        assert capture.entry is None
        assert nothing(lake)
    (entry,) = verify(lake)
    assert capture.entry is not None
    assert capture.entry.key == entry.key
    assert (entry.rows, entry.tokens) == (2, 5)
    rows = read_rows(lake, entry)
    assert rows["log_probs"].to_pylist() == [[-1.0, -2.0], [-3.0, -4.0, -5.0]]
    assert rows["row"].to_pylist() == [0, 1]


def test_an_exception_in_the_block_leaves_nothing_and_propagates(lake: Lake) -> None:
    def interrupt(capture: CaptureBuilder) -> None:
        capture.samples([sample()])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(lake, interrupt)
    assert nothing(lake)


def test_a_step_records_where_its_samples_came_from(lake: Lake) -> None:
    with start(lake, rollout_id=7, step_id=1) as capture:
        capture.samples([sample(0), sample(0, source_rollout_id=6), sample(1, source_attempt=0)])
    (entry,) = verify(lake)
    assert entry.sources == ((0, 6), (0, 7))
    assert read_rows(lake, entry)["source_rollout_id"].to_pylist() == [7, 6, 7]


@pytest.mark.parametrize("records", [None, []])
def test_a_rank_without_rows_commits_an_entry_without_a_file(
    lake: Lake, records: list[Any] | None
) -> None:
    with start(lake, expected_ranks=[0, 1]) as capture:
        if records is not None:
            capture.samples(records)
            capture.tensor("log_probs", [])
            capture.tensor("old_log_probs", torch.empty(0))
        capture.expected("loss.policy", loss=0.0)
    (entry,) = verify(lake)
    assert (entry.rows, entry.files, len(entry.outputs)) == (0, (), 1)
    assert entry.expected_ranks == (0, 1)
    assert not data_files(lake)


def test_every_ragged_row_is_named_at_once(lake: Lake) -> None:
    with pytest.raises(CaptureError) as caught:
        record(
            lake,
            lambda c: c.samples([sample(i, 3) for i in range(12)]),
            lambda c: c.tensor("log_probs", [torch.zeros(3 - (i > 0)) for i in range(12)]),
            lambda c: c.tensor("entropy", [torch.zeros(3)] * 11),
            lambda c: c.tensor("tokens", [torch.zeros(3, dtype=torch.int64)] * 12),
        )
    message = str(caught.value)
    first = "row 1: log_probs of sample 's-1' has 2 values, expected response_length = 3"
    assert first in message
    assert "and 14 more" in message
    problems = caught.value.facts["problems"]
    assert "entropy has 11 rows, expected 12: one per sample" in problems
    assert "row 0: tokens of sample 's-0' has 3 values, expected total_length = 4" in problems
    assert len(problems) == 11 + 1 + 12
    assert nothing(lake)


def test_a_packed_tensor_of_another_size_is_refused(lake: Lake) -> None:
    with pytest.raises(CaptureError, match="5 packed values, expected 4: the sum of resp"):
        record(
            lake,
            lambda c: c.samples([sample(0), sample(1)]),
            lambda c: c.tensor("log_probs", torch.zeros(5)),
        )
    assert nothing(lake)


def test_a_packed_tensor_needs_the_samples_before_it(lake: Lake) -> None:
    with pytest.raises(CaptureError, match=r"samples are not known yet\n\nCall samples\(\) before"):
        record(lake, lambda c: c.tensor("log_probs", torch.zeros(2)))


def test_a_list_may_come_before_the_samples(lake: Lake) -> None:
    with start(lake) as capture:
        capture.tensor("log_probs", [torch.zeros(2)])
        capture.samples([sample()])
    assert verify(lake)[0].rows == 1


def test_a_sample_without_values_is_null_and_a_column_without_any_is_left_out(lake: Lake) -> None:
    with start(lake) as capture:
        capture.samples([sample(0), sample(1), sample(2)])
        capture.tensor("ref_log_probs", [None, torch.ones(2), None])
        capture.tensor("values", [None, None, None])
        capture.tensor("kl", None)
    (entry,) = verify(lake)
    rows = read_rows(lake, entry)
    assert rows["ref_log_probs"].to_pylist() == [None, [1.0, 1.0], None]
    assert not {"values", "kl"} & set(rows.column_names)
    seal = entry.files[0].columns["ref_log_probs"]
    assert (seal.nulls, seal.values) == (2, 2)


def test_the_trainer_may_overwrite_its_tensor_afterwards(lake: Lake) -> None:
    tensors: list[Any] = [
        torch.ones(2),
        torch.ones(2).numpy().copy(),
        torch.ones(2, dtype=torch.bfloat16),
    ]
    with start(lake) as capture:
        capture.samples([sample()])
        names = ["log_probs", "old_log_probs", "entropy"]
        for name, tensor in zip(names, tensors, strict=True):
            capture.tensor(name, tensor)
            tensor[:] = 9
    rows = read_rows(lake, verify(lake)[0])
    assert [rows[name].to_pylist() for name in names] == [[[1.0, 1.0]]] * 3


def test_counts_and_dtypes_are_in_the_entry(lake: Lake) -> None:
    values = torch.tensor([float("nan"), float("inf")], dtype=torch.bfloat16)
    with start(lake) as capture:
        capture.samples([sample(raw_reward=float("-inf"))], reward_dtype="float64")
        capture.tensor("log_probs", values)
        capture.tensor("advantages", [[1.0, 2.0]])
        capture.tensor("tokens", torch.arange(3))
    columns = verify(lake)[0].files[0].columns
    assert (columns["log_probs"].non_finite, columns["log_probs"].source_dtype) == (2, "bfloat16")
    assert columns["advantages"].source_dtype == "float32"
    assert columns["tokens"].source_dtype == "int64"
    assert columns["tokens"].non_finite is None
    assert (columns["raw_reward"].non_finite, columns["raw_reward"].source_dtype) == (1, "float64")
    assert columns["sample_id"].values == 1


def test_an_origin_is_kept_with_log_probs_only(lake: Lake) -> None:
    with start(lake) as capture:
        capture.samples([sample()])
        capture.tensor(
            "rollout_log_probs", torch.zeros(2), source="sampler", temperature=0.7, weight_version=3
        )
        capture.tensor("old_log_probs", torch.zeros(2), source="copy:rollout_log_probs")
        with pytest.raises(CaptureError, match="entropy has an origin"):
            capture.tensor("entropy", torch.zeros(2), source="trainer")
        with pytest.raises(CaptureError, match="source is 'somewhere'"):
            capture.tensor("log_probs", torch.zeros(2), source="somewhere")
    origins = verify(lake)[0].origins
    assert origins["rollout_log_probs"].temperature == 0.7
    assert origins["old_log_probs"].source == "copy:rollout_log_probs"


@pytest.mark.parametrize(
    ("use", "problem"),
    [
        (lambda c: c.tensor("logits", torch.zeros(2)), "unknown tensor 'logits', expected one of"),
        (lambda c: c.tensor("loss_mask", torch.zeros(2)), "Masks, rewards and ids come with"),
        (lambda c: c.tensor("reward", torch.zeros(2)), "unknown tensor 'reward'"),
        (lambda c: c.samples([]), r"samples\(\) was called before"),
        (lambda c: [c.tensor("kl", torch.zeros(2)) for _ in "ab"], "kl was given before"),
        (lambda c: c.expected("loss", loss=1.0), "unknown stage 'loss'"),
        (lambda c: [c.expected("loss.policy", loss=1.0) for _ in "ab"], "was given before"),
    ],
)
def test_a_wrong_call_is_refused(
    lake: Lake, use: Callable[[CaptureBuilder], object], problem: str
) -> None:
    with pytest.raises((CaptureError, SchemaError), match=problem):
        record(lake, lambda c: c.samples([sample()]), use)
    assert nothing(lake)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"run_id": ".."}, "run_id"),
        ({"rank": -1}, "rank is -1"),
        ({"rollout_id": 1.5}, "rollout_id is 1.5"),
        ({"step_id": "0"}, "step_id is '0'"),
        ({"expected_ranks": [1, 2]}, "with 0 among them"),
        ({"expected_ranks": [0, 0]}, "distinct ranks"),
        ({"expected_ranks": []}, "distinct ranks"),
        ({"stages": ["loss"]}, "unknown stage 'loss'"),
        ({"stages": ["sample", StageContract("sample")]}, "declared twice"),
        ({"redaction": {"prompt": "keep"}}, "redaction of prompt"),
        ({"settings": None}, "settings are a NoneType"),
        ({"settings": {"eps_clip": 0.2}}, "settings are a dict"),
        ({"cohort_size": -1}, "cohort_size is -1"),
        ({"attempt": 1, "resumed_from": (1, 3)}, "expected an earlier one"),
        ({"settings": RecomputeConfig(eps_clip=float("inf"))}, "expected a number that float32"),
    ],
)
def test_a_capture_that_makes_no_sense_does_not_start(
    lake: Lake, options: dict[str, Any], problem: str
) -> None:
    with pytest.raises((CaptureError, SchemaError), match=problem):
        record(lake, **options)
    assert nothing(lake)


def test_what_the_capture_says_of_itself_is_in_its_entry(lake: Lake) -> None:
    with start(
        lake,
        expected_ranks=[3, 0],
        stages=["sample", StageContract("loss.policy", "inspect-only", reason="no mask")],
        parallel=ParallelCoordinates(tensor_rank=1, tensor_size=2),
        redaction={"prompt": "hash"},
        cohort_size=9,
        tolerances={"loss.policy": Tolerance(0.0, 1e-9)},
        settings=Settings(handoff={"reward": "bfloat16"}),
    ) as capture:
        capture.samples([sample(prompt="secret", response="secret too")])
    (entry,) = verify(lake)
    assert entry.expected_ranks == (0, 3)
    assert entry.contracts["loss.policy"].reason == "no mask"
    assert not entry.owner
    assert entry.cohort_size == 9
    assert entry.tolerances["loss.policy"].rtol == 1e-9
    assert entry.settings == Settings(handoff={"reward": "bfloat16"})
    rows = read_rows(lake, entry)
    assert rows["prompt"][0].as_py().startswith("sha256:")
    assert "response" not in rows.column_names


SECRET = "a key that is nobody else's"


def test_a_keyed_hash_needs_the_key_and_does_not_keep_it(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = []
    rules = {"prompt": "keyed-hash", "response": "hash"}
    for number, key in enumerate([SECRET, SECRET, SECRET[::-1]]):
        monkeypatch.setenv(KEY, key)
        with start(lake, rollout_id=number, redaction=rules) as capture:
            capture.samples([sample(prompt="yes", response="yes")])
        rows = read_rows(lake, next(e for e in entries_of(lake) if e.key.rollout_id == number))
        hashes.append(rows["prompt"][0].as_py())
    assert hashes[0] == hashes[1] != hashes[2]
    assert all(one.startswith("hmac-sha256:") for one in hashes)
    assert lake.validate().ok
    for file in Path(lake.path).rglob("*"):
        assert not file.is_file() or SECRET.encode() not in file.read_bytes()
    monkeypatch.setenv(KEY, "short")
    with pytest.raises(SchemaError, match="has 5 bytes, expected at least 16"):
        start(lake, rollout_id=9, redaction=rules)


def test_a_copy_that_drops_one_text_keeps_the_hash_of_another(
    lake: Lake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, SECRET)
    rules = {"prompt": "keyed-hash", "response": "hash", "label": "truncate:3"}
    with start(lake, redaction=rules) as capture:
        capture.samples([sample(prompt="yes", response="yes", label="yes")])
    (entry,) = verify(lake)
    other = Lake.create(tmp_path / "other")
    copied = copy_capture(open_lake(lake.path), open_lake(other.path), entry, {"label": "drop"})
    before, after = read_rows(lake, entry), read_rows(other, copied)
    assert after["prompt"] == before["prompt"]
    assert after["response"] == before["response"]
    assert "label" not in after.column_names


def test_a_scalar_of_the_short_form_is_a_sum_over_its_rank(lake: Lake) -> None:
    with start(lake, step_id=0) as capture:
        capture.samples([sample(0), sample(1)])
        capture.expected("loss.policy", loss=torch.tensor(0.5), ppo_kl=np.float32(2.0))
        capture.expected("loss.policy", loss=1.0, micro_batch_id="mb-0")
        capture.expected("loss.policy", loss=torch.tensor([1.0, float("nan")]), scope="sample")
    outputs = verify(lake)[0].outputs
    assert outputs[:2] == (
        Output("loss.policy", "loss", 0.5, scope="rank", reduction="sum"),
        Output("loss.policy", "ppo_kl", 2.0, scope="rank", reduction="sum"),
    )
    assert (outputs[2].scope, outputs[2].micro_batch_id) == ("micro_batch", "mb-0")
    assert outputs[3].values is not None
    assert outputs[3].values[0] == 1.0


def test_an_unstated_scalar_under_full_settings_stays_unstated(lake: Lake) -> None:
    with start(lake, settings=Settings()) as capture:
        capture.expected("loss.policy", loss=1.0)
        capture.expected("loss.policy", pg_loss=[], scope="sample")
    first, second = verify(lake)[0].outputs
    assert (first.scope, first.reduction) == (None, None)
    assert (second.scope, second.reduction, second.values) == ("sample", "sum", ())


def test_scalars_per_sample_are_as_many_as_samples(lake: Lake) -> None:
    with pytest.raises(CaptureError, match=r"loss\.policy\.loss has 3 values, expected 1"):
        record(
            lake,
            lambda c: c.samples([sample()]),
            lambda c: c.expected("loss.policy", loss=[1.0, 2.0, 3.0], scope="sample"),
        )


def test_an_entry_beyond_its_limit_is_refused_and_nothing_stays(lake: Lake) -> None:
    rows = 60_000
    losses = np.random.default_rng(0).random(rows)
    with pytest.raises(CaptureError, match="expected at most 1048576"):
        record(
            lake,
            lambda c: c.samples([sample(i, 0) for i in range(rows)]),
            lambda c: c.expected("loss.policy", loss=losses, scope="sample"),
        )
    assert nothing(lake)


def test_a_given_up_capture_says_why_and_blocks_nothing(lake: Lake) -> None:
    with start(lake) as capture:
        capture.samples([sample()])
        capture.drop("queue full")
    (dropped,) = verify(lake)
    assert (dropped.status, dropped.reason, dropped.key.part) == (
        "dropped",
        "queue full",
        "dropped",
    )
    assert not data_files(lake)
    with start(lake) as capture:
        capture.samples([sample()])
    assert {one.status for one in verify(lake)} == {"dropped", "complete"}


def test_captured_as_they_are(lake: Lake) -> None:
    with start(lake) as capture:
        capture.samples(
            [
                sample(0, 0, group_index=None),
                sample(1, 2, loss_mask=[0, 0], total_length=1, raw_reward=float("nan")),
                sample(2, 1, raw_reward=None, reward=None, group_size=99),
            ]
        )
        capture.tensor("log_probs", [[], [float("nan"), float("inf")], [-0.0]])
    (entry,) = verify(lake)
    rows = read_rows(lake, entry)
    assert rows["log_probs"].to_pylist()[0] == []
    assert rows["total_length"].to_pylist() == [1, 1, 2]
    assert rows["group_id"].to_pylist() == [None, "g-0", "g-0"]
    assert np.signbit(rows["log_probs"].to_pylist()[2][0])
