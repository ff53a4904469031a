"""Files of objects, which are refused by the type that they are of, and never run."""

import os
import pickle
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from tests.helpers.cli import run
from trajreplay import DatasetError, Lake
from trajreplay.capture.importers import recognise


@pytest.fixture
def experience(monkeypatch: pytest.MonkeyPatch) -> Any:
    """An object of a class that lies where OpenRLHF has its own."""
    name = "openrlhf.trainer.ppo_utils.experience_maker"
    module = ModuleType(name)
    kind = type("Experience", (), {"__module__": name})
    module.Experience = kind  # type: ignore[attr-defined]
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), module)
    found = kind()
    found.sequences = torch.zeros(2, 3)
    return found


@pytest.mark.parametrize("form", ["torch list", "torch", "pickle", "old pickle"])
def test_objects_are_refused_by_their_type(form: str, experience: Any, tmp_path: Path) -> None:
    path = tmp_path / "experience.pt"
    if form.startswith("torch"):
        torch.save([experience] if form == "torch list" else experience, path)
    else:
        path.write_bytes(pickle.dumps(experience, protocol=2 if form == "old pickle" else 5))
    with pytest.raises(DatasetError) as error:
        recognise([path])
    assert "openrlhf.trainer.ppo_utils.experience_maker.Experience" in error.value.message
    assert ("a list of objects" in error.value.message) == (form == "torch list")
    every: list[tuple[str | Path, ...]] = [
        ("replay", path),
        ("validate", path),
        ("import", "slime", path, "-n"),
    ]
    for args in every:
        found = run(*args)
        assert (found.code, found.out) == (3, "")
        assert "experience_maker.Experience" in found.err
        assert "Save what its objects hold" in found.err


class _Canary:
    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self._path),)


@pytest.mark.parametrize("depth", ["at the top", "in a sample"])
def test_what_a_pickle_would_run_is_not_run(depth: str, tmp_path: Path) -> None:
    canary = _Canary(tmp_path / "canary")
    content: Any = canary
    if depth == "in a sample":
        content = {"rollout_id": 0, "samples": [{"response_length": 0, "reward": canary}]}
    torch.save(content, tmp_path / "0.pt")
    if depth == "at the top":
        with pytest.raises(DatasetError, match=r"of the type posix\.mkdir"):
            recognise([tmp_path / "0.pt"])
    else:
        with Lake.of_files(tmp_path / "0.pt") as lake:
            assert lake.imported is not None
            (one,) = lake.imported.refused
        assert "a call of posix.mkdir" in one.problem
    assert not (tmp_path / "canary").exists()


def test_a_file_of_tensors_is_no_file_of_objects(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    for name, content in (("state", model.state_dict()), ("tensor", torch.zeros(2))):
        torch.save(content, tmp_path / name)
        found = run("replay", tmp_path / name)
        assert (found.code, "is of a kind that can be read" in found.err) == (3, True)
