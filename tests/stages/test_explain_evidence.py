"""Evidence: what any recorded values would fit is no explanation of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.cohorts import Expected, rank_sums
from tests.helpers.scenes import WAY, drawn, halves, write_rollout, write_whole
from tests.helpers.trainer import Sample, Trainer
from trajreplay import Lake
from trajreplay.query import Cohort
from trajreplay.schema import Settings
from trajreplay.schema.settings import with_changes
from trajreplay.stages.explain.handoffs import explain_column
from trajreplay.stages.faults import FAULTS, Fault
from trajreplay.stages.faults.catalogue import fault_named
from trajreplay.stages.faults.fault import Handed

ESTIMATED = ("sample", "reward.raw", "reward.post_process", "advantage.estimate")


def _named(lake: Lake, stage: str) -> list[str]:
    found = [one for one in lake.explain().explanations if one.stage == stage and not one.warns]
    assert found
    return [name for one in found for each in one.hypotheses for name in each.faults]


@pytest.mark.parametrize(
    "change",
    [
        lambda one: one.clamp(min=-0.6),
        lambda one: torch.where(one > 0, one * 0.5, one),
        lambda one: torch.where(one < 0, one * 0.5, one),
        torch.abs,
    ],
)
def test_rows_of_one_number_are_no_penalty_that_was_written_to_them(
    lake: Lake, change: Callable[[Tensor], Tensor]
) -> None:
    """Samples of equal rewards share the number that any mistake makes of these."""
    samples = drawn()
    for row, one in enumerate(samples):
        one.raw_reward = float(row % 4 < 2)
    Trainer(WAY).score(samples)
    Trainer(WAY).estimate(samples)
    for one in samples:
        one.columns["advantages"] = change(one.columns["advantages"])
    write_rollout(lake, samples, WAY, settings=WAY.full, stages=ESTIMATED)
    assert "advantage.broadcast-view" not in _named(lake, "advantage.estimate")


def _of_scores(origin: Tensor, recorded: Tensor) -> list[tuple[str, ...]]:
    count = len(origin)
    given = Handed(
        "raw_reward",
        recorded.double(),
        origin.double(),
        torch.arange(count + 1),
        torch.ones(count, dtype=torch.bool),
        {},
        {},
    )
    found = explain_column(given, "reward.raw", Cohort("r", 0, 0, None), FAULTS)
    return [one.faults for one in found.hypotheses]


def test_a_score_of_0_was_read_as_none_where_one_number_stands_for_all_of_them() -> None:
    origin = torch.tensor([0.0, 0.75, 0.0, 0.5])
    one = torch.where(origin == 0, 0.25, origin)
    assert _of_scores(origin, one) == [("raw.zero-as-missing",)]
    assert not _of_scores(origin, torch.tensor([0.25, 0.75, 0.35, 0.5]))
    assert not _of_scores(torch.zeros(16), torch.full((16,), 0.25))
    assert not _of_scores(torch.zeros(16), torch.rand(16) + 0.1)


def _handed(origin: list[float], recorded: list[float]) -> list[tuple[str, ...]]:
    given = Handed(
        "reward",
        torch.tensor(recorded).double(),
        torch.tensor(origin).double(),
        torch.arange(len(origin) + 1),
        torch.ones(len(origin), dtype=torch.bool),
        {},
        {},
    )
    found = explain_column(given, "sample", Cohort("r", 0, 0, 0), FAULTS)
    return [one.faults for one in found.hypotheses]


def test_a_value_that_others_have_too_is_no_permutation() -> None:
    """Of rewards of 0 and 1 whatever is recorded is another sample's."""
    assert not _handed([0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0])
    assert ("handoff.permuted",) in _handed([0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 0.0, 0.0])
    assert ("handoff.permuted",) in _handed([0.1, 0.2, 0.3, 0.4], [0.2, 0.3, 0.1, 0.4])


@pytest.mark.parametrize(("whole", "ranks", "named"), [(2, 1, True), (97, 1, False), (97, 2, True)])
def test_a_factor_that_nothing_counts_has_to_be_shared(
    lake: Lake, whole: int, ranks: int, named: bool
) -> None:
    samples = drawn()
    shares = halves(samples) if ranks > 1 else {0: samples}
    write_whole(lake, shares, expected=_losses(samples, ranks, lambda one: one * whole))
    assert ("loss.factor" in _named(lake, "loss.policy")) == named


def _losses(samples: list[Sample], ranks: int, change: Callable[[float], float]) -> dict[int, list]:  # type: ignore[type-arg]
    shares = halves(samples) if ranks > 1 else {0: samples}
    found = rank_sums(Trainer(WAY), shares)
    return {
        rank: [Expected({**one.values, "loss": change(one.values["loss"])}, one.meaning)]
        for rank, (one,) in found.items()
    }


def test_one_loss_is_no_evidence_of_a_coefficient(lake: Lake) -> None:
    """It has some coefficient, whatever it is."""
    samples = drawn()
    shares = {0: samples}
    write_whole(lake, shares, expected=_losses(samples, 1, lambda one: one * 1.137 + 0.01))
    assert "loss.entropy-coefficient" not in _named(lake, "loss.policy")


def test_a_coefficient_that_gives_more_losses_than_it_was_solved_for_is_named(lake: Lake) -> None:
    shares = halves(drawn())
    expected = rank_sums(Trainer(replace(WAY, entropy_coef=0.01731)), shares)
    write_whole(lake, shares, expected=expected)
    assert "loss.entropy-coefficient" in _named(lake, "loss.policy")


def test_a_factor_of_a_metric_is_none_of_the_loss(lake: Lake) -> None:
    samples = drawn()
    expected = rank_sums(Trainer(WAY), halves(samples))
    doubled = {
        rank: [replace(one, values={**one.values, "entropy_loss": 2 * one.values["entropy_loss"]})]
        for rank, (one,) in expected.items()
    }
    write_whole(lake, samples, expected=doubled)
    (found,) = [one for one in lake.explain().explanations if one.stage == "loss.policy"]
    assert found.first is not None
    assert found.first.faults == ("loss.factor",)
    assert found.first.sentence.startswith("the loss with entropy_loss alone times 2")


def test_of_two_terms_only_the_one_whose_mean_is_another_is_named() -> None:
    """Words claim what a variant changes, and nothing beside it."""
    terms = {"loss.entropy_coef": 0.1, "loss.kl_loss_coef": 0.1, "loss.use_kl_loss": True}
    stated = {**terms, "loss.entropy_aggregation": "token-mean", "loss.entropy_mean_over": "scope"}
    for name in ("loss.terms-aggregation", "loss.mean-over"):
        said = list(fault_named(name).tries(_Stated(with_changes(WAY.full, stated))))  # type: ignore[arg-type, misc]
        assert said
        for one in said:
            assert ("entropy" in one.detail) == any(
                ".entropy_" in key for key in one.variant.settings
            )
            assert ("KL" in one.detail) == any(".kl_loss_" in key for key in one.variant.settings)
        assert len({repr(sorted(one.variant.settings.items())) for one in said}) == len(said)


@dataclass(frozen=True)
class _Stated:
    """What these faults read of a cohort."""

    settings: Settings


@pytest.mark.parametrize(
    "made", [3, (), ("values", "words"), (torch.ones(2), 4), (torch.ones(2), "words", "one")]
)
def test_what_is_handed_in_another_form_is_said_and_ends_nothing(made: Any) -> None:
    given = Handed(
        "reward",
        torch.ones(2).double(),
        torch.zeros(2).double(),
        torch.arange(3),
        torch.ones(2, dtype=torch.bool),
        {},
        {},
    )
    fault = Fault("acme.one", "acme", "sample", "{}", "acme.py", hands=lambda given: [made])
    found = explain_column(given, "sample", Cohort("r", 0, 0, 0), [fault])
    assert not found.hypotheses
    assert found.failed == [
        f"the fault acme.one gives a {type(made).__name__}, expected values and words"
    ]
