import random
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.captures import record, sample
from tests.helpers.queried import opened_files, write_rollout, write_step
from trajreplay import Lake, RecomputeConfig, SampleRecord
from trajreplay.query.tables.samples import SAMPLES
from trajreplay.schema import ParallelCoordinates, with_changes
from trajreplay.schema.shards import row_places, shard_lengths
from trajreplay.schema.tables import ROLLOUTS, STEPS

SHARED = [name for name in STEPS.names if name in ROLLOUTS and STEPS[name].role != "key"]
JOIN = f"""(
    select coalesce(s.run_id, r.run_id) as run_id,
        s.attempt, s.rollout_id, s.step_id, s.rank, s.row,
        coalesce(s.source_attempt, r.attempt) as source_attempt,
        coalesce(s.source_rollout_id, r.rollout_id) as source_rollout_id,
        r.rank as source_rank, r.row as source_row,
        {", ".join(f"coalesce(s.{name}, r.{name}) as {name}" for name in SHARED)}
    from steps s full join rollouts r on s.run_id = r.run_id and s.source_attempt = r.attempt
        and s.source_rollout_id = r.rollout_id and s.sample_id = r.sample_id
)"""


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Lake:
    """Two runs whose steps consume, in part, their own and earlier rollouts, or unknown ones."""
    lake = Lake.create(tmp_path_factory.mktemp("samples") / "lake")
    draw = random.Random(7)
    for run in ("a", "b"):
        for rollout in range(4):
            write_rollout(lake, rollout, run_id=run, size=3)
            for step in range(2):
                consumed = [
                    sample(
                        number,
                        source_rollout_id=draw.choice([rollout, max(rollout - 1, 0), 40]),
                        reward=draw.choice([None, 7.0]),
                        group_index=draw.choice([None, 5]),
                    )
                    for number in draw.sample(range(6), 3)
                ]
                record(
                    lake,
                    lambda capture, consumed=consumed: capture.samples(consumed),  # type: ignore[misc]
                    run_id=run,
                    rollout_id=rollout,
                    step_id=step,
                    expected_ranks=[0] if (rollout, step) != (2, 1) else [0, 1],
                )
    write_rollout(lake, 1, run_id="b", attempt=1, resumed_from=(0, 1))
    return lake


@pytest.mark.parametrize(
    "condition",
    [
        "true",
        "rollout_id = 1",
        "rollout_id = 1 and reward is not null",
        "step_id is null",
        "rollout_id is null and run_id = 'a'",
        "source_rollout_id = 1",
        "source_rollout_id = 40",
        "source_rollout_id in (0, 3) and step_id = 1",
        "source_rank = 1",
        "source_row = 2 and rank = 0",
        "row = 1",
        "attempt = 1",
        "source_attempt = 1",
        "sample_id = 's-4'",
        "reward = 7",
        "reward > 100 or source_rollout_id = 2",
        "not (rollout_id = 1)",
        "group_id is null",
        "log_probs is not null and step_id is not null",
        "run_id = 'none'",
    ],
)
def test_it_is_the_full_outer_join_of_steps_and_rollouts(lake: Lake, condition: str) -> None:
    for columns in (", ".join(SAMPLES.names), "reward, source_rank", "count(*)"):
        ours = lake.sql(f"select {columns} from samples where {condition} order by all").arrow()
        join = lake.sql(f"select {columns} from {JOIN} where {condition} order by all").arrow()
        assert ours.to_pylist() == join.to_pylist(), columns


def test_a_filter_on_either_side_opens_the_files_of_both_sides_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake = Lake.create(tmp_path / "lake")
    for rollout in range(5):
        write_rollout(lake, rollout)
        write_step(lake, rollout, 0)
    lake.sql("select count(*) from samples").arrow()
    for text, count in [
        ("select sum(reward) from samples where rollout_id = 2", 2),
        ("select entropy, reward from samples where rollout_id = 2", 4),
        ("select source_rank from samples where rollout_id = 2 and rank = 1", 3),
        ("select reward from samples where source_rollout_id = 2", 6),
        ("select reward from samples where step_id is null and source_rollout_id = 4", 4),
        ("select reward from samples where rollout_id = 77", 0),
    ]:
        with opened_files(monkeypatch) as opened:
            lake.sql(text).arrow()
        assert len(opened) == count, (text, opened)


def test_the_columns_are_declared() -> None:
    assert not [name for name in SAMPLES.key if name not in SAMPLES]
    assert set(SHARED) < set(SAMPLES.names)


def sharded(
    lake: Lake, step: int | None, ranks: int, layout: str, value: float, column: str
) -> dict[int, int]:
    """A sample of 8 tokens cut over so many ranks, each with values of its own; their lengths."""
    settings = with_changes(RecomputeConfig().resolve(), {"layout.context": layout})
    lengths = {}
    for rank in range(ranks):
        parallel = ParallelCoordinates(context_rank=rank, context_size=ranks)
        total, response = np.array([11]), np.array([8])
        places = row_places(settings.layout, parallel, total)
        found = shard_lengths(column, settings.layout, places, total, response)
        lengths[rank] = length = 8 if found is None else int(found[0])
        with lake.capture(
            run_id="r",
            rollout_id=0,
            step_id=step,
            rank=rank,
            expected_ranks=list(range(ranks)),
            settings=settings,
            parallel=parallel,
        ) as capture:
            capture.samples([SampleRecord("a", 8, 11, [1] * 8, group_index=0, raw_reward=value)])
            capture.tensor(column, [np.full(length, value - rank, np.float32)])
    return lengths


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "all-gather"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("generated", [1, 2, 4])
def test_a_shard_is_joined_to_the_same_shard_and_to_no_other(
    tmp_path: Path, layout: str, ranks: int, generated: int
) -> None:
    lake = Lake.create(tmp_path / "lake")
    sharded(lake, None, generated, layout, -10.0, "rollout_log_probs")
    lengths = sharded(lake, 0, ranks, layout, -0.5, "log_probs")
    rows = lake.sql(
        "select rank, source_rank, len(log_probs) as mine, rollout_log_probs as theirs "
        "from samples where step_id = 0 order by rank"
    ).arrow()
    assert rows["mine"].to_pylist() == list(lengths.values())
    alike = ranks == generated
    assert rows["theirs"].to_pylist() == [
        [-10.0 - rank] * length if alike else None for rank, length in lengths.items()
    ]
    if alike:
        assert rows["source_rank"].to_pylist() == list(range(ranks))
    assert None not in rows["source_rank"].to_pylist()
