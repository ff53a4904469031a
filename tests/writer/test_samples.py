"""Sample records: what no row can represent is refused, all problems of a kind at once."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.captures import read_rows, record, sample, verify
from trajreplay import CaptureError, Lake, SampleRecord
from trajreplay.schema.records import SampleLists


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


def problems(lake: Lake, records: Sequence[SampleRecord], **options: Any) -> str:
    with pytest.raises(CaptureError) as caught:
        record(lake, lambda c: c.samples(records), **options)
    return str(caught.value)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"sample_id": ""}, "row 1: sample_id '' is no name"),
        ({"sample_id": 7}, "row 1: sample_id is 7 of type int, expected a string"),
        ({"sample_id": None}, "row 1: sample_id is None"),
        (
            {"group_id": "a\nb", "group_index": None},
            "row 1: group_id a text of 3 characters has control",
        ),
        ({"micro_batch_id": ".."}, "row 1: micro_batch_id '..' is no name"),
        ({"response_length": -1}, "response_length of sample 's-1' is -1, expected an integer"),
        ({"response_length": 2.0}, "response_length of sample 's-1' is 2.0"),
        ({"response_length": None}, "response_length of sample 's-1' is None"),
        ({"total_length": 2**31}, "total_length of sample 's-1' is 2147483648"),
        ({"total_length": True}, "total_length of sample 's-1' is True"),
        ({"group_size": -3}, "group_size of sample 's-1' is -3"),
        ({"source_rollout_id": 1}, "comes from attempt 0 rollout 1, expected the rollout that"),
        ({"source_attempt": 1}, "comes from attempt 1 rollout 0"),
        ({"loss_mask": [1]}, "row 1: loss_mask of sample 's-1' has 1 values, expected response"),
        ({"loss_mask": None}, "row 1: loss_mask of sample 's-1' is None"),
        ({"loss_mask": [0, 2]}, "row 1: loss_mask of sample 's-1' has 2 at token 1, expected 0"),
        ({"loss_mask": [0, 0.5]}, "loss_mask has 1 values that uint8 cannot hold"),
        ({"reward": "good"}, "reward is no number"),
        ({"truncated": 1}, "truncated is 1, expected true or false"),
        ({"weight_versions": [(0, 2)]}, "weight_versions has (0, 2), expected (start, stop, ve"),
        ({"weight_versions": [(0, 2, 1.5)]}, "weight_versions has (0, 2, 1.5)"),
        ({"group_index": 3, "group_id": "g-4"}, "group_index 3 and group_id 'g-4'"),
    ],
)
def test_a_record_that_no_row_can_represent_is_refused(
    lake: Lake, fields: dict[str, Any], problem: str
) -> None:
    assert problem in problems(lake, [sample(0), sample(1, **fields), sample(2)])


def test_all_problems_are_named_ten_and_then_a_count(lake: Lake) -> None:
    message = problems(lake, [sample(i, response_length=-1) for i in range(30)])
    assert "30 problems of samples" in message
    assert message.count("response_length of sample") == 10
    assert "and 20 more" in message


def test_a_sample_occurs_once_in_a_capture(lake: Lake) -> None:
    message = problems(lake, [sample(0), sample(1), sample(0)])
    assert "sample_id 's-0' of rollout 0 occurs 2 times, expected once" in message


def test_a_step_may_consume_the_same_id_from_two_rollouts(lake: Lake) -> None:
    records = [sample(0), sample(0, source_rollout_id=9)]
    assert record(lake, lambda c: c.samples(records), step_id=0).rows == 2
    message = problems(lake, [*records, sample(0, source_rollout_id=9)], step_id=1)
    assert "sample_id 's-0' of rollout 9 occurs 2 times" in message


def test_numbers_of_numpy_and_torch_are_numbers(lake: Lake) -> None:
    one = sample(
        0,
        response_length=np.int64(2),
        total_length=np.int32(5),
        raw_reward=torch.tensor(0.5),
        reward=np.float32(0.25),
        loss_mask=torch.tensor([True, False]),
    )
    rows = read_rows(lake, record(lake, lambda c: c.samples([one])))
    assert rows["total_length"].to_pylist() == [5]
    assert rows["raw_reward"].to_pylist() == [0.5]
    assert rows["loss_mask"].to_pylist() == [[1, 0]]


def test_spans_of_weights_and_missing_ones_come_back(lake: Lake) -> None:
    records = [
        sample(0, weight_versions=[(0, 1, 7), (1, 2, 8)]),
        sample(1),
        sample(2, weight_versions=[]),
    ]
    rows = read_rows(lake, record(lake, lambda c: c.samples(records)))
    spans = [{"start": 0, "stop": 1, "version": 7}, {"start": 1, "stop": 2, "version": 8}]
    assert rows["weight_versions"].to_pylist() == [spans, None, []]
    verify(lake)


def test_columns_that_no_sample_has_are_left_out(lake: Lake) -> None:
    bare = [sample(0, group_index=None, raw_reward=None, reward=None)]
    rows = read_rows(lake, record(lake, lambda c: c.samples(bare)))
    assert set(rows.column_names) == {
        *("run_id", "attempt", "rollout_id", "rank", "row"),
        *("sample_id", "response_length", "total_length", "loss_mask"),
    }


def test_samples_as_lists_become_the_columns_that_records_become(lake: Lake) -> None:
    records = [sample(row, reward=0.5 * row, micro_batch_id="m-0") for row in range(3)]
    names = ("sample_id", "response_length", "total_length", "loss_mask", "group_index")
    fields = {name: [getattr(one, name) for one in records] for name in names}
    fields |= {name: [getattr(one, name) for one in records] for name in ("raw_reward", "reward")}
    lists = SampleLists(3, {**fields, "micro_batch_id": ["m-0"] * 3})
    ones = record(lake, lambda c: c.samples(records))
    others = record(lake, lambda c: c.samples(lists), rollout_id=1)
    keys = {"rollout_id", "source_rollout_id"}
    held = [
        {name: seal for name, seal in one.files[0].columns.items() if name not in keys}
        for one in (ones, others)
    ]
    assert held[0] == held[1]


def test_a_fault_of_samples_as_lists_is_told_as_of_records(lake: Lake) -> None:
    wrong: dict[str, list[Any]] = {
        "sample_id": ["a", "a", ""],
        "response_length": [1, -1, 1],
        "total_length": [1, 1, 1],
        "loss_mask": [[1], [1], [1]],
    }
    records = [
        SampleRecord(**dict(zip(wrong, row, strict=True)))
        for row in zip(*wrong.values(), strict=True)
    ]
    assert problems(lake, SampleLists(3, wrong)) == problems(lake, records)
    texts = SampleLists(1, {**{name: one[:1] for name, one in wrong.items()}, "prompt": [7]})
    assert "prompt is 7, expected text" in problems(lake, texts)
