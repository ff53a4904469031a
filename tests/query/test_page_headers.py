"""Pages that claim more than their column can need are refused before any memory is taken."""

import random
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.helpers.bombs import plant
from tests.helpers.captures import record, sample
from tests.helpers.mutate import data_file, sign_file
from trajreplay import DatasetError, Lake
from trajreplay.query.files.page_headers import check_claims
from trajreplay.schema import CaptureKey

KEY = CaptureKey("r", 0, "rollout", 0, None, 0)
GIB = 1 << 30
PROGRAM = """
import resource, sys
from trajreplay import DatasetError, Lake
lake = Lake.open(sys.argv[1])
query = lake.sql(f"select {sys.argv[2]} from rollouts")
lake.sql("select sample_id from rollouts").arrow()
lake.replay()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    query.arrow()
except DatasetError as error:
    print(error.message)
lake.replay()
lake.validate()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def bomb(
    lake: Lake, column: str, size: int, *, dictionary: bool, claimed: int | None = None
) -> None:
    """A capture of one sample, of which one column's first page decodes to `size` bytes more."""
    filler = random.Random(0).randbytes(48 << 10).hex()
    source = random.Random(1)
    floats = [source.random() for _ in range(20_000)]
    record(
        lake,
        lambda capture: capture.samples([sample(0, length=20_000, prompt=filler)]),
        lambda capture: capture.tensor("log_probs", [floats]),
        redaction={"prompt": "truncate:1000000"},
    )
    path = data_file(lake, KEY)
    table = pq.ParquetFile(path).read()
    pq.write_table(
        table,
        path,
        compression="zstd",
        use_dictionary=dictionary,
        write_statistics=False,
        store_schema=False,
    )
    plant(path, column, size, claimed=claimed)
    sign_file(lake, KEY)
    lake.refresh()


@pytest.mark.parametrize(
    ("column", "leaf", "dictionary"),
    [
        ("prompt", "prompt", True),
        ("prompt", "prompt", False),
        ("log_probs", "log_probs.list.element", True),
        ("log_probs", "log_probs.list.element", False),
    ],
)
def test_a_page_that_decodes_to_a_gibibyte_takes_no_memory(
    tmp_path: Path, column: str, leaf: str, dictionary: bool
) -> None:
    lake = Lake.create(tmp_path / "lake")
    bomb(lake, leaf, GIB, dictionary=dictionary)
    assert data_file(lake, KEY).stat().st_size < 1 << 20
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, lake.path, column], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    message, grown_mib = done.stdout.splitlines()
    assert f"column {column} has pages that decode to 10" in message
    assert "bytes, expected at most" in message
    assert int(grown_mib) < 100


def test_a_page_that_only_claims_to_decode_to_much_is_refused(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    bomb(lake, "prompt", 10, dictionary=True, claimed=(1 << 31) - 1)
    with pytest.raises(DatasetError, match="prompt has pages that decode to 21474836"):
        lake.sql("select prompt from rollouts").arrow()


def test_text_just_below_the_limit_is_read(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    bomb(lake, "prompt", 8 << 20, dictionary=True)
    with pytest.raises(DatasetError, match="column prompt has the digest"):
        lake.sql("select prompt from rollouts").arrow()


@dataclass(frozen=True)
class Chunk:
    """Metadata of a column chunk that is all of a file."""

    total_compressed_size: int
    num_values: int = 1
    data_page_offset: int = 0
    dictionary_page_offset: int | None = None


def check(raw: bytes, *, values: int = 1, is_text: bool = False) -> None:
    chunk = Chunk(len(raw), values)
    check_claims(raw, len(raw), [chunk], is_text)


def number(value: int) -> bytes:
    value = value << 1 ^ value >> 31
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


STATISTICS = b"\x5c\x18\x03abc\x18" + b"\x84\x10" + b"y" * 2052 + b"\x16\x02\x00"


def page(
    size: int, body: bytes = b"", *, dictionary: int | None = None, statistics: bytes = b""
) -> bytes:
    """A page that claims a size: of a dictionary with so many values, or of data."""
    if dictionary is None:
        inside = (
            b"\x2c\x15" + number(len(body)) + b"\x15\x00\x15\x06\x15\x06" + statistics + b"\x00"
        )
        kind = number(0)
    else:
        inside = b"\x4c\x15" + number(dictionary) + b"\x15\x00\x12\x00"
        kind = number(2)
    sizes = b"\x15" + number(size) + b"\x15" + number(len(body))
    return b"\x15" + kind + sizes + inside + b"\x00" + body


MIB = 1 << 20


@pytest.mark.parametrize("statistics", [b"", b"\x1c\x00", b"\x1c" + STATISTICS[1:]])
@pytest.mark.parametrize("dictionary", [None, 7])
def test_the_sizes_of_all_pages_are_summed(dictionary: int | None, statistics: bytes) -> None:
    first = page(100, b"x" * 70, dictionary=dictionary)
    rest = page(MIB - 100, b"y" * 3000, statistics=statistics)
    check(b"")
    check(first + rest, values=0)
    with pytest.raises(ValueError, match="decode to 1048577 bytes, expected at most 1048576"):
        check(first + rest + page(1), values=0)
    check(first + rest + page(16), values=1)
    check(first + rest + page(255 * MIB), values=0, is_text=True)
    with pytest.raises(ValueError, match="decode to 268435457 bytes, expected at most 268435456"):
        check(first + rest + page(255 * MIB + 1), values=0, is_text=True)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (page(-1), "a page of 0 bytes that decode to -1"),
        (page(100)[:-1], "a page header without an end"),
        (page(100, b"x" * 70)[:-1], "a page of 70 bytes that decode to 100"),
        (page(100, dictionary=26), "a dictionary of 26 values in 100 bytes"),
        (page(100, dictionary=-1), "a dictionary of -1 values in 100 bytes"),
        (b"\x15\x00\x15\x10\x05\x04\x20\x15\x00\x00", "odd field 2"),
        (b"\x15\x00\x15\x10\x05\x80\x80\x08\x20\x15\x00\x00", "odd field"),
        (b"\x15\x00\x2c\x00\x15\x00\x00", "a page of 0 bytes that decode to -1"),
        (b"\x15" + b"\xff" * 10 + b"\x00", "a number of more than 64 bits"),
        (b"\x19\x00\x00", "a value of kind 9"),
        (b"\x1c" * 100, "odd field 1"),
    ],
)
def test_a_header_that_is_none_is_refused(raw: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check(raw)


@pytest.mark.parametrize(
    "chunk", [Chunk(10, 1, -1), Chunk(-1), Chunk(11), Chunk(9, 1, 2), Chunk(5, 1, 1 << 62)]
)
def test_a_chunk_that_is_not_in_the_file_is_refused(chunk: Chunk) -> None:
    with pytest.raises(ValueError, match="pages from byte"):
        check_claims(lambda at, size: b"", 10, [chunk], False)
