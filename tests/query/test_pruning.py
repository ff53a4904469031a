import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trajreplay.query.tables.pruning import PushedFilter, rows_that_may_match

KEYS = pa.table({"run_id": ["a", "b", "a"], "rollout_id": [1, 2, 120]})
KNOWN = KEYS.column_names
NULL = pc.scalar(pa.scalar(None, pa.bool_()))
rollout, run, reward = pc.field("rollout_id"), pc.field("run_id"), pc.field("reward")


def kept(expression: pc.Expression) -> list[int]:
    on_keys = PushedFilter(expression).on_keys(KNOWN)
    found: list[int] = rows_that_may_match(KEYS, on_keys)["rollout_id"].to_pylist()
    return found


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (rollout == 120, [120]),
        ((rollout == 120) & reward.is_valid(), [120]),
        ((rollout == 120) & reward.is_null() & (reward == 5.0), [120]),
        ((rollout == 2) | (reward > 1), [1, 2, 120]),
        ((rollout == 2) & ((run == "b") | (reward > 1)), [2]),
        (~(rollout == 1) & (run == "it's 'a'\n"), []),
        (~((rollout == 1) & (reward == 1.0)), [1, 2, 120]),
        (reward.isin([1.0]), [1, 2, 120]),
        (pc.if_else(rollout.is_valid(), rollout.isin([1, 2]), NULL), [1, 2]),
        (pc.if_else(reward.is_valid(), reward.isin([1.0]), NULL) & (rollout > 1), [2, 120]),
        (pc.field("truncated") & (rollout < 3), [1, 2]),
        (pc.field("s", "x") == 1, [1, 2, 120]),
        (pc.scalar(True), [1, 2, 120]),
        (pc.scalar(False), []),
        (NULL, []),
        (NULL & reward.is_valid(), []),
        (~(rollout == 2) & ~(reward > 1), [1, 120]),
    ],
)
def test_only_what_the_keys_rule_out_is_pruned(
    expression: pc.Expression, expected: list[int]
) -> None:
    assert kept(expression) == expected


def test_the_columns_of_a_filter_are_told() -> None:
    assert PushedFilter((rollout == 1) & reward.is_valid()).fields() == frozenset(
        {"rollout_id", "reward"}
    )
    assert PushedFilter(pc.field("s", "x") == 1).fields() is None


def test_a_filter_too_deep_to_follow_prunes_nothing() -> None:
    expression = rollout == 0
    for value in range(5000):
        expression = expression | (rollout == -value)
    pushed = PushedFilter(expression)
    assert pushed.fields() in (None, frozenset({"rollout_id"}))
    assert kept(expression) in ([], [1, 2, 120])


ROWS = pa.table(
    {
        "rollout_id": pa.array([1, 1, 2, 2, 3, None, None], pa.int64()),
        "reward": pa.array([None, 1.0, float("nan"), -1.0, 0.0, 1.0, None]),
        "flag": pa.array([True, None, False, True, None, True, None]),
    }
)
ATOMS = [
    *(rollout == value for value in (1, 2, 9)),
    rollout >= 2,
    rollout.is_valid(),
    reward == 1.0,
    reward > 0,
    reward.is_valid(),
    reward.is_null(),
    pc.field("flag"),
    pc.field("flag").is_null(),
    pc.if_else(reward.is_valid(), reward.isin([0.0, 1.0]), NULL),
    NULL,
]


def expressions() -> st.SearchStrategy[pc.Expression]:
    return st.recursive(
        st.sampled_from(ATOMS),
        lambda inner: st.one_of(
            st.tuples(inner, inner).map(lambda pair: pair[0] & pair[1]),
            st.tuples(inner, inner).map(lambda pair: pair[0] | pair[1]),
            inner.map(lambda one: ~one),
        ),
        max_leaves=8,
    )


@given(expressions())
def test_no_matching_row_is_ever_pruned(expression: pc.Expression) -> None:
    keys = pa.table({"rollout_id": pa.array([1, 2, 3, 4, None], pa.int64())})
    on_keys = PushedFilter(expression).on_keys(["rollout_id"])
    kept_keys = set(rows_that_may_match(keys, on_keys)["rollout_id"].to_pylist())
    matching = set(ROWS.filter(expression)["rollout_id"].to_pylist())
    assert matching <= kept_keys
