"""Fixtures of real trainings with TRL."""

from pathlib import Path

import pytest

from tests.helpers.trl_training import make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny random model, or skip and say how to get TRL."""
    pytest.importorskip(
        "trl", reason="make test-trl installs what tests/oracles/requirements.txt names"
    )
    return make_model(tmp_path_factory.mktemp("model"))
