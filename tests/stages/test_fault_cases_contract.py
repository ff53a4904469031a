"""Real faults that show before any arithmetic, with their numbers: each is found and named."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.cohorts import Expected, capture
from tests.helpers.scenes import WAY
from tests.helpers.trainer import Sample
from tests.stages import test_explain
from tests.stages.test_fault_cases import FILE, SIDES
from trajreplay import CaptureError, Lake, Settings, with_changes
from trajreplay.schema import SampleRecord
from trajreplay.stages.explain import Explained
from trajreplay.stages.gate.of_mismatch import first_alarm

CASES = {one["id"]: one for one in json.loads(FILE.read_text())}
SAMPLE = ("sample",)
REWARDS = ("sample", "reward.raw", "reward.post_process")


@dataclass
class Scene:
    """What is captured of one side of a case: the samples of each rank, and what is said of them.

    Args:
        shares: The samples.
        stages: Declared stages.
        settings: Changes to plain settings.
        expected: Recorded scalars.
        options: More, for the capture.
        spans: Weight versions of each sample.
        origins: Temperature and weights of columns.
    """

    shares: dict[int, list[Sample]]
    stages: Sequence[str] = SAMPLE
    settings: dict[str, Any] = field(default_factory=dict)
    expected: dict[int, list[Expected]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    spans: list[list[tuple[int, int, int]]] | None = None
    origins: dict[str, dict[str, Any]] = field(default_factory=dict)


def _sample(number: int, mask: Sequence[int], raw: float = 0.0, **columns: Any) -> Sample:
    one = Sample(f"s-{number}", "g-0", list(mask), raw, reward=raw)
    one.columns = {
        name: torch.as_tensor(np.asarray(values, np.float32)) for name, values in columns.items()
    }
    return one


def _write(lake: Lake, scene: Scene) -> Explained:
    """Capture a scene, and what is found of it."""
    settings = with_changes(Settings(), scene.settings)
    if scene.spans is None and not scene.origins:
        names = sorted({name for own in scene.shares.values() for s in own for name in s.columns})
        options: dict[str, Any] = {"step_id": 0, **scene.options}
        capture(
            lake,
            scene.shares,
            WAY,
            settings=settings,
            stages=scene.stages,
            columns=names,
            expected=scene.expected,
            **options,
        )
        return lake.explain()
    (samples,) = scene.shares.values()
    with lake.capture(
        run_id="r",
        rank=0,
        expected_ranks=[0],
        settings=settings,
        stages=scene.stages,
        **{"rollout_id": 0, "step_id": None, **scene.options},
    ) as builder:
        spans: Sequence[Any] = scene.spans or [None] * len(samples)
        builder.samples(
            [
                SampleRecord(
                    sample_id=one.sample_id,
                    group_id=one.group,
                    response_length=one.length,
                    total_length=one.length + 3,
                    loss_mask=one.mask,
                    weight_versions=span,
                )
                for one, span in zip(samples, spans, strict=True)
            ],
            reward_dtype="float32",
        )
        for name in samples[0].columns:
            told = scene.origins.get(name, {})
            builder.tensor(name, [one.columns[name] for one in samples], **told)
    return lake.explain()


def _k008(side: str) -> Scene:
    """A group of one task reward is not trained on; a shaped one always varies."""
    inputs = CASES["K-008"]["inputs"]
    raw = np.array(inputs["raw_reward"])
    shaped = raw + np.array(inputs["length_penalty"]) if side == "wrong" else raw
    assert shaped.std(ddof=1) == pytest.approx(CASES["K-008"][side]["std_used"])
    used = (shaped - shaped.mean()) / (shaped.std(ddof=1) + 1e-6)
    samples = [_sample(row, [1], float(one)) for row, one in enumerate(raw)]
    for one, reward in zip(samples, used, strict=True):
        one.reward = float(np.float32(reward))
    size = {"reward.n_samples_per_prompt": 4}
    return Scene({0: samples}, settings=size, options={"step_id": None})


def _k010(side: str) -> Scene:
    """Three of four are scored as if they were all; a group that is not whole is not trained on."""
    case = CASES["K-010"]
    inputs = case["inputs"]
    kept = [row for row in range(4) if side == "right" or row not in inputs["empty_rollouts"]]
    rewards = np.array([inputs["rewards"][row] for row in kept])
    used = rewards - rewards.mean()
    if side == "wrong":
        assert used.tolist() == pytest.approx(case["wrong"]["advantage"])
    samples = [_sample(row, [1], inputs["rewards"][row]) for row in kept]
    for one, reward in zip(samples, used, strict=True):
        one.reward = float(np.float32(reward))
    size = case["config"]["rollouts_per_example"]
    changes = {"reward.n_samples_per_prompt": size, "reward.divide_by_std": False}
    return Scene({0: samples}, REWARDS, changes, options={"step_id": None})


def _k013(side: str) -> Scene:
    """Assistant tokens of the prompt are trained on, and have no log-prob of the sampler."""
    case = CASES["K-013"]
    generated = case["inputs"]["segment_tokens"][-1]
    history = sum(case["wrong"]["loss_mask"]) - generated
    mask = case[side]["loss_mask"][4:]  # what follows the first user message is the response
    sampled = [0.0] * (len(mask) - generated) + [-0.5, -1.25, -0.75, -2.0]
    trained = [-0.9] * (len(mask) - generated) + sampled[-generated:]
    assert sum(mask) == generated + (history if side == "wrong" else 0)
    return Scene({0: [_sample(0, mask, rollout_log_probs=sampled, old_log_probs=trained)]})


def _k014(side: str) -> Scene:
    """Rewards of the whole batch beside the samples of a rank: its own are others."""
    inputs = CASES["K-014"]["inputs"]
    batch, local = inputs["raw_reward_whole_batch"], CASES["K-014"]["config"]["partition"]
    lengths = [5, 5, *inputs["response_lengths_local"]]
    rows = {0: [0, 1], 1: local}
    shares = {
        rank: [_sample(row, [1] * lengths[row], batch[row]) for row in own]
        for rank, own in rows.items()
    }
    beside = {
        rank: batch[:2] if side == "wrong" else [batch[row] for row in own]
        for rank, own in rows.items()
    }
    correct = [n for n, one in zip(lengths[2:], beside[1], strict=True) if one == 1.0]
    assert np.mean(correct) == CASES["K-014"][side]["mean_length_of_correct"]
    expected = {
        rank: [Expected({"raw_rewards": values}, {"scope": "sample"}, "reward.raw")]
        for rank, values in beside.items()
    }
    return Scene(shares, REWARDS[:2], expected=expected)


def _k016(side: str) -> Scene:
    """Sixteen times 0.1: the residue of float32 over epsilon is no reward."""
    case = CASES["K-016"]
    reward = case[side]["advantage" if side == "right" else "advantage_eps1e-8"]
    samples = [_sample(row, [1], one) for row, one in enumerate(case["inputs"]["rewards"])]
    for one in samples:
        one.reward = reward
    changes = {"reward.epsilon": 1e-8, "reward.n_samples_per_prompt": 16}
    return Scene({0: samples}, settings=changes, options={"step_id": None})


def _k022(side: str) -> Scene:
    case = CASES["K-022"]
    samples = [_sample(0, [1], case[side]["score"]), _sample(1, [1], 0.75)]
    replies = [case["inputs"]["reply"]["scores"], 0.75]
    reply = Expected({"raw_rewards": replies}, {"scope": "sample"}, "reward.raw")
    return Scene({0: samples}, REWARDS[:2], expected={0: [reply]})


def _k031(side: str) -> Scene:
    """One side before the temperature, the other one after it; both say so."""
    case = CASES["K-031"]
    sampled, trained = case[side]["rollout_logp"], case[side]["trainer_logp"]
    sample = _sample(0, [1], rollout_log_probs=[sampled], old_log_probs=[trained])
    given = case["config"]["temperature"]
    logits = torch.tensor(case["inputs"]["logits"])
    for value, temperature in ((sampled, given if side == "right" else 1.0), (trained, given)):
        exact = torch.log_softmax(logits / temperature, 0)[case["inputs"]["token"]]
        assert value == pytest.approx(float(exact), abs=1e-3)
    origins = {
        "rollout_log_probs": {"temperature": given if side == "right" else 1.0},
        "old_log_probs": {"temperature": given},
    }
    told = {name: {"source": "trainer", **one} for name, one in origins.items()}
    return Scene({0: [sample]}, origins=told)


def _of_distributions(seed: int, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Further distributions beside that of a case, and a token of each."""
    numbers = torch.Generator().manual_seed(seed)
    spread = 2.0 * torch.randn((120, len(logits)), generator=numbers)
    rows = torch.cat([logits[None], spread])
    tokens = torch.multinomial(torch.softmax(rows, 1), 1, generator=numbers).squeeze(1)
    return rows, tokens


def _k034(side: str) -> Scene:
    """The first entry of the engine's dictionary is the likeliest token's."""
    case = CASES["K-034"]
    returned = dict(map(tuple, case["inputs"]["returned"]))
    rows, tokens = _of_distributions(34, torch.randn(8, generator=torch.manual_seed(0)))
    found = torch.log_softmax(rows, 1)
    own = found.gather(1, tokens[:, None]).squeeze(1)
    likeliest = found.max(1).values
    own[0], likeliest[0] = returned[case["inputs"]["sampled_token"]], max(returned.values())
    sampled = own if side == "right" else likeliest
    assert float(sampled[0]) == pytest.approx(case[side]["rollout_logp"])
    sample = _sample(0, [1] * len(own), rollout_log_probs=sampled, old_log_probs=own)
    return Scene({0: [sample]})


def _k035(side: str) -> Scene:
    """The engine's log-probs are of what top-k kept."""
    case = CASES["K-035"]
    kept = case["config"]["top_k"]
    rows, _ = _of_distributions(35, torch.tensor(case["inputs"]["logits"]))
    order = rows.argsort(1, descending=True)
    tokens = torch.where(torch.arange(len(rows)) % 2 == 0, order[:, 1], order[:, 0])
    tokens[0] = case["inputs"]["token"]
    whole = torch.log_softmax(rows, 1).gather(1, tokens[:, None]).squeeze(1)
    top = rows.topk(kept, 1).values
    own = rows.gather(1, tokens[:, None]).squeeze(1) - top.logsumexp(1)
    sampled = whole if side == "right" else own
    assert float(sampled[0]) == pytest.approx(case[side]["rollout_logp"], abs=1e-3)
    sample = _sample(0, [1] * len(rows), rollout_log_probs=sampled, old_log_probs=whole)
    return Scene({0: [sample]})


def _k037(side: str) -> Scene:
    """No sample has an entry for its first token, which the packed ones of the right side have."""
    case = CASES["K-037"]
    numbers = np.random.default_rng(37)
    drawn = [-np.abs(numbers.normal(0.0, 1.0, 7)) - 0.01 for _ in range(8)]
    given = [*(np.array(one) for one in case["inputs"]["logps"]), *drawn]
    right = [np.concatenate([[0.0], one]) for one in given]
    length = sum(map(len, right))
    wrong = np.concatenate([[0.0], *given])
    assert np.concatenate(right[:2]).tolist() == case["right"]["packed_logps"]
    assert wrong[: case["wrong"]["length"]].tolist() == case["wrong"]["packed_logps"]
    cuts = np.cumsum([len(one) for one in right])[:-1]
    late = np.split(np.concatenate([wrong, np.zeros(length - len(wrong))]), cuts)
    # The token of no entry is not trained, on either side.
    return Scene(
        {
            0: [
                _sample(
                    row, [0] + [1] * (len(true) - 1), rollout_log_probs=part, old_log_probs=true
                )
                for row, (part, true) in enumerate(
                    zip(right if side == "right" else late, right, strict=True)
                )
            ]
        }
    )


def _k040(side: str) -> Scene:
    """A re-encoded text has a token more, for which the engine has no log-prob: 0 is none."""
    case = CASES["K-040"]
    if side == "right":
        engine = case["inputs"]["engine_logps"]
        return Scene({0: [_sample(0, [1] * 3, rollout_log_probs=engine, old_log_probs=engine)]})
    old, trained = case["wrong"]["old_logps"], case["inputs"]["trainer_logps_of_reencoded"]
    return Scene({0: [_sample(0, [1] * 4, rollout_log_probs=old, old_log_probs=trained)]})


def _k050(side: str) -> Scene:
    """The logits are in bfloat16, and so is what log_softmax makes of them."""
    case = CASES["K-050"]
    rows, tokens = _of_distributions(50, torch.tensor(case["inputs"]["logits"]))
    tokens[0] = case["inputs"]["token"]
    held = rows.bfloat16() if side == "wrong" else rows
    own = torch.log_softmax(held, 1).gather(1, tokens[:, None]).squeeze(1).float()
    assert float(own[0]) == pytest.approx(case[side]["logp"], abs=4e-3)
    return Scene({0: [_sample(0, [1] * len(rows), old_log_probs=own)]})


def _k053(side: str) -> Scene:
    """A clip fraction that compares what is bounded with the bound is 0 for ever."""
    inputs = CASES["K-053"]["inputs"]
    ratio = np.array(inputs["ratio"] * 10)
    advantages = np.array(inputs["advantage"] * 10)
    old = np.full(len(ratio), -4.0)
    share = CASES["K-053"][side]["clipfrac_lower"]
    sample = _sample(
        0,
        [1] * len(ratio),
        log_probs=old + np.log(ratio),
        old_log_probs=old,
        advantages=advantages,
    )
    scalars = Expected({"pg_clipfrac": share}, {"scope": "rank", "reduction": "sum"})
    return Scene({0: [sample]}, expected={0: [scalars]})


def _k042(side: str) -> Scene:
    """The mean of the ratios themselves, not of what is left of them after the cap."""
    case = CASES["K-042"]
    ratio = np.array(case["inputs"]["ratio"])
    trained = np.full(len(ratio), -4.0)
    sample = _sample(
        0, [1] * len(ratio), rollout_log_probs=trained - np.log(ratio), old_log_probs=trained
    )
    cap = case["config"]["tis_cap"]
    settings = {"loss.correction": "tis", "loss.correction_bounds": (0.0, cap)}
    metrics = {"sampler_ratio_mean": case[side]["mean_ratio"]}
    if side == "right":
        metrics["sampler_ratio_truncated"] = case["right"]["share_truncated"]
    scalars = Expected(metrics, {"scope": "rank", "reduction": "mean"})
    return Scene({0: [sample]}, settings=settings, expected={0: [scalars]})


def _k053_once(side: str) -> Scene:
    """The share of tokens that the dual clip holds, of the three tokens of the case."""
    case = CASES["K-053"]
    ratio = np.array(case["inputs"]["ratio"])
    old = np.full(len(ratio), -4.0)
    advantages = case["inputs"]["advantage"]
    columns = {"log_probs": old + np.log(ratio), "old_log_probs": old, "advantages": advantages}
    sample = _sample(0, [1] * len(ratio), 0.0, **columns)
    values = {"pg_clipfrac_lower": case[side]["clipfrac_lower"]}
    scalars = Expected(values, {"scope": "rank", "reduction": "mean"})
    return Scene({0: [sample]}, settings={"loss.dual_clip": 3.0}, expected={0: [scalars]})


def _k066(side: str) -> Scene:
    """The loss of all, which one of two ranks counts once for each."""
    case = CASES["K-066"]
    loss = case["right"]["policy_loss"]
    meaning = {"scope": "global", "reduction": "mean"}
    flat = [-1.0]
    shares, expected = {}, {}
    for rank, value in enumerate((loss, case[side]["policy_loss"])):
        one = _sample(rank, [1], log_probs=flat, old_log_probs=flat, advantages=[-loss])
        shares[rank] = [one]
        expected[rank] = [Expected({"loss": value, "pg_loss": loss}, meaning)]
    return Scene(shares, settings={"loss.batch_reduction": "mean"}, expected=expected)


def _versions(side: str) -> list[int]:
    case = CASES["K-071"]
    return case["inputs"]["true_versions" if side == "right" else "recorded_versions"]  # type: ignore[no-any-return]


def _k071(side: str) -> Scene:
    """Versions that are 0 for ever are as stale as the trainer is old."""
    case = CASES["K-071"]
    flat = np.full(4, -1.0)
    samples = [
        _sample(row, [1] * 4, rollout_log_probs=flat - row / 8, old_log_probs=flat - row / 8)
        for row in range(3)
    ]
    versions = _versions(side)
    trainer = case["config"]["trainer_version"]
    assert [trainer - one for one in versions] == case[side]["staleness"]
    return Scene(
        {0: samples},
        settings={"sampling.max_staleness": 2},
        options={"rollout_id": 12},
        spans=[[(0, 4, one)] for one in versions],
        origins={"old_log_probs": {"source": "trainer", "weight_version": trainer}},
    )


def _k078(side: str) -> Scene:
    """One response, two versions, where the settings say that no rollout is partial."""
    case = CASES["K-078"]
    versions = case["inputs"]["token_versions"]
    if side == "right":
        versions = [versions[0]] * len(versions)
    first = versions.count(versions[0])
    spans = [(0, first, versions[0])]
    spans += [(first, len(versions), versions[-1])] if first < len(versions) else []
    flat = np.full(len(versions), -1.0)
    sample = _sample(0, [1] * len(versions), rollout_log_probs=flat)
    partial = case["config"]["partial_rollout"]
    return Scene({0: [sample]}, settings={"sampling.partial": partial}, spans=[spans])


# By case: what is captured, the stage at which it is found, and what it is named.
FOUND: dict[str, tuple[Callable[[str], Scene], str, str]] = {
    "K-008": (_k008, "sample", "group.constant"),
    "K-010": (_k010, "reward.post_process", "group.short"),
    "K-013": (_k013, "sample", "log-prob.zero"),
    "K-014": (_k014, "reward.raw", "raw.by-position"),
    "K-016": (_k016, "sample", "group.constant"),
    "K-022": (_k022, "reward.raw", "raw.zero-as-missing"),
    "K-031": (_k031, "sample", "log-prob.temperature"),
    "K-034": (_k034, "sample", "log-prob.most-likely"),
    "K-035": (_k035, "sample", "log-prob.filtered"),
    "K-037": (_k037, "sample", "log-prob.packed-shift"),
    "K-040": (_k040, "sample", "log-prob.zero"),
    "K-050": (_k050, "sample", "log-prob.quantised"),
    "K-042": (_k042, "loss.policy", "metric.disagrees"),
    "K-053": (_k053, "loss.policy", "metric.stuck"),
    "K-053 once": (_k053_once, "loss.policy", "metric.disagrees"),
    "K-066": (_k066, "loss.policy", "rank.factor"),
    "K-071": (_k071, "sample", "weights.stale"),
    "K-078": (_k078, "sample", "weights.mixed"),
}


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", FOUND)
def test_the_right_side_is_silent_and_the_wrong_one_is_named(
    lake: Lake, name: str, side: str
) -> None:
    make, stage, fault = FOUND[name]
    found = _write(lake, make(side))
    if side == "right":
        findings = [finding for cohort in found.report.cohorts for finding in cohort.findings]
        assert [finding for finding in findings if finding.severity == "error"] == []
        assert found.report.verdict in ("pass", "unverified")
        assert found.explanations == []
        return
    first = found.explanations[0]
    assert first.first is not None, first.text
    assert (first.stage, first.first.faults[0]) == (stage, fault), first.text
    assert f"trajreplay faults {fault}" in first.text
    # A replay of the case names its stage, where groups of the wrong size are one of rewards.
    assert CASES[name.split(maxsplit=1)[0]]["stage"] in (
        stage,
        "sample",
        "stats.metric",
        "stats.mismatch",
    )


# Held elsewhere: by the tests that are named.
ELSEWHERE = {
    "K-047": "test_fault_cases_routes.py",
    "K-049": "test_fault_cases_routes.py",
    "K-062": "test_witness.py of the recorder",
    "K-075": "test_ledger.py of the recorder",
    "K-076": "test_ledger.py of the recorder",
    "K-079": "below: refused where it is captured",
}


def test_every_case_is_held() -> None:
    levels = ("pipeline", "cohort", "contract", "stat")
    wanted = {name for name, one in CASES.items() if one["level"] in levels}
    named = {*test_explain.NAMED, *test_explain.COMPOSED, *test_explain.WRITTEN_OUT, *FOUND}
    covered = {name.split()[0] for name in named}
    assert not covered & ELSEWHERE.keys()
    assert wanted == covered | ELSEWHERE.keys()
    for name, where in ELSEWHERE.items():
        files = [
            one for one in Path(__file__).parent.parent.rglob("test_*.py") if one.name in where
        ]
        assert any(name in one.read_text() for one in files) or where.startswith("below")


def _hand_over(lake: Lake, response: int, mask: list[int], log_probs: list[float]) -> None:
    with lake.capture(
        run_id="r", rollout_id=0, rank=0, expected_ranks=[0], settings=Settings(), stages=SAMPLE
    ) as builder:
        one = SampleRecord(
            sample_id="s-0",
            group_id="g-0",
            response_length=response,
            total_length=response,
            loss_mask=mask,
        )
        builder.samples([one], reward_dtype="float32")
        builder.tensor("rollout_log_probs", [torch.tensor(log_probs)])


@pytest.mark.parametrize("name", ["K-037", "K-079"])
def test_a_column_that_is_short_is_not_captured(lake: Lake, name: str) -> None:
    """Rows that do not fit their sample are refused where they are handed over, each by name."""
    case = CASES[name]
    if name == "K-037":
        given = (3, [1] * 3, case["inputs"]["logps"][0])
    else:
        length = case["wrong"]["response_length"]
        given = (length, case["wrong"]["loss_mask"], [-0.5] * length)
    with pytest.raises(CaptureError, match="s-0"):
        _hand_over(lake, *given)


def test_weights_that_no_longer_reach_the_engine_are_named_by_step(lake: Lake) -> None:
    """K-073: the gap of sampler and trainer, by step, against the run's own first steps."""
    case = CASES["K-073"]
    gaps, config = case["inputs"]["mean_abs_delta_logp"], case["config"]
    for step, gap in enumerate(gaps):
        trained = np.linspace(-2.0, -0.5, 40)
        moved = trained + gap * np.where(np.arange(40) % 2, 1.0, -1.0)
        columns = {"rollout_log_probs": moved, "old_log_probs": trained, "log_probs": trained}
        sample = _sample(0, [1] * 40)
        sample.columns = {name: torch.tensor(one).float() for name, one in columns.items()}
        capture(lake, {0: [sample]}, WAY, rollout_id=step, step_id=0, stages=SAMPLE)
    measured = lake.mismatch(by=("rollout",))
    found = [row["abs_delta"] for row in measured.table.to_pylist()]
    assert found == pytest.approx(gaps, rel=1e-4)
    limit = config["factor"] * np.mean(found[: config["warmup_steps"]])
    alarm = first_alarm(found[config["warmup_steps"] :], float(limit), 1)
    assert alarm is not None
    assert alarm + config["warmup_steps"] == case["right"]["first_alarm_step"]


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("temperature", [0.5, 0.6, 0.8, 1.3])
def test_a_temperature_on_one_side_is_found_from_the_values(
    lake: Lake, temperature: float, seed: int
) -> None:
    """K-031, where nobody states a temperature: real distributions, real samples of them."""
    numbers = torch.Generator().manual_seed(seed)
    logits = 2.0 * torch.randn((400, 12), generator=numbers)
    tokens = torch.multinomial(torch.softmax(logits / temperature, 1), 1, generator=numbers)
    before, after = (
        torch.log_softmax(one, 1).gather(1, tokens).squeeze(1)
        for one in (logits, logits / temperature)
    )
    sample = _sample(0, [1] * 400, rollout_log_probs=before, old_log_probs=after)
    found = _write(lake, Scene({0: [sample]}))
    named = {one.first.faults[0] for one in found.explanations if one.first}
    assert named == {"log-prob.temperature"}
