"""The schedule really is as awkward as an asynchronous training's, and loses nothing."""

from collections import Counter, defaultdict

from hypothesis import given
from hypothesis import strategies as st

from trajreplay.cli.demo.config import TrainingConfig
from trajreplay.cli.demo.sampler import Sample
from trajreplay.cli.demo.schedule import (
    Arrival,
    ConsumerStream,
    Request,
    pack_micro_batches,
    plan_requests,
    stream_order,
)
from trajreplay.cli.demo.task import EOS, Prompt

CONFIG = TrainingConfig()


def arrivals(requests: list[Request]) -> list[Arrival]:
    return [
        Arrival(r.sample_id, r.group_index, response_length=1 + index * 7 % 10, raw_reward=0.0)
        for index, r in enumerate(requests)
    ]


def steps(rollouts: int) -> list[tuple[int, list[Request]]]:
    """Give each step's rollout coordinate and requests, as the trainer takes them."""
    stream = ConsumerStream(CONFIG.consumer_batch_size)
    known: dict[str, Request] = {}
    taken = []
    for rollout_id in range(rollouts):
        requests = plan_requests(CONFIG, rollout_id)
        known |= {request.sample_id: request for request in requests}
        stream.append([arrival.sample_id for arrival in stream_order(arrivals(requests))])
        taken += [
            (rollout_id, [known[name] for name in members]) for members in stream.full_batches()
        ]
    return taken


def test_every_rank_plans_the_same_requests() -> None:
    assert plan_requests(CONFIG, 5) == plan_requests(TrainingConfig(), 5)


def test_another_seed_asks_other_prompts() -> None:
    other = TrainingConfig(seed=CONFIG.seed + 1)
    assert plan_requests(CONFIG, 0) != plan_requests(other, 0)


def test_sample_ids_are_unique_over_rollouts() -> None:
    names = [r.sample_id for rollout in range(3) for r in plan_requests(CONFIG, rollout)]
    assert len(set(names)) == len(names)


def test_every_group_has_all_its_samples() -> None:
    sizes = Counter(request.group_index for request in plan_requests(CONFIG, 0))
    assert set(sizes.values()) == {CONFIG.samples_per_prompt}


def test_some_groups_lie_on_both_ranks_and_the_shares_differ() -> None:
    requests = plan_requests(CONFIG, 0)
    ranks_of_group = defaultdict(set)
    for request in requests:
        ranks_of_group[request.group_index].add(request.rank)
    assert any(len(ranks) == CONFIG.ranks for ranks in ranks_of_group.values())
    shares = Counter(request.rank for request in requests)
    assert len(set(shares.values())) == CONFIG.ranks


def test_a_group_is_handed_on_when_its_longest_response_is_finished() -> None:
    order = stream_order(
        [
            Arrival("a", 0, response_length=9, raw_reward=0.0),
            Arrival("b", 1, response_length=2, raw_reward=0.0),
            Arrival("c", 0, response_length=1, raw_reward=0.0),
        ]
    )
    assert [arrival.sample_id for arrival in order] == ["b", "a", "c"]


def test_consumer_batches_cut_through_groups() -> None:
    batches_of_group = defaultdict(set)
    for index, (_, members) in enumerate(steps(2)):
        for request in members:
            batches_of_group[request.group_index].add(index)
    assert any(len(batches) > 1 for batches in batches_of_group.values())


def test_a_rollout_feeds_several_steps_and_some_steps_take_from_two_rollouts() -> None:
    taken = steps(6)
    assert min(Counter(rollout_id for rollout_id, _ in taken).values()) >= 3
    sources = [{request.rollout_id for request in members} for _, members in taken]
    assert any(len(rollouts) == 2 for rollouts in sources)
    assert any(len(rollouts) == 1 for rollouts in sources)


def test_some_steps_have_unequal_shares_on_the_ranks() -> None:
    shares = [Counter(request.rank for request in members) for _, members in steps(2)]
    assert any(share[0] != share[1] for share in shares)


@given(st.lists(st.integers(0, 40), max_size=8))
def test_the_stream_hands_every_sample_on_once_and_in_order(sizes: list[int]) -> None:
    stream = ConsumerStream(7)
    queued, announced, taken = [], [], []
    for block, size in enumerate(sizes):
        names = [f"{block}/{index}" for index in range(size)]
        queued += names
        announced += stream.append(names)
        taken += list(stream.full_batches())
    assert [name for batch in taken for name in batch] == queued[: 7 * len(taken)]
    assert len(queued) - 7 * len(taken) < 7
    assert announced == [position // 7 for position in range(len(queued))]


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 30))
def test_micro_batches_keep_the_order_and_the_budget(lengths: list[int], budget: int) -> None:
    request = Request("s", 0, Prompt(7, 3), rollout_id=0, partition_index=0, rank=0)
    samples = [Sample(request, response=[0] * length + [EOS]) for length in lengths]
    packed = pack_micro_batches(samples, budget)
    assert [id(s) for batch in packed for s in batch] == [id(s) for s in samples]
    for batch in packed:
        assert len(batch) == 1 or sum(sample.total_length for sample in batch) <= budget
