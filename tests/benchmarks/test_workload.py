"""The workload is the same everywhere: its digests, its scalars, its shape."""

import numpy as np
import pytest

from benchmarks.workload import large_step, make_step, small_step


def test_the_large_step_has_its_digest() -> None:
    assert (
        large_step().digest() == "4747e22f960702f921abcf997e6a65cac07e43d68e26a374cf7f41cd85e3fd5f"
    )


def test_the_first_small_step_has_its_digest() -> None:
    assert (
        small_step(0).digest() == "db5750ab84c25066d1229bf26bd6eb9497b2ecd1d10543bb92d9b294678d243f"
    )


def test_the_large_step_has_its_scalars() -> None:
    expected = {
        "loss": -0.3729057,
        "pg_loss": 0.02655387,
        "entropy_loss": 39.945957,
        "pg_clipfrac": 0.8191784,
        "ppo_kl": -0.00148951,
    }
    assert large_step().scalars == pytest.approx(expected, rel=5e-6)


def test_steps_differ_from_each_other() -> None:
    assert len({small_step(index).digest() for index in range(4)}) == 4


def test_a_prompt_has_rewards_around_zero() -> None:
    step = small_step(0)
    assert step.reward.reshape(-1, 8).mean(axis=1) == pytest.approx(0, abs=1e-6)


def test_every_fourth_sample_is_masked_at_its_end() -> None:
    mask = make_step(0, 8, 64).loss_mask
    assert mask.sum(axis=1).tolist() == [62, 64, 64, 64, 62, 64, 64, 64]
    assert not mask[::4, -2:].any()


def test_token_columns_are_packed_float32_in_sample_order() -> None:
    step = make_step(0, 8, 64)
    columns = step.token_columns()
    assert {column.dtype for column in columns.values()} == {np.dtype(np.float32)}
    assert {column.shape for column in columns.values()} == {(step.tokens,)}
    assert np.array_equal(columns["advantages"][::64], step.reward)
