"""Fixtures with the frameworks whose own functions the kernels are compared with."""

import os

import pytest
from hypothesis import settings

from tests.oracles.frameworks import Trl, Verl, load_trl, load_verl

# Fewer examples than of the other tests: there is one test for each entry of each registry.
settings.register_profile(
    "oracle", max_examples=50, deadline=None, derandomize=bool(os.environ.get("CI"))
)


@pytest.fixture(scope="session")
def verl() -> Verl:
    """Import verl, or skip and say how to get it."""
    return load_verl()


@pytest.fixture(scope="session")
def trl() -> Trl:
    """Import TRL, or skip and say how to get it."""
    return load_trl()
