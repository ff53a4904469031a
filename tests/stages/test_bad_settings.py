"""Settings that cannot be in force, and captures that lack what they ask for: refused by name."""

import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.helpers.cohorts import capture
from tests.helpers.composed import ComposedTrainer
from tests.helpers.composed_corrections import CURRENT
from tests.helpers.scenes import WAY, the_cohort
from tests.helpers.trainer import Sample
from tests.stages.test_composed import CHANGES, COLUMNS, PLAIN, STAGES, _shares
from trajreplay import Lake, ParallelCoordinates, SchemaError, Settings, with_changes
from trajreplay.schema.settings import SECTIONS
from trajreplay.schema.settings.knobs import Kind, kinds
from trajreplay.schema.settings.loss import SURROGATES
from trajreplay.stages import CohortReport
from trajreplay.stages.capability import ability

COMPUTED = STAGES[2:]
STAGE_OF = {
    "reward": "reward.post_process",
    "kl": "advantage.kl",
    "advantage": "advantage.estimate",
    "loss": "loss.policy",
    "value": "loss.value",
}
KINDS = {
    (section, name): kind for section in STAGE_OF for name, kind in kinds(SECTIONS[section]).items()
}
NUMBERS = st.sampled_from([0.0, 1.0, -1.0, 0.5, 2.0, 1e-30, 1e30, -3e38])
ENDS = st.sampled_from([-float("inf"), -1.0, 0.0, 0.5, 1.0, 2.0, float("inf"), float("nan")])
INTERVALS = st.tuples(ENDS, ENDS).filter(lambda pair: pair[0] <= pair[1])
# The name of a setting as a message has it.
NAMED = re.compile(r"\b(reward|kl|advantage|loss|value|layout)\.[a-z]\w+")


def _values(kind: Kind) -> st.SearchStrategy[Any]:
    named = st.sampled_from(kind.known or ("a", "b"))
    found: st.SearchStrategy[Any] = {
        "name": named,
        "flag": st.booleans(),
        "number": NUMBERS,
        "count": st.integers(0, 5),
        "interval": INTERVALS,
        "weights": st.dictionaries(named, NUMBERS, max_size=2),
        "intervals": st.dictionaries(named, INTERVALS, max_size=3),
        "names": st.lists(named, max_size=2).map(tuple),
    }[kind.what]
    return st.none() | found if kind.optional else found


@st.composite
def changes(draw: st.DrawFn, most: int = 6) -> dict[str, Any]:
    """Some settings that are others, of any legal value, whether they go together or not."""
    chosen = draw(st.sets(st.sampled_from(sorted(KINDS)), min_size=1, max_size=most))
    return {f"{one}.{name}": draw(_values(KINDS[one, name])) for one, name in sorted(chosen)}


@pytest.mark.parametrize(
    ("section", "name"), [place for place, kind in KINDS.items() if kind.known]
)
def test_a_value_that_no_kernel_goes_by_is_unsupported_by_name(section: str, name: str) -> None:
    kind = KINDS[section, name]
    odd: Any = {"weights": {"odd": 1.0}, "intervals": {"odd": (0.0, 1.0)}}.get(kind.what, "odd")
    settings = with_changes(Settings(), {f"{section}.{name}": odd})
    found = ability(STAGE_OF[section], settings, ParallelCoordinates())
    assert found.capability == "unsupported"
    assert f"{section}.{name}" in found.reason
    assert "'odd'" in found.reason


def _settings(changed: dict[str, Any]) -> Settings:
    """The plain settings so changed; what no setting holds is no example, and refused by name."""
    try:
        return with_changes(PLAIN, changed)
    except SchemaError as error:
        assume(not any(name.partition(".")[2] in error.message for name in changed))
        raise


@given(changes())
def test_what_is_not_recomputed_says_which_setting_is_why(changed: dict[str, Any]) -> None:
    settings = _settings(changed)
    for stage in COMPUTED:
        for held in ((), COLUMNS):
            found = ability(stage, settings, ParallelCoordinates(), held)
            if found.capability != "recompute":
                assert NAMED.search(found.reason), found.reason


def _written(
    lake: Lake, made: Settings, told: Settings, shares: dict[int, list[Sample]]
) -> CohortReport:
    """The replay of a training that computes one thing and tells another."""
    trainer = ComposedTrainer(made, shares)
    policy, value = trainer.policy_scalars(), trainer.value_scalars()
    capture(
        lake,
        shares,
        WAY,
        step_id=0,
        stages=STAGES,
        columns=COLUMNS,
        settings=told,
        expected={rank: [*policy[rank], *value[rank]] for rank in shares},
        versions={"log_probs": CURRENT},
    )
    return the_cohort(lake.replay())


def _estimated(settings: Settings) -> dict[int, list[Sample]]:
    shares = _shares()
    trainer = ComposedTrainer(settings, shares)
    trainer.score()
    trainer.estimate()
    return shares


@given(changes())
def test_any_settings_are_judged_or_refused_and_never_break(changed: dict[str, Any]) -> None:
    """A training of the plain settings that tells others passes only where these are the same."""
    told = _settings(changed)
    if told.reward.weights or told.loss.batch_reduction != "sum":
        return  # components and means are recorded otherwise
    with tempfile.TemporaryDirectory() as folder:
        cohort = _written(Lake.create(Path(folder) / "lake"), PLAIN, told, _estimated(PLAIN))
    for one in cohort.stages:
        if one.verdict == "refused":
            assert not one.compared
            assert NAMED.search(one.message) or "expected" in one.message, one.message
        if one.verdict == "pass":
            assert one.compared


READS = [
    (name, column)
    for name, (changed, _) in CHANGES.items()
    for column in sorted(
        {
            column
            for stage in COMPUTED
            for column in ability(
                stage,
                with_changes(PLAIN, changed),
                ParallelCoordinates(),
                (*COLUMNS, "micro_batch_id"),
            ).reads
        }
    )
]
# Fields of records that go by other names than their columns.
FIELDS = {"group_id": "group", "reward_components": "components"}


@given(st.sampled_from(READS))
def test_a_column_that_settings_read_and_the_capture_lacks_is_named(read: tuple[str, str]) -> None:
    name, column = read
    settings = with_changes(PLAIN, CHANGES[name][0])
    if settings.reward.weights:
        return  # held by test_components.py
    shares = _estimated(settings)
    for one in (one for own in shares.values() for one in own):
        one.columns.pop(column, None)
        if column == "old_values":  # without them a critic's only values are those of before
            one.columns.pop("values")
        field = FIELDS.get(column, column)
        if hasattr(one, field):
            setattr(one, field, None)
    without = _shares_for_scalars(settings)
    with tempfile.TemporaryDirectory() as folder:
        lake = Lake.create(Path(folder) / "lake")
        capture(
            lake,
            shares,
            WAY,
            step_id=0,
            stages=STAGES,
            columns=COLUMNS,
            settings=settings,
            expected=without,
            versions={"log_probs": CURRENT},
        )
        cohort = the_cohort(lake.replay())
    needing = [
        stage
        for stage in COMPUTED
        if column
        in ability(stage, settings, ParallelCoordinates(), (*COLUMNS, "micro_batch_id")).reads
    ]
    assert cohort.verdict not in ("pass", "precision")
    for found in (one for one in cohort.stages if one.stage in needing):
        by_batch = column == "micro_batch_id" and found.verdict == "unverified"
        assert found.verdict == "refused" or by_batch, (found.stage, found.verdict)
        assert not found.compared
        assert column.removeprefix("old_") in found.message or "micro-batch" in found.message


def _shares_for_scalars(settings: Settings) -> Any:
    trainer = ComposedTrainer(settings, _estimated(settings))
    policy, value = trainer.policy_scalars(), trainer.value_scalars()
    return {rank: [*policy[rank], *value[rank]] for rank in policy}


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"loss.dual_clip": 0.5}, "loss.dual_clip is 0.5, expected more than 1"),
        ({"loss.dual_clip": 1.0}, "loss.dual_clip is 1, expected more than 1"),
        ({"loss.surrogate": "m2po", "loss.m2po_kl2_budget": 0.0}, "m2po_kl2_budget is 0"),
        ({"loss.surrogate": "kl-cov", "loss.kl_cov_fraction": 0.0}, "kl_cov_fraction is 0"),
        ({"loss.surrogate": "kl-cov", "loss.kl_cov_fraction": -3.0}, "kl_cov_fraction is -3"),
        ({"loss.surrogate": "kl-cov", "loss.kl_cov_fraction": 1.5}, "kl_cov_fraction is 1.5"),
        ({"loss.surrogate": "gmpo", "loss.fragments": "shared"}, "loss.fragments are 'shared'"),
        ({"advantage.whiten": "cohort", "advantage.whiten_epsilon": -1.0}, "whiten_epsilon is -1"),
        ({"advantage.estimator": "remax", "reward.baseline": "greedy"}, "off twice"),
    ],
)
def test_what_no_kernel_goes_by_is_unsupported_before_it_is_asked(
    changed: dict[str, Any], named: str
) -> None:
    stage = STAGE_OF[next(iter(changed)).partition(".")[0]]
    held = (*COLUMNS, "micro_batch_id")
    found = ability(stage, with_changes(PLAIN, changed), ParallelCoordinates(), held)
    assert (found.capability, named in found.reason) == ("unsupported", True), found.reason


@pytest.mark.parametrize(
    ("context", "multiple", "size", "fits"),
    [
        ("zigzag", 3, 2, False),
        ("zigzag", 4, 2, True),
        ("zigzag", 6, 2, False),
        ("contiguous", 3, 2, False),
        ("contiguous", 6, 2, True),
        ("all-gather", 3, 2, False),
        ("zigzag", 3, 1, True),
        ("whole", 3, 2, True),
    ],
)
def test_sequences_are_padded_to_what_can_be_cut(
    context: str, multiple: int, size: int, *, fits: bool
) -> None:
    layout = {"layout.context": context, "layout.context_multiple": multiple}
    place = ParallelCoordinates(context_size=size)
    found = ability("advantage.kl", with_changes(PLAIN, layout), place, COLUMNS)
    assert (found.capability == "recompute") == fits
    assert fits or f"layout.context_multiple is {multiple}" in found.reason


@pytest.mark.parametrize("changed", [{"loss.ratio": "one"}, {"loss.surrogate": "reinforce"}])
@pytest.mark.parametrize("weight", ["old", "rollout", "ratio"])
def test_the_weight_of_a_kl_that_is_not_there_asks_for_nothing(
    changed: dict[str, Any], weight: str
) -> None:
    weighted = {"loss.kl_loss_weighted": True, "loss.kl_loss_weight": weight}
    found = ability(
        "loss.policy", with_changes(Settings(), {**changed, **weighted}), ParallelCoordinates()
    )
    assert (found.capability, found.reads) == ("recompute", ("log_probs", "advantages"))


def test_means_of_terms_over_micro_batches_ask_for_these_where_there_are_terms() -> None:
    changed: dict[str, Any] = {
        "loss.kl_loss_mean_over": "micro-batch",
        "loss.entropy_mean_over": "micro-batch",
        "loss.batch_reduction": "mean",
    }

    def asked(more: dict[str, Any], columns: tuple[str, ...] = ()) -> str:
        settings = with_changes(Settings(), {**changed, **more})
        return ability("loss.policy", settings, ParallelCoordinates(), columns).capability

    assert asked({}) == "recompute"
    assert asked({"loss.kl_loss_coef": 0.1}) == "inspect-only"
    assert asked({"loss.entropy_coef": 0.1}) == "inspect-only"
    assert asked({}, ("entropy",)) == "recompute"  # without a mean of the entropy


# What the data of a training, and no setting, may still be refused for.
OF_DATA = re.compile("too few tokens that count|another raw reward|fewer than two|alone in")


@given(changes(most=3), st.sampled_from([{}, *({"loss.surrogate": one} for one in SURROGATES)]))
def test_what_can_be_recomputed_is_not_refused_by_a_kernel(
    changed: dict[str, Any], surrogate: dict[str, Any]
) -> None:
    told = _settings({**surrogate, **changed})
    if told.reward.weights or told.loss.batch_reduction != "sum":
        return  # components and means are recorded otherwise
    with tempfile.TemporaryDirectory() as folder:
        cohort = _written(Lake.create(Path(folder) / "lake"), PLAIN, told, _estimated(PLAIN))
    for one in cohort.stages:
        if one.stage in COMPUTED and one.verdict == "refused":
            found = ability(one.stage, told, ParallelCoordinates(), (*COLUMNS, "micro_batch_id"))
            assert found.capability != "recompute" or OF_DATA.search(one.message), one
