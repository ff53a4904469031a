"""Archives that are read without zipfile: where they are read at all, zipfile reads the same."""

import io
import random
import zipfile

import pytest
import torch

from trajreplay.schema.bundles.plain_zip import plain_members


def saved(values: int = 5) -> bytes:
    """What torch.save writes."""
    file = io.BytesIO()
    torch.save(torch.arange(values, dtype=torch.float32), file)
    return file.getvalue()


def members(data: bytes) -> dict[str, bytes] | None:
    found = plain_members(data)
    return None if found is None else {name: bytes(one) for name, one in found.items()}


def by_zipfile(data: bytes) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {one.filename: archive.read(one) for one in archive.infolist()}


def archive(**options: int) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as target:  # type: ignore[call-overload]
        target.writestr("a/data.pkl", b"abc")
        target.writestr("a/data/0", b"d" * 100)
    return file.getvalue()


@pytest.mark.parametrize("values", [0, 1, 1000])
def test_what_torch_saves_is_read(values: int) -> None:
    data = saved(values)
    assert members(data) == by_zipfile(data)


def test_what_zipfile_stores_is_read() -> None:
    data = archive(compression=zipfile.ZIP_STORED)
    assert members(data) == {"a/data.pkl": b"abc", "a/data/0": b"d" * 100}


def test_what_is_unusual_is_left_to_zipfile() -> None:
    plain = archive(compression=zipfile.ZIP_STORED)
    for data in (
        archive(compression=zipfile.ZIP_DEFLATED),
        b"head" + plain,
        plain + b"tail",
        plain[:-2] + b"\1\0c",
        plain[:-1],
        b"",
        b"PK\5\6" + b"\0" * 18,
    ):
        assert plain_members(data) is None


def test_two_members_of_one_name_are_left_to_zipfile() -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as target:
        target.writestr("a", b"1")
        with pytest.warns(UserWarning, match="Duplicate"):
            target.writestr("a", b"2")
    assert plain_members(file.getvalue()) is None


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_archive_is_read_as_zipfile_reads_it_or_not_at_all(seed: int) -> None:
    whole, chance = saved(), random.Random(seed)
    read = 0
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(chance.choice((1, 1, 2, 4))):
            data[chance.randrange(len(data))] = chance.randrange(256)
        found = members(bytes(data))
        if found is not None:
            read += 1
            assert found == by_zipfile(bytes(data))
    assert read
