"""Publishing on file systems with hard links, without, and without an exclusive rename either."""

import errno
import multiprocessing
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trajreplay.schema import claim as claim_module
from trajreplay.schema import publish as module
from trajreplay.schema.claim import CLAIM_SUFFIX
from trajreplay.schema.publish import publish, write_synced


def no_link(*_: object, **__: object) -> None:
    raise OSError(errno.EPERM, os.strerror(errno.EPERM))


def unsupported(*_: object) -> None:
    return None


@pytest.fixture(params=["link", "rename", "claim"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """One of the three ways, forced by taking the better ones away."""
    way = str(request.param)
    if way != "link":
        monkeypatch.setattr(os, "link", no_link)
    if way == "claim":
        monkeypatch.setattr(module, "_rename", unsupported)
    return way


@pytest.fixture
def claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", no_link)
    monkeypatch.setattr(module, "_rename", unsupported)


def aside(folder: Path, data: bytes = b"mine") -> str:
    path = folder / f"tmp-{data.decode()}"
    write_synced(str(path), data)
    return str(path)


@pytest.mark.usefixtures("way")
def test_a_free_name_is_given(tmp_path: Path) -> None:
    assert publish(aside(tmp_path), str(tmp_path / "a"))
    assert (tmp_path / "a").read_bytes() == b"mine"
    assert not list(tmp_path.glob(f"*{CLAIM_SUFFIX}"))


@pytest.mark.usefixtures("way")
def test_a_taken_name_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"theirs")
    assert not publish(aside(tmp_path), str(tmp_path / "a"))
    assert (tmp_path / "a").read_bytes() == b"theirs"


@pytest.mark.usefixtures("way")
def test_of_many_writers_one_wins(tmp_path: Path) -> None:
    won: list[bytes] = []

    def write(data: bytes) -> None:
        if publish(aside(tmp_path, data), str(tmp_path / "a")):
            won.append(data)

    threads = [threading.Thread(target=write, args=(f"{i}".encode(),)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert (tmp_path / "a").read_bytes() == won[0]


def test_a_link_whose_reply_was_lost_is_a_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    link: Callable[..., Any] = os.link

    def lossy(source: str, target: str) -> None:
        link(source, target)
        raise FileExistsError(errno.EEXIST, "retransmitted")

    monkeypatch.setattr(os, "link", lossy)
    assert publish(aside(tmp_path), str(tmp_path / "a"))


def test_another_failure_of_a_link_is_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "link", full)
    with pytest.raises(OSError, match="full"):
        publish(aside(tmp_path), str(tmp_path / "a"))
    assert not (tmp_path / "a").exists()


@pytest.mark.usefixtures("claims")
def test_a_dead_writers_claim_is_taken_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_module, "CLAIM_GRACE_S", 5.0)
    claim = tmp_path / f"a{CLAIM_SUFFIX}"
    claim.touch()
    past = claim.stat().st_mtime - 60
    os.utime(claim, (past, past))
    assert publish(aside(tmp_path), str(tmp_path / "a"))
    assert (tmp_path / "a").read_bytes() == b"mine"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["a"]


@pytest.mark.usefixtures("claims")
def test_a_young_claim_is_waited_for(tmp_path: Path) -> None:
    claim = tmp_path / f"a{CLAIM_SUFFIX}"
    claim.touch()

    def finish() -> None:
        (tmp_path / "a").write_bytes(b"theirs")
        claim.unlink()

    timer = threading.Timer(0.1, finish)
    timer.start()
    assert not publish(aside(tmp_path), str(tmp_path / "a"))
    timer.join()
    assert (tmp_path / "a").read_bytes() == b"theirs"


@pytest.mark.usefixtures("claims")
def test_a_claim_that_is_given_back_is_claimed_anew(tmp_path: Path) -> None:
    claim = tmp_path / f"a{CLAIM_SUFFIX}"
    claim.touch()
    timer = threading.Timer(0.1, claim.unlink)
    timer.start()
    assert publish(aside(tmp_path), str(tmp_path / "a"))
    timer.join()


def _contend(folder: str, index: int, claims_only: bool) -> bool:
    if claims_only:
        os.link = no_link
        module._rename = unsupported  # type: ignore[assignment]
    return publish(aside(Path(folder), f"{index}".encode()), f"{folder}/a")


@pytest.mark.parametrize("claims_only", [False, True])
def test_of_many_processes_one_wins(tmp_path: Path, claims_only: bool) -> None:
    with multiprocessing.get_context("spawn").Pool(4) as pool:
        won = pool.starmap(_contend, [(str(tmp_path), i, claims_only) for i in range(32)])
    assert sum(won) == 1
    assert (tmp_path / "a").read_bytes() == f"{won.index(True)}".encode()
