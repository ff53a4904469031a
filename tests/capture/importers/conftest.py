"""Lakes to import into."""

import os
from pathlib import Path

import pytest

from trajreplay import Lake


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written here need not outlive a power cut."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    """A new lake."""
    return Lake.create(tmp_path / "lake")
