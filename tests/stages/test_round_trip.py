"""Generated captures, written to a lake and recomputed from what comes back out of it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.helpers import references
from tests.helpers.cohorts import ALL_STAGES, Expected, capture
from tests.helpers.packed import float32s
from tests.helpers.trainer import Arithmetic, Sample
from trajreplay import Lake
from trajreplay.stages.kernels import (
    approx_kl,
    group_rewards,
    grpo_advantages,
    ppo_clip,
    seq_mean_token_mean,
)

few = settings(max_examples=max(10, settings().max_examples // 5))
COLUMNS = ("old_log_probs", "ref_log_probs", "log_probs", "entropy", "kl", "advantages")
OFF = 1e3  # what is added to every recorded value, so that all recomputed ones are told


@contextmanager
def new_lake() -> Iterator[Lake]:
    """A lake for one example."""
    with tempfile.TemporaryDirectory() as folder:
        yield Lake.create(Path(folder) / "lake")


def arithmetics() -> st.SearchStrategy[Arithmetic]:
    """Draw settings that V1 recomputes."""
    return st.builds(
        Arithmetic,
        std=st.booleans(),
        ddof=st.sampled_from([0, 1]),
        baseline=st.sampled_from(["mean", "none"]),
        grouped=st.booleans(),
        kl=st.sampled_from(["k1", "k2", "k3", "low_var_kl"]),
        kl_coef=st.sampled_from([0.0, 0.1]),
        eps_clip=st.sampled_from([0.1, 0.2]),
        eps_clip_high=st.sampled_from([None, 0.28]),
        entropy_coef=st.sampled_from([0.0, 0.01]),
    )


@st.composite
def trainings(draw: st.DrawFn, *, most: int = 4, longest: int = 2) -> list[Sample]:
    """Draw a few samples of a few tokens, with values that no trainer has to have computed."""
    values = float32s(-4.0, 4.0)
    samples = []
    for number in range(draw(st.integers(1, most))):
        mask = draw(st.lists(st.integers(0, 1), max_size=longest))
        sample = Sample(f"s-{number}", draw(st.sampled_from(["g-0", "g-1"])), mask, draw(values))
        for name in COLUMNS:
            tokens = draw(st.lists(values, min_size=len(mask), max_size=len(mask)))
            sample.columns[name] = torch.tensor(tokens, dtype=torch.float32)
        sample.reward = draw(values)
        samples.append(sample)
    return samples


def _packed(samples: Sequence[Sample], name: str) -> Tensor:
    return torch.cat([one.columns[name] for one in samples])


def _offsets(samples: Sequence[Sample]) -> Tensor:
    return torch.tensor([0, *(one.length for one in samples)]).cumsum(0)


def _tensor(column: pa.ChunkedArray) -> Tensor:
    lists = column.combine_chunks()
    return torch.from_numpy(np.array(lists.flatten().to_numpy(zero_copy_only=False)))


@few
@given(samples=trainings(most=6, longest=6), way=arithmetics(), ranks=st.integers(1, 3))
def test_what_sql_gives_back_recomputes_bit_for_bit_as_the_original(
    samples: list[Sample], way: Arithmetic, ranks: int
) -> None:
    shares = {rank: samples[rank::ranks] for rank in range(ranks)}
    with new_lake() as lake:
        capture(lake, shares, way, step_id=0, columns=COLUMNS, settings=way.full)
        names = ", ".join(["loss_mask", "raw_reward", "group_id", "response_length", *COLUMNS])
        text = f"select {names} from steps order by rank, row"
        rows = lake.sql(text).arrow()
    ordered = list(chain.from_iterable(shares.values()))
    back = {name: _tensor(rows[name]) for name in COLUMNS}
    for name in COLUMNS:
        assert back[name].dtype == torch.float32
        assert torch.equal(back[name].view(torch.int32), _packed(ordered, name).view(torch.int32))
    masks = torch.tensor([one for sample in ordered for one in sample.mask], dtype=torch.uint8)
    assert torch.equal(_tensor(rows["loss_mask"]), masks)
    original = {name: _packed(ordered, name) for name in COLUMNS}
    assert _losses(back, masks, ordered, way) == _losses(original, masks, ordered, way)
    assert _rewards(rows, ordered, way)


def _losses(
    columns: dict[str, Tensor], masks: Tensor, samples: Sequence[Sample], way: Arithmetic
) -> list[list[float]]:
    doubles = {name: one.double() for name, one in columns.items()}
    clip = ppo_clip(
        *(doubles[name] for name in ("log_probs", "old_log_probs", "advantages")),
        eps_clip=way.eps_clip,
        eps_clip_high=way.eps_clip_high,
    )
    found = [
        seq_mean_token_mean(one, masks.double(), _offsets(samples)).mean
        for one in (clip.pg_loss, clip.ppo_kl, clip.clipped, doubles["entropy"])
    ]
    kl = approx_kl(doubles["old_log_probs"], doubles["ref_log_probs"])
    return [one.tolist() for one in (*found, kl)]


def _rewards(rows: pa.Table, samples: Sequence[Sample], way: Arithmetic) -> bool:
    """Whether queried rewards are scored as a loop over the original ones scores them."""
    numbers = torch.tensor([int(str(one)[2:]) for one in rows["group_id"].to_pylist()])
    raw = torch.from_numpy(np.array(rows["raw_reward"].to_numpy()))
    scored = group_rewards(raw, numbers, divide_by_std=way.std, ddof=way.ddof)
    expected = references.group_rewards(
        [one.raw_reward for one in samples],
        [int(str(one.group)[2:]) for one in samples],
        divide_by_std=way.std,
        ddof=way.ddof,
    )
    lengths = torch.from_numpy(np.array(rows["response_length"].to_numpy())).long()
    assert len(grpo_advantages(scored, lengths)) == sum(one.length for one in samples)
    return bool(np.allclose(scored.numpy(), expected, rtol=1e-9, atol=1e-9))


def test_sql_computes_the_masked_kl_of_every_sample_as_the_kernel_does() -> None:
    numbers = np.random.default_rng(5)
    samples = []
    for number, length in enumerate((3, 0, 7, 1)):
        sample = Sample(f"s-{number}", "g-0", numbers.integers(0, 2, length).tolist(), 0.0)
        for name in ("log_probs", "old_log_probs"):
            sample.columns[name] = torch.tensor(numbers.normal(size=length), dtype=torch.float32)
        samples.append(sample)
    with new_lake() as lake:
        capture(lake, {0: samples}, Arithmetic(), step_id=0, columns=("log_probs", "old_log_probs"))
        text = """
            select coalesce(sum((old::double - new::double) * mask), 0)
                / greatest(coalesce(sum(mask), 0), 1) as kl
            from (select row, unnest(log_probs) as new, unnest(old_log_probs) as old,
                         unnest(loss_mask)::int as mask from steps) as tokens
            right join (select row from steps) as samples using (row)
            group by row order by row
        """
        found = lake.sql(text, threads=1).arrow()["kl"].to_pylist()
    difference = _packed(samples, "old_log_probs").double() - _packed(samples, "log_probs").double()
    masks = torch.tensor([one for sample in samples for one in sample.mask])
    expected = seq_mean_token_mean(difference, masks.double(), _offsets(samples)).mean
    assert found == pytest.approx(expected.tolist(), rel=1e-12, abs=1e-15)


Recomputed = dict[tuple[str, str, int | None], float]


def _recomputed(lake: Lake, step_id: int) -> Recomputed:
    """Every value that a replay of one step recomputed, all recorded ones being off."""
    (cohort,) = lake.replay(steps=[(0, step_id)]).cohorts
    return {
        (one.field, str(one.sample_id), one.token): one.recomputed
        for stage in cohort.stages
        for one in stage.divergences
    }


def _write(lake: Lake, shares: dict[int, list[Sample]], way: Arithmetic, step_id: int) -> None:
    """A step whose recorded outputs are all off, its losses recorded sample by sample."""
    expected = {
        rank: [Expected({"loss": [OFF] * len(own)}, {"scope": "sample", "reduction": "mean"})]
        for rank, own in shares.items()
        if own
    }
    written = {}
    for rank, own in shares.items():
        written[rank] = [one.copy() for one in own]
        for one in written[rank]:
            one.columns["kl"] = one.columns["kl"] + OFF
    options: dict[str, Any] = {"settings": way.full, "columns": COLUMNS, "stages": ALL_STAGES}
    capture(lake, written, way, step_id=step_id, expected=expected, ranks=sorted(shares), **options)


def _by_loops(samples: Sequence[Sample], way: Arithmetic) -> Recomputed:
    """The same by plain loops, sample by sample, in float64."""
    found: Recomputed = {}
    raw = [one.raw_reward for one in samples]
    scored = raw
    if way.grouped:
        groups = [int(str(one.group)[2:]) for one in samples]
        scored = references.group_rewards(
            raw, groups, baseline=way.baseline, divide_by_std=way.std, ddof=way.ddof
        )
    for one, reward in zip(samples, scored, strict=True):
        lists = {name: values.tolist() for name, values in one.columns.items()}
        found["reward", one.sample_id, None] = reward
        kl = [0.0] * one.length
        if way.kl_coef:
            kl = references.approx_kl(
                lists["old_log_probs"],
                lists["ref_log_probs"],
                estimator="k3" if way.kl == "low_var_kl" else way.kl,
                value_clamp=(-10.0, 10.0) if way.kl == "low_var_kl" else None,
            )
        for token, trained in enumerate(one.mask):
            if trained:
                found["kl", one.sample_id, token] = kl[token]
                found["advantages", one.sample_id, token] = float(one.reward or 0.0)
        clip = references.ppo_clip(
            lists["log_probs"],
            lists["old_log_probs"],
            lists["advantages"],
            eps_clip=way.eps_clip,
            eps_clip_high=way.eps_clip_high,
        )
        means = [
            references.seq_mean_token_mean(values, one.mask, [one.length]).mean
            for values in (clip.pg_loss, lists["entropy"])
        ]
        (loss,) = references.policy_loss(*means, entropy_coef=way.entropy_coef)
        found["loss", one.sample_id, None] = loss
    return found


def _assert_same(found: Recomputed, expected: Recomputed) -> None:
    """What is told of was recomputed right; only what happens to be near is not told of."""
    for key, value in found.items():
        assert value == pytest.approx(expected[key], rel=1e-9, abs=1e-9), key
    told = {key for key in expected if key[0] in ("kl", "loss")}
    assert told <= found.keys()


@few
@given(samples=trainings(), way=arithmetics())
def test_a_replay_recomputes_what_plain_loops_compute(
    samples: list[Sample], way: Arithmetic
) -> None:
    with new_lake() as lake:
        _write(lake, {0: samples}, way, 0)
        _assert_same(_recomputed(lake, 0), _by_loops(samples, way))


@few
@given(samples=trainings(), way=arithmetics(), ranks=st.integers(1, 3), choose=st.randoms())
def test_order_ranks_and_files_do_not_matter(
    samples: list[Sample], way: Arithmetic, ranks: int, choose: Any
) -> None:
    shuffled = list(samples)
    choose.shuffle(shuffled)
    order = list(range(ranks))
    choose.shuffle(order)
    shares: dict[int, list[Sample]] = {rank: [] for rank in order}
    for one in shuffled:
        shares[choose.randrange(ranks)].append(one)
    with new_lake() as lake:
        _write(lake, {0: samples}, way, 0)
        _write(lake, shares, way, 1)
        first, second = _recomputed(lake, 0), _recomputed(lake, 1)
    assert first.keys() == second.keys()
    for key, value in first.items():
        assert second[key] == pytest.approx(value, rel=1e-12, abs=1e-12), key


@few
@given(
    samples=trainings(),
    way=arithmetics(),
    garbage=st.sampled_from([float("nan"), float("inf"), -1e30, 0.0]),
)
def test_masked_positions_do_not_matter(
    samples: list[Sample], way: Arithmetic, garbage: float
) -> None:
    spoilt = [one.copy() for one in samples]
    for one in spoilt:
        masked = torch.tensor(one.mask, dtype=torch.bool).logical_not()
        for values in one.columns.values():
            values[masked] = garbage
    with new_lake() as lake:
        _write(lake, {0: samples}, way, 0)
        _write(lake, {0: spoilt}, way, 1)
        assert _recomputed(lake, 0) == _recomputed(lake, 1)
