"""Context parallelism under every setting: shards replay as whole samples, and faults are found."""

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.cohorts import Expected, capture
from tests.helpers.composed import ComposedTrainer
from tests.helpers.composed_corrections import CURRENT
from tests.helpers.scenes import WAY, refusals, the_cohort, the_stage
from tests.helpers.trainer import Sample
from tests.stages.test_composed import CHANGES, COLUMNS, PLAIN, STAGES, _shares, _take_apart
from tests.stages.test_shards import LAYOUTS, _held
from trajreplay import Lake, LayoutSettings, ParallelCoordinates, Settings, with_changes

ESTIMATE = "advantage.estimate"
# What is one number a sample or a token, and is summed: each rank can record its own share of it.
SUMMED = sorted(
    name
    for name, (changes, _) in CHANGES.items()
    if not changes.keys()
    & {"loss.aggregation", "loss.batch_reduction", "loss.fragments", "loss.nll_coef"}
    and not changes.keys()
    & {"loss.entropy_aggregation", "loss.kl_loss_aggregation", "value.aggregation"}
    and not {"rank", "stride"} & {str(one) for one in changes.values()}
)
ZIGZAG = LayoutSettings("zigzag")
Change = Callable[[int, Sample], None]


def _nothing(rank: int, sample: Sample) -> None:
    """What is recorded as it is."""


def _samples(seed: int) -> list[Sample]:
    """Two groups of one data-parallel rank, with every kind of column."""
    return [one for own in _shares(seed).values() for one in own]


def _write(
    lake: Lake,
    settings: Settings,
    size: int,
    *,
    seed: int = 0,
    change: Change = _nothing,
    told: Settings | None = None,
) -> list[Sample]:
    """A training on `size` context-parallel ranks, each recording its share of every scalar."""
    samples = _samples(seed)
    if settings.reward.weights:
        _take_apart({0: samples}, missing=settings.reward.missing == "exclude")
    trainer = ComposedTrainer(settings, {0: samples})
    trainer.score()
    trainer.estimate()
    shares, expected = {}, {}
    for rank in range(size):
        held = _held(samples, settings.layout, rank, size)
        shares[rank] = [_part(one, mine) for one, mine in zip(samples, held, strict=True)]
        expected[rank] = _scalars(trainer, held)
        for one in shares[rank]:
            change(rank, one)
    capture(
        lake,
        shares,
        WAY,
        step_id=0,
        stages=STAGES,
        columns=COLUMNS,
        settings=settings if told is None else told,
        expected=expected,
        parallel={r: ParallelCoordinates(context_rank=r, context_size=size) for r in range(size)},
        versions={"log_probs": CURRENT},
    )
    return samples


def _part(sample: Sample, mine: list[int]) -> Sample:
    part = sample.copy()
    part.columns = {name: values[mine] for name, values in sample.columns.items()}
    return part


def _scalars(trainer: ComposedTrainer, held: list[list[int]]) -> list[Expected]:
    policy: dict[str, float] = {}
    value: dict[str, float] = {}
    for row, mine in enumerate(held):
        for found, terms, summed, counted in (
            (policy, trainer.policy_terms(row), trainer.summed[row], trainer.counted[row]),
            (value, trainer.value_terms(row), trainer.valued[row], trainer.valued[row]),
        ):
            for name, tokens in terms.items():
                share = sum(summed[t] * tokens[t] for t in mine) / max(sum(counted), 1.0)
                found[name] = found.get(name, 0.0) + share
    meaning = {"scope": "rank", "reduction": "sum"}
    return [Expected(policy, meaning), Expected(value, meaning, "loss.value")]


@given(
    st.sampled_from(SUMMED),
    st.sampled_from([2, 4]),
    st.sampled_from(LAYOUTS),
    st.integers(0, 99),
)
def test_what_a_setting_makes_of_shards_passes(
    name: str, size: int, layout: LayoutSettings, seed: int
) -> None:
    settings = replace(with_changes(PLAIN, CHANGES[name][0]), layout=layout)
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake.create(Path(folder) / "lake")
        _write(lake, settings, size, seed=seed)
        assert lake.validate().ok
        cohort = the_cohort(lake.replay())
    assert cohort.verdict in ("pass", "precision"), cohort.to_json()
    assert all(one.compared for one in cohort.stages)


# Columns beyond V1's, and a setting that has each decide an advantage token by token.
TOKENS: dict[str, dict[str, Any]] = {
    "token_rewards": {"advantage.reward_source": "token"},
    "teacher_log_probs": {"advantage.opd_coef": 0.5},
    "sum_pi_squared": {"advantage.estimator": "otb", "advantage.reward_source": "token"},
    "old_values": {"advantage.estimator": "gae"},
    "message_faults": {"advantage.invalid_tool_call": -9.0, "advantage.malformed_thinking": 9.0},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("column", TOKENS)
def test_a_wrong_token_of_one_shard_is_found(
    lake: Lake, column: str, layout: LayoutSettings
) -> None:
    settings = replace(with_changes(PLAIN, TOKENS[column]), layout=layout)
    samples = _samples(0)
    sample, place = next(
        (row, t)
        for row, one in enumerate(samples)
        for t, m in enumerate(one.mask)
        if m and row % 4 and one.length > 2
    )
    held = [_held(samples, layout, rank, 2)[sample] for rank in (0, 1)]
    owner = next(rank for rank, mine in enumerate(held) if place in mine)

    def change(rank: int, one: Sample) -> None:
        if (rank, one.sample_id) == (owner, samples[sample].sample_id):
            values = one.columns[column]
            at = held[owner].index(place)
            values[at] = (int(values[at]) + 1) % 3 if column == "message_faults" else 0.125

    _write(lake, settings, 2, change=change)
    cohort = the_cohort(lake.replay())
    assert cohort.first_divergent_stage == ESTIMATE
    places = {(one.sample_id, one.token) for one in the_stage(cohort, ESTIMATE).divergences}
    assert (samples[sample].sample_id, place) in places


@pytest.mark.parametrize(
    ("attribute", "told"),
    [
        ("greedy_reward", {"reward.baseline": "greedy", "reward.divide_by_std": False}),
        ("greedy_reward", {"advantage.estimator": "remax"}),
        ("fragment_index", {"reward.unit": "step", "reward.n_samples_per_prompt": 2}),
        ("trajectory_id", {"reward.unit": "step", "reward.n_samples_per_prompt": 2}),
        ("components", {"reward.weights": {"answer": 1.0, "format": 0.5}}),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_that_do_not_agree_on_a_sample_are_found(
    lake: Lake, attribute: str, told: dict[str, Any], rank: int
) -> None:
    others = {"fragment_index": 7, "trajectory_id": "t-7", "greedy_reward": 0.0}

    def change(own: int, one: Sample) -> None:
        if (own, one.sample_id) == (rank, "s-3"):
            parts = {"answer": 0.0, "format": 0.0}
            setattr(one, attribute, parts if attribute == "components" else others[attribute])

    _write(lake, replace(with_changes(PLAIN, told), layout=ZIGZAG), 2, change=change)
    cohort = the_cohort(lake.replay())
    assert cohort.verdict == "diverged"
    column = "reward_components" if attribute == "components" else attribute
    (finding,) = [one for one in cohort.findings if one.check == "copy"]
    assert f"rank 1 holds another {column} than rank 0" in finding.message


@pytest.mark.parametrize("column", TOKENS)
def test_a_column_that_one_rank_lacks_is_no_whole_one(lake: Lake, column: str) -> None:
    def change(rank: int, one: Sample) -> None:
        if rank == 1:
            del one.columns[column]

    _write(lake, replace(with_changes(PLAIN, TOKENS[column]), layout=ZIGZAG), 2, change=change)
    cohort = the_cohort(lake.replay())
    assert cohort.verdict == "refused"
    assert column in refusals(cohort)


BATCHES: dict[str, Any] = {
    "loss.aggregation": "token-mean",
    "loss.mean_over": "micro-batch",
    "loss.batch_reduction": "mean",
}


@given(
    st.lists(st.tuples(st.integers(0, 1), st.integers(0, 1)), min_size=8, max_size=8),
    st.sampled_from(["equal", "rows", "tokens"]),
    st.sampled_from(LAYOUTS),
)
def test_forward_passes_of_one_name_on_other_ranks_are_others(
    places: list[tuple[int, int]], weight: str, layout: LayoutSettings
) -> None:
    """Two halves of four ranks run passes of the same names, and rows say which shard they are."""
    settings = with_changes(PLAIN, {**BATCHES, "loss.micro_batch_weight": weight})
    samples = _samples(0)
    halves: dict[int, list[Sample]] = {0: [], 1: []}
    for one, (half, batch) in zip(samples, places, strict=True):
        one.micro_batch_id = f"mb-{batch}"
        halves[half].append(one)
    ranks = {half: own for half, own in halves.items() if own}
    trainer = ComposedTrainer(settings, ranks)  # whose ranks name their passes by themselves
    trainer.score()
    trainer.estimate()
    terms = [trainer.policy_terms(row) for row in range(len(samples))]
    rows = list(range(len(samples)))
    values = {
        name: float(np.float32(trainer.scalar("loss.policy", name, terms, rows)))
        for name in terms[0]
    }
    shares: dict[int, list[Sample]] = {rank: [] for rank in range(4)}
    for half, own in halves.items():
        for shard in (0, 1):
            for one, mine in zip(own, _held(own, layout, shard, 2), strict=True):
                part = _part(one, mine)
                part.context = (shard, 2)
                shares[2 * half + shard].append(part)
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake.create(Path(folder) / "lake")
        capture(
            lake,
            shares,
            WAY,
            step_id=0,
            stages=("sample", "loss.policy"),
            columns=COLUMNS,
            settings=replace(settings, layout=layout),
            expected={0: [Expected(values, {"scope": "global", "reduction": "mean"})]},
            cohort_size=len(samples),
        )
        cohort = the_cohort(lake.replay())
    assert cohort.verdict in ("pass", "precision"), cohort.to_json()


MEANS: dict[str, Any] = {"loss.aggregation": "token-mean", "loss.batch_reduction": "mean"}


def _means(
    lake: Lake,
    layout: LayoutSettings,
    size: int,
    seed: int,
    over: str,
    *,
    whole: bool = False,
    off: float = 0.0,
) -> None:
    """Context-parallel ranks that each record a mean of their shards, over all tokens or own."""
    settings = replace(with_changes(PLAIN, MEANS), layout=layout)
    samples = _samples(seed)
    if whole:
        for one in samples:
            one.mask = [1] * one.length
    trainer = ComposedTrainer(settings, {0: samples})
    trainer.score()
    trainer.estimate()
    terms = [trainer.policy_terms(row) for row in range(len(samples))]
    every = sum(map(sum, trainer.counted))
    shares, expected = {}, {}
    for rank in range(size):
        held = _held(samples, layout, rank, size)
        shares[rank] = [_part(one, mine) for one, mine in zip(samples, held, strict=True)]
        own = sum(mask[t] for mask, mine in zip(trainer.counted, held, strict=True) for t in mine)
        divided = every if over == "all" else own
        sums = {
            name: sum(
                mask[t] * row[name][t]
                for mask, row, mine in zip(trainer.summed, terms, held, strict=True)
                for t in mine
            )
            for name in terms[0]
        }
        sums["loss"] += off * divided
        values = {name: float(np.float32(one / (divided or 1.0))) for name, one in sums.items()}
        meaning: dict[str, Any] = {"scope": "rank", "reduction": "mean"}
        if over != "nothing said" and divided:
            meaning["denominator"] = float(divided)
        expected[rank] = [Expected(values, meaning)]
    capture(
        lake,
        shares,
        WAY,
        step_id=0,
        stages=("sample", "loss.policy"),
        columns=COLUMNS,
        settings=settings,
        expected=expected,
        parallel={r: ParallelCoordinates(context_rank=r, context_size=size) for r in range(size)},
        versions={"log_probs": CURRENT},
    )


@given(
    st.sampled_from(LAYOUTS),
    st.sampled_from([2, 4]),
    st.integers(0, 99),
    st.sampled_from(["all", "own"]),
    st.booleans(),
)
def test_means_of_shards_are_over_what_they_say(
    layout: LayoutSettings, size: int, seed: int, over: str, whole: bool
) -> None:
    for off, verdicts in ((0.0, ("pass", "precision")), (1e-3, ("diverged",))):
        with tempfile.TemporaryDirectory() as folder:
            lake = Lake.create(Path(folder) / "lake")
            _means(lake, layout, size, seed, over, whole=whole, off=off)
            found = the_stage(the_cohort(lake.replay()), "loss.policy")
        assert found.verdict in verdicts, found


def test_a_mean_over_tokens_of_a_shard_that_says_nothing_is_left_out(lake: Lake) -> None:
    _means(lake, ZIGZAG, 2, 0, "nothing said")
    cohort = the_cohort(lake.replay())
    assert (the_stage(cohort, "loss.policy").verdict, cohort.verdict) == ("unverified",) * 2
    assert "shards.unstated" in {one.check for one in cohort.findings}


@pytest.mark.parametrize(
    ("told", "stage"),
    [
        ({"reward.grouping": "stride"}, "reward.post_process"),
        ({"advantage.whiten": "rank"}, ESTIMATE),
    ],
)
def test_samples_of_several_ranks_are_of_no_rank(
    lake: Lake, told: dict[str, Any], stage: str
) -> None:
    samples = _samples(0)
    for one in samples:
        one.context = (0, 1)
    settings = with_changes(PLAIN, told)
    capture(lake, {0: samples}, WAY, step_id=0, stages=(stage,), columns=COLUMNS, settings=settings)
    text = refusals(the_cohort(lake.replay()))
    assert f"{next(iter(told))} is" in text
    assert "rows say which shard of their sample they are" in text


def test_a_likelihood_over_whole_samples_is_refused_of_shards(lake: Lake) -> None:
    changes, _ = CHANGES["likelihood of good samples"]
    _write(lake, replace(with_changes(PLAIN, changes), layout=ZIGZAG), 2)
    found = the_stage(the_cohort(lake.replay()), "loss.policy")
    assert (found.verdict, found.capability) == ("refused", "unsupported")
    assert "loss.nll_coef" in found.message


@pytest.mark.parametrize("wrong", [False, True])
@pytest.mark.parametrize("stated", ["of all", "of its own"])
@pytest.mark.parametrize("empty", [0, 1, 3])
def test_a_mean_over_tokens_whose_empty_samples_count_as_one_is_put_together(
    lake: Lake, empty: int, stated: str, wrong: bool
) -> None:
    """The token count of slime, over every sample as if each had a token."""
    means = {"loss.aggregation": "token-mean", "loss.batch_reduction": "mean"}
    told = replace(with_changes(PLAIN, means | {"loss.token_count": "at-least-one"}), layout=ZIGZAG)
    trained = with_changes(told, {"loss.token_count": "trained"}) if wrong else told
    samples = _samples(3)
    for one in samples[:empty]:
        one.mask = [0] * len(one.mask)
    trainer = ComposedTrainer(trained, {0: samples})
    trainer.score()
    trainer.estimate()
    least = 0 if wrong else 1
    whole = sum(max(sum(one.mask), least) for one in samples)
    shares, expected, counts = {}, {}, []
    for rank in range(2):
        held = _held(samples, ZIGZAG, rank, 2)
        own = sum(
            max(sum(one.mask[t] for t in mine), least)
            for one, mine in zip(samples, held, strict=True)
        )
        counts.append(own)
        divisor = whole if stated == "of all" else own
        values: dict[str, float] = {}
        for row, mine in enumerate(held):
            for name, tokens in trainer.policy_terms(row).items():
                part = sum(trainer.summed[row][t] * tokens[t] for t in mine)
                values[name] = values.get(name, 0.0) + part / divisor
        meaning = {"scope": "rank", "reduction": "mean", "denominator": divisor}
        expected[rank] = [Expected(values, meaning)]
        shares[rank] = [_part(one, mine) for one, mine in zip(samples, held, strict=True)]
    capture(
        lake,
        shares,
        WAY,
        step_id=0,
        stages=["sample", "loss.policy"],
        columns=COLUMNS,
        settings=told,
        expected=expected,
        parallel={r: ParallelCoordinates(context_rank=r, context_size=2) for r in range(2)},
        versions={"log_probs": CURRENT},
    )
    found = the_stage(the_cohort(lake.replay()), "loss.policy")
    exact = sum(max(sum(one.mask), 1) for one in samples)
    right = (whole if stated == "of all" else sum(counts)) == exact
    assert found.verdict in (("pass", "precision") if right else ("unverified",)), found.message
