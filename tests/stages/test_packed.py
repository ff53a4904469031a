import numpy as np
import pyarrow as pa
import torch

from trajreplay.stages.cohorts.packed import Packed, list_lengths, packed_values

FLOATS = pa.list_(pa.float32())


def _table(
    ids: list[str], tokens: list[list[float]], groups: list[str | None], **more: list[int]
) -> pa.Table:
    rows = len(ids)
    return pa.table(
        {
            "sample_id": pa.array(ids),
            "group_id": pa.array(groups, pa.string()),
            "response_length": pa.array([len(one) for one in tokens], pa.int32()),
            "log_probs": pa.array(tokens, FLOATS),
            "loss_mask": pa.array([[1] * len(one) for one in tokens], pa.list_(pa.uint8())),
            "rank": pa.array([0] * rows, pa.int32()),
            "row": pa.array(range(rows), pa.int64()),
            **{name: pa.array(values, pa.int64()) for name, values in more.items()},
        }
    )


def test_cohorts_lie_one_after_another() -> None:
    packed = Packed(
        [_table(["a", "b"], [[1.0, 2.0], []], ["x", "x"]), _table(["c"], [[3.0]], ["x"])]
    )
    assert packed.sample_bounds == [0, 2, 3]
    assert packed.token_bounds == [0, 2, 3]
    assert packed.offsets.tolist() == [0, 2, 2, 3]
    assert packed.tokens("log_probs").tolist() == [1.0, 2.0, 3.0]
    assert packed.tokens("log_probs").dtype == torch.float64
    assert packed.mask.tolist() == [True] * 3
    assert packed.text("sample_id", 2) == "c"
    assert packed.text("prompt", 2) is None


def test_a_token_knows_its_sample() -> None:
    packed = Packed([_table(["a", "b", "c"], [[1.0], [], [2.0, 3.0]], ["x"] * 3)])
    assert [packed.sample_of(token) for token in range(3)] == [(0, 0), (2, 0), (2, 1)]


def test_groups_of_one_name_belong_to_a_cohort_each() -> None:
    one = _table(["a", "b", "c"], [[1.0]] * 3, ["x", "y", "x"])
    groups = Packed([one, one]).groups.tolist()
    assert groups[0] == groups[2] != groups[1]
    assert not set(groups[:3]) & set(groups[3:])


def test_groups_of_one_name_belong_to_a_rollout_each() -> None:
    step = _table(
        ["a", "b", "c", "d"],
        [[1.0]] * 4,
        ["x"] * 4,
        source_attempt=[0, 0, 0, 1],
        source_rollout_id=[7, 8, 7, 7],
    )
    groups = Packed([step]).groups.tolist()
    assert groups[0] == groups[2]
    assert len(set(groups)) == 3


def test_samples_without_a_group_are_a_group_of_their_cohort() -> None:
    groups = Packed([_table(["a", "b"], [[1.0]] * 2, [None, None])]).groups
    assert groups.tolist() == [0, 0]


def test_values_may_change_their_type_on_the_way() -> None:
    column = pa.chunked_array([pa.array([[1.0, 2.0], [3.0]], FLOATS)])
    assert packed_values(column, np.float64).dtype == torch.float64
    assert packed_values(column, np.float64).tolist() == packed_values(column).tolist()


def test_values_of_slices_and_several_chunks_are_those_of_their_rows() -> None:
    whole = pa.chunked_array([[[9.0], [1.0, 2.0]], [[3.0], [], [4.0]]], FLOATS)
    assert packed_values(whole.slice(1, 3)).tolist() == [1.0, 2.0, 3.0]
    assert packed_values(whole.slice(3, 1)).tolist() == []
    assert packed_values(pa.chunked_array([], FLOATS)).dtype == torch.float32


def test_a_missing_list_has_no_length() -> None:
    column = pa.chunked_array([pa.array([[1.0], None, []], FLOATS)])
    assert list_lengths(column).tolist() == [1, -1, 0]
    assert list_lengths(column).dtype == np.int64
