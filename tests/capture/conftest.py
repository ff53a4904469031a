"""Fixtures of the recorder: a lake, and no recorder left on after a test."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from trajreplay import Lake, capture
from trajreplay.capture.switching.switches import ALIAS, LAKE, PREFIX, RUN_ID


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake.create(tmp_path / "lake")


@pytest.fixture(autouse=True)
def _off_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (PREFIX, ALIAS, LAKE, RUN_ID, "SLURM_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    yield
    capture.recorder().close(timeout_s=5)
    monkeypatch.undo()
    capture.enable_from_env()
