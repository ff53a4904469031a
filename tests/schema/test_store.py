"""Files of a lake: only regular files inside it are opened, and a name is given once."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trajreplay.schema.errors import DatasetError
from trajreplay.schema.localstore import LocalStore
from trajreplay.schema.publish import write_synced


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    root = tmp_path / "lake"
    root.mkdir()
    return LocalStore(root)


def put(store: LocalStore, path: str, data: bytes = b"x") -> Path:
    file = store.root / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    return file


@pytest.mark.parametrize(
    "path", ["/etc/passwd", "../x", "a/../../x", "a//b", "./a", "a/.", "", "a\0b", "a/"]
)
def test_a_path_that_leaves_the_lake_is_refused(store: LocalStore, path: str) -> None:
    with pytest.raises(DatasetError, match="leaves the lake"):
        store.read(path, 10)


def test_a_link_is_refused_even_to_a_file_of_the_lake(store: LocalStore) -> None:
    put(store, "a")
    (store.root / "b").symlink_to(store.root / "a")
    with pytest.raises(DatasetError, match=r"b in .* is a link, expected a regular file"):
        store.read("b", 10)


def test_a_linked_folder_is_refused(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "x").write_bytes(b"secret")
    (store.root / "data").symlink_to(tmp_path / "outside")
    with pytest.raises(DatasetError, match=r"data in .* is a link, expected a folder"):
        store.read("data/x", 10)
    with pytest.raises(DatasetError, match="is a link, expected a folder"):
        list(store.list("data"))
    with pytest.raises(DatasetError, match="is a link, expected a folder"):
        store.publish_if_absent("data/y", b"x")


def test_the_root_itself_may_be_a_link(store: LocalStore, tmp_path: Path) -> None:
    put(store, "a")
    (tmp_path / "alias").symlink_to(store.root)
    assert LocalStore(tmp_path / "alias").read("a", 10) == b"x"


def test_a_pipe_is_refused_and_does_not_hang(store: LocalStore) -> None:
    os.mkfifo(store.root / "pipe")
    with pytest.raises(DatasetError, match="is a pipe, expected a regular file"):
        store.read("pipe", 10)


def test_a_folder_is_no_file(store: LocalStore) -> None:
    (store.root / "a").mkdir()
    with pytest.raises(DatasetError, match="is a folder, expected a regular file"):
        store.read("a", 10)


def test_a_missing_file_says_what_to_do(store: LocalStore) -> None:
    with pytest.raises(DatasetError, match=r"is missing\n\nRestore it from a copy"):
        store.read("a/b", 10)


def test_a_file_is_read_up_to_a_limit(store: LocalStore) -> None:
    put(store, "a", b"12345")
    assert store.read("a", 5) == b"12345"
    with pytest.raises(DatasetError, match="5 bytes, expected at most 4"):
        store.read("a", 4)


def test_a_listing_names_every_regular_file(store: LocalStore) -> None:
    put(store, "m/a", b"12")
    put(store, "m/n/b")
    found = {one.path: one.size_bytes for one in store.list("m")}
    assert found == {"m/a": 2, "m/n/b": 1}
    assert list(store.list("nothing")) == []


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/etc/passwd")])
def test_a_listing_refuses_links_and_special_files(store: LocalStore, make: object) -> None:
    put(store, "m/a")
    assert callable(make)
    make(store.root / "m" / "odd")
    with pytest.raises(DatasetError, match=r"m/odd in .* is a link or special file"):
        list(store.list("m"))


def test_a_name_is_given_once(store: LocalStore) -> None:
    assert store.publish_if_absent("m/a", b"first")
    assert not store.publish_if_absent("m/a", b"second")
    assert store.read("m/a", 10) == b"first"
    assert list(store.list("_tmp")) == []


def test_placing_moves_a_finished_file(store: LocalStore) -> None:
    temporary = store.temporary()
    write_synced(temporary, b"data")
    store.place(temporary, "data/x/y")
    assert store.read("data/x/y", 10) == b"data"
    assert list(store.list("_tmp")) == []


def test_sweeping_removes_only_what_is_old(store: LocalStore) -> None:
    old, new = put(store, "_tmp/old"), put(store, "_tmp/new")
    past = new.stat().st_mtime - 1000
    os.utime(old, (past, past))
    assert store.sweep(older_than_s=500) == 1
    assert [one.path for one in store.list("_tmp")] == ["_tmp/new"]


def test_a_linked_temporary_folder_is_refused(store: LocalStore, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (store.root / "_tmp").symlink_to(tmp_path / "outside")
    with pytest.raises(DatasetError, match=r"_tmp in .* is a link"):
        store.temporary()


_EXHAUSTED = """
import os, resource, sys
from trajreplay.schema.errors import DatasetError
from trajreplay.schema.localstore import LocalStore

store = LocalStore(sys.argv[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
try:
    {ask}
except DatasetError as error:
    os.write(1, (error.message + "|" + error.hint).encode())
"""


@pytest.mark.parametrize("ask", ['list(store.list("data"))', 'store.read("data/a", 10)'])
def test_a_process_without_files_to_open_is_told_so_and_not_to_restore_the_lake(
    store: LocalStore, ask: str
) -> None:
    put(store, "data/a")
    done = subprocess.run(
        [sys.executable, "-c", _EXHAUSTED.format(ask=ask), str(store.root)],
        capture_output=True,
        text=True,
        check=True,
    )
    message, hint = done.stdout.split("|")
    assert "Too many open files" in message
    assert "ulimit -n" in hint
    assert "Restore" not in hint


def test_a_file_is_whole_however_little_the_system_reads_at_once(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, at: pread(file, min(size, 3), at))
    put(store, "a", b"0123456789")
    assert store.read("a", 10) == b"0123456789"


def test_a_file_that_shrinks_while_it_is_read_is_refused(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    pread = os.pread
    put(store, "a", b"0123456789")
    monkeypatch.setattr(os, "pread", lambda file, size, at: pread(file, size, at)[: 4 - at])
    with pytest.raises(DatasetError, match="changed while it was read: it has 4 bytes, expected 1"):
        store.read("a", 10)


def test_a_disk_that_fails_in_the_middle_of_a_read_is_said(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(file: int, size: int, at: int) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    put(store, "a", b"0123456789")
    monkeypatch.setattr(os, "pread", failing)
    with pytest.raises(DatasetError, match="cannot be read: Input/output error"):
        store.read("a", 10)
