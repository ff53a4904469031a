"""Fixtures of real trainings with TRL."""

from pathlib import Path

import pytest

from tests.helpers.trl_training import make_model
from tests.oracles.frameworks import imported


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a tiny random model, or skip and say how to get TRL."""
    imported("trl")
    return make_model(tmp_path_factory.mktemp("model"))
