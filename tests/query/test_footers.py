"""A footer that was altered and signed anew is refused or makes no difference; it ends no process.

Another process looks at them, since pyarrow aborts the one in which it is asked of a column what
it cannot make sense of.
"""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.mutate import data_file
from tests.helpers.queried import write_capture
from trajreplay import Lake
from trajreplay.schema import CaptureKey

KEY = CaptureKey("r", 0, "rollout", 0, None, 0)
ALTERED = """
import os, sys
from dataclasses import replace
from trajreplay import DatasetError
from trajreplay.query import Catalog
from trajreplay.query.files.datafile import OpenFile
from trajreplay.query.files.reading import read_opened
from trajreplay.schema.filedigest import bytes_digest
from trajreplay.schema.lakefile import open_lake
from trajreplay.schema.tables import ROLLOUTS

folder, whole = sys.argv[1:]
store = open_lake(folder)
catalog = Catalog.open(store)
entry = catalog.entry(catalog.keys[0])
(file,) = entry.files
wanted = [ROLLOUTS[name] for name in file.columns]
path = os.path.join(folder, file.path)
sound = open(path, "rb").read()
end = len(sound) - 8
start = end - int.from_bytes(sound[end : end + 4], "little")
refused = 0
for at in range(start, end):
    altered = bytearray(sound)
    altered[at] ^= 1 << at % 8
    with open(path, "wb") as out:
        out.write(altered)
    digest = bytes_digest(altered) if whole == "whole" else ""
    signed = replace(file, digest=digest, footer=bytes_digest(altered[start:]))
    try:
        with OpenFile(store, signed, ROLLOUTS) as opened:
            for name in opened.footer.names:
                opened.footer.chunks(name)
            read_opened(opened, entry, wanted)
    except DatasetError:
        refused += 1
print(refused, end - start)
"""


@pytest.mark.parametrize("whole", ["whole", "part"])
def test_an_altered_footer_never_ends_the_process(tmp_path: Path, whole: str) -> None:
    lake = Lake.create(tmp_path / "lake")
    write_capture(lake, 0, rollout_id=0)
    assert data_file(lake, KEY).exists()
    command = [sys.executable, "-c", ALTERED, str(lake.path), whole]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    refused, tried = map(int, done.stdout.split())
    assert refused > tried // 4


ALTERED_SEGMENT = """
import os, sys
from trajreplay import DatasetError
from trajreplay.query.manifest.snapshots import Snapshot
from trajreplay.schema.filedigest import bytes_digest
from trajreplay.schema.lakefile import open_lake

store = open_lake(sys.argv[1])
snapshot = Snapshot.newest(store)
(segment,) = snapshot.root.segments
path = os.path.join(sys.argv[1], segment.path)
sound = open(path, "rb").read()
end = len(sound) - 8
start = end - int.from_bytes(sound[end : end + 4], "little")
refused = 0
for bit in range(8 * start, 8 * end):
    altered = bytearray(sound)
    altered[bit // 8] ^= 1 << bit % 8
    with open(path, "wb") as out:
        out.write(altered)
    try:
        snapshot.entries(segment._replace(digest=bytes_digest(altered)))
    except DatasetError:
        refused += 1
print(refused, 8 * (end - start))
"""


def test_an_altered_footer_of_a_snapshot_never_ends_the_process(tmp_path: Path) -> None:
    lake = Lake.create(tmp_path / "lake")
    write_capture(lake, 0, rollout_id=0)
    lake.snapshot()
    command = [sys.executable, "-c", ALTERED_SEGMENT, str(lake.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]
    refused, tried = map(int, done.stdout.split())
    assert refused > tried // 4
