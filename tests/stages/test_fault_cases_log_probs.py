"""Real faults of log-probs with numbers: a whole response of each, which says what one token hides.

The first token of a response is the case's own; the others are made by the same rule from logits of
their own, as many as a statement about a column needs.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.cohorts import capture
from tests.helpers.scenes import WAY, the_cohort, the_stage
from tests.helpers.trainer import Sample
from tests.stages.test_fault_cases import CASES, SIDES
from trajreplay import Lake

TOKENS, VOCABULARY = 64, 16
# Sampler and trainer of a healthy run differ by their kernels.
NOISE = 1e-3
Pair = tuple[list[float], list[float]]


def _drawn(seed: int) -> list[tuple[Tensor, int]]:
    """Logits of further positions, and the token sampled at each."""
    numbers = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(TOKENS - 1):
        logits = 2.0 * torch.randn(VOCABULARY, generator=numbers)
        token = torch.multinomial(logits.softmax(0), 1, generator=numbers)
        found.append((logits, int(token)))
    return found


def _log_prob(logits: Tensor, token: int, *, temperature: float = 1.0) -> float:
    return float((logits / temperature).log_softmax(0)[token])


def _positions(case: dict[str, Any], seed: int) -> list[tuple[Tensor, int]]:
    own = torch.tensor(case["inputs"]["logits"]), case["inputs"]["token"]
    return [own, *_drawn(seed)]


def _temperature(case: dict[str, Any], side: str, seed: int) -> Pair:
    """K-031: the sampler's log-probs of before its temperature, the trainer's of after."""
    warm = case["config"]["temperature"]
    own = warm if side == "right" else 1.0
    places = _positions(case, seed)
    return (
        [_log_prob(logits, token, temperature=own) for logits, token in places],
        [_log_prob(logits, token, temperature=warm) for logits, token in places],
    )


def _most_likely(case: dict[str, Any], side: str, seed: int) -> Pair:
    """K-034: of what the engine returns, the first entry instead of the sampled token's."""
    returned = dict(case["inputs"]["returned"])
    sampled = returned[case["inputs"]["sampled_token"]]
    trainer = [sampled, *(_log_prob(*one) for one in _drawn(seed))]
    if side == "right":
        return trainer, trainer
    first = [max(returned.values())]
    return first + [float(logits.log_softmax(0).max()) for logits, _ in _drawn(seed)], trainer


def _filtered(case: dict[str, Any], side: str, seed: int) -> Pair:
    """K-035: probabilities over the tokens that the filter kept; such a token was sampled."""
    kept = case["config"]["top_k"]
    sampler, trainer = [], []
    for logits, drawn in _positions(case, seed):
        best = logits.topk(kept).indices
        token = drawn if drawn in best.tolist() else int(best[0])
        trainer.append(_log_prob(logits, token))
        narrow = torch.full_like(logits, -torch.inf)
        narrow[best] = logits[best]
        sampler.append(trainer[-1] if side == "right" else _log_prob(narrow, token))
    return sampler, trainer


def _narrow(case: dict[str, Any], side: str, seed: int) -> Pair:
    """K-050: the trainer's log-probs of logits that were still bfloat16."""
    places = _positions(case, seed)
    sampler = [_log_prob(*one) for one in places]
    if side == "right":
        return sampler, sampler
    return sampler, [float(logits.bfloat16().log_softmax(0)[token]) for logits, token in places]


COVERED: dict[str, tuple[Callable[[dict[str, Any], str, int], Pair], str, tuple[str, ...]]] = {
    "K-031": (_temperature, "log-prob.temperature", ("rollout_logp", "trainer_logp")),
    "K-034": (_most_likely, "log-prob.most-likely", ("rollout_logp",)),
    "K-035": (_filtered, "log-prob.filtered", ("rollout_logp",)),
    "K-050": (_narrow, "log-prob.quantised", ()),
}


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", COVERED)
def test_log_probs_of_a_right_run_are_silent_and_of_a_faulty_one_named(
    lake: Lake, name: str, side: str, seed: int
) -> None:
    case, (make, check, fields) = CASES[name], COVERED[name]
    sampler, trainer = make(case, side, seed)
    for field, found in zip(fields, (sampler, trainer), strict=False):
        assert found[0] == pytest.approx(case[side][field], abs=case["tol"])
    if name == "K-050":  # of this side no two kernels agree: the size of the gap is the point
        assert trainer[0] == pytest.approx(case[side]["logp"], abs=0.01)
    noise = NOISE * torch.randn(TOKENS, generator=torch.Generator().manual_seed(seed + 1))
    sample = Sample("s-0", "g-0", [1] * TOKENS, 1.0, reward=0.0)
    sample.columns = {
        "rollout_log_probs": (torch.tensor(sampler) + noise).clamp(max=-1e-6),
        "old_log_probs": torch.tensor(trainer),
    }
    stages = ("sample", "reward.raw", "reward.post_process")
    capture(lake, {0: [sample]}, WAY, stages=stages, columns=[*sample.columns])
    cohort = the_cohort(lake.replay(), step_id=None)
    said = {(one.check, one.stage) for one in cohort.findings if one.check.startswith("log-prob")}
    assert said == (set() if side == "right" else {(check, CASES[name]["stage"])})
    assert the_stage(cohort, "sample").verdict == "pass"
