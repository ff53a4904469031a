"""Files that are named with -o, and what is said when they cannot be written."""

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.small_lakes import healthy_lake
from trajreplay.cli.terminal.sink import SinkError, opened

LONG = "select i, md5(i::varchar) as a, md5(a) as b from range(60000) t(i)"


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(healthy_lake(tmp_path_factory.mktemp("healthy") / "lake").path)


def full_disk(*args: str | Path, temporary: Path) -> subprocess.CompletedProcess[str]:
    """Run the command line where no file can grow beyond 64 KiB."""
    return subprocess.run(
        [sys.executable, "-m", "trajreplay", *map(str, args)],
        capture_output=True,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16)),
    )


@pytest.mark.parametrize("format_name", ["table", "json", "ndjson", "csv", "parquet"])
def test_a_full_disk_leaves_no_file_and_is_named(
    lake: Path, tmp_path: Path, format_name: str
) -> None:
    target = tmp_path / "out" / f"rows.{format_name}"
    target.parent.mkdir()
    target.write_text("before")
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    done = full_disk(
        *("sql", "--lake", lake, "--format", format_name, "-o", target, LONG), temporary=temporary
    )
    named = temporary if format_name == "parquet" else target  # it is made in an unnamed file
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        f"Error: {named}: File too large\n\nMake room there, or write to another place.\n"
    )
    assert target.read_text() == "before"
    assert [one.name for one in target.parent.iterdir()] == [target.name]
    assert list(temporary.iterdir()) == []


def test_what_is_still_buffered_is_missed_as_well(tmp_path: Path) -> None:
    path = tmp_path / "out"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limits[1]))
    try:
        with pytest.raises(SinkError) as caught, opened(path) as sink:
            sink.write(b"more than ten bytes")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    cause = caught.value.__cause__
    assert isinstance(cause, OSError)
    assert (cause.errno, cause.filename) == (errno.EFBIG, str(path))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_named_by_the_file(tmp_path: Path) -> None:
    with pytest.raises(SinkError) as caught, opened(tmp_path / "gone" / "out"):
        pass
    assert isinstance(caught.value.__cause__, FileNotFoundError)
    assert caught.value.__cause__.filename == str(tmp_path / "gone" / "out")
