"""Files changed at random: refused, harmless or never a pass, and nothing breaks or takes long.

`make fuzz` does the same to 100,000 of them, others each time.
"""

import os
import resource
import shutil
import signal
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from itertools import count, cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trajreplay import Lake, TrajReplayError
from trajreplay.capture.importers import ImportOptions, import_files, importer_of, recognise

CASES = Path(__file__).parents[2] / "cases"
MUTATIONS = int(os.environ.get("MUTATIONS", "2000"))
SEEDED = "MUTATIONS" not in os.environ
CPU_LIMIT_S = 10.0
MEMORY_LIMIT_KIB = 400 << 10


@pytest.fixture(autouse=True)
def _hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


@cache
def files_of(folder: Path) -> list[Path]:
    return sorted(one.relative_to(folder) for one in folder.rglob("*") if one.is_file())


def _dumps() -> list[Path]:
    """Folders of which each is of one kind."""
    found: list[Path] = []
    for folder in sorted((CASES / "dumps").iterdir()):
        try:
            recognise([folder])
            found.append(folder)
        except TrajReplayError:  # of several kinds
            found += sorted((folder / "outputs").iterdir())
    return found


def _folders(name: str) -> list[Path]:
    return sorted(one for one in (CASES / name).iterdir() if one.is_dir() and files_of(one))


SAMPLES = {"bundles": _folders("relax_bundles"), "traces": _folders("r3_traces"), "dumps": _dumps()}
KINDS = {"bundles": "relax-bundle", "traces": "nemo-rl-r3"}
SHARES = {"bundles": 0.6, "traces": 0.1, "dumps": 0.3}


def contents(value: Any) -> Any:
    """Values that are equal exactly if what was read is; where from and with which notes is not."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if is_dataclass(value) and not isinstance(value, type):
        names = (one.name for one in fields(value) if one.name not in ("notes", "run_id"))
        return type(value).__name__, [contents(getattr(value, name)) for name in names]
    if isinstance(value, dict):
        return [(name, contents(one)) for name, one in value.items()]
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [contents(one) for one in value]
    return repr(value)


def read(folder: Path, kind: str, options: ImportOptions) -> list[Any]:
    importer = importer_of(kind)
    sources = list(importer.find(folder))
    return [contents(record) for one in sources for record in importer.read(one, options)]


@contextmanager
def within_cpu_time(limit_s: float) -> Iterator[None]:
    """Interrupt what takes more; the clock stands while other programs run."""

    def stop(_signal: int, _frame: object) -> None:
        raise AssertionError(f"more than {limit_s} s of processor time")

    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


@st.composite
def mutations(draw: st.DrawFn, data: bytes) -> bytes:
    """A file cut off, with bits or bytes changed, or with a piece lost, doubled or put in."""
    found = bytearray(data)
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, max(len(found) - 1, 0)))
        size = draw(st.sampled_from((1, 2, 8, 40)))
        how = draw(st.sampled_from(("bit", "byte", "cut", "lose", "double", "put")))
        if how == "bit" and found:
            found[place] ^= 1 << draw(st.integers(0, 7))
        elif how == "byte" and found:
            found[place] = draw(st.integers(0, 255))
        elif how == "cut":
            del found[place:]
        elif how == "lose":
            del found[place : place + size]
        elif how == "double":
            found[place:place] = found[place : place + size]
        else:
            found[place:place] = draw(st.binary(min_size=1, max_size=size))
    return bytes(found)


@dataclass
class Sample:
    """A copy of a sample, of which one file at a time is another.

    Args:
        folder: The copy.
        kind: What it is imported as.
        options: What is said beside its files.
        whole: What is read from it as it is; None if it is refused.
    """

    folder: Path
    kind: str
    options: ImportOptions
    whole: list[Any] | None = None

    def spoil(self, name: Path, content: bytes) -> str:
        """Check what becomes of the sample with other content in one file, and name it."""
        path = self.folder / name
        before = path.read_bytes()
        try:
            write(path, content)
            return self.outcome()
        finally:
            write(path, before)

    def outcome(self) -> str:
        try:
            found = read(self.folder, self.kind, self.options)
        except TrajReplayError:
            return "refused"
        if found == self.whole:
            return "harmless"
        try:
            with Lake.of_files(self.folder, kind=self.kind, options=self.options) as lake:
                report = lake.replay()
        except TrajReplayError:
            return "refused"
        assert report.exit_code in (1, 3), "a pass on altered data"
        return "altered"


_TIMES = count(1)


def write(path: Path, content: bytes) -> None:
    """Write a file at a time of its own, however short after another."""
    path.write_bytes(content)
    os.utime(path, ns=(0, next(_TIMES)))


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Sample]]:
    root = tmp_path_factory.mktemp("spoilt")
    found: dict[str, list[Sample]] = {group: [] for group in SAMPLES}
    for group, folders in SAMPLES.items():
        for folder in folders:
            copy = root / group / folder.name
            shutil.copytree(folder, copy, symlinks=True)
            kind = KINDS.get(group) or recognise([copy]).kind
            # What is stated makes stages of a dump comparable; no archive of torch can be altered
            # unseen, and of files of text nothing is comparable whatever is stated.
            stated = ImportOptions(profile="slime") if kind == "slime" else ImportOptions()
            sample = Sample(copy, kind, stated)
            with suppress(TrajReplayError):
                sample.whole = read(copy, kind, stated)
            found[group].append(sample)
    return found


@pytest.mark.parametrize("group", SAMPLES)
def test_whatever_a_file_has_become_nothing_breaks_and_nothing_altered_passes(
    group: str, samples: dict[str, list[Sample]]
) -> None:
    examples = round(MUTATIONS * SHARES[group])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    outcomes: Counter[str] = Counter()

    @settings(
        max_examples=examples,
        derandomize=SEEDED,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def spoil(data: st.DataObject) -> None:
        sample = data.draw(st.sampled_from(samples[group]))
        name = data.draw(st.sampled_from(files_of(sample.folder)))
        content = data.draw(mutations((sample.folder / name).read_bytes()))
        with within_cpu_time(CPU_LIMIT_S):
            outcomes[sample.spoil(name, content)] += 1

    spoil()
    assert outcomes.total() >= examples
    assert outcomes["refused"] > examples / 8
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < MEMORY_LIMIT_KIB


def test_a_dump_of_torch_that_is_cut_anywhere_is_refused(samples: dict[str, list[Sample]]) -> None:
    chosen = [one for one in samples["dumps"] if one.kind == "slime"]
    for sample in chosen:
        for name in files_of(sample.folder):
            data = (sample.folder / name).read_bytes()
            for place in range(0, len(data), max(len(data) // 40, 1)):
                assert sample.spoil(name, data[:place]) == "refused"


def read_of(sample: Sample) -> set[str]:
    """The files that are read of a sample; others lie beside them."""
    importer = importer_of(sample.kind)
    report = import_files(None, importer, [sample.folder], sample.options)
    return {file for one in report.sources for file in one.files}


@pytest.mark.parametrize("group", SAMPLES)
def test_every_file_of_every_sample_is_cut_and_is_refused_or_no_pass(
    group: str, samples: dict[str, list[Sample]]
) -> None:
    turns = cycle((0, 1, 2, 3))
    outcomes: Counter[str] = Counter()
    for sample in samples[group]:
        for name in files_of(sample.folder):
            data = (sample.folder / name).read_bytes()
            places = [0, len(data) // 3, 2 * len(data) // 3, len(data) - 1]
            if sample.whole is None:
                places[3] //= 2  # of a broken one the last byte may be what is too much
            for place in places if group == "dumps" else (places[next(turns)],):
                found = sample.spoil(name, data[: max(place, 0)])
                outcomes[found] += 1
                # The last byte may be the end of a line.
                if found == "harmless" and place < len(data) - 1:
                    assert str(sample.folder / name) not in read_of(sample)
    assert outcomes["refused"] > outcomes.total() / 2


@pytest.mark.parametrize("group", SAMPLES)
def test_no_verb_passes_over_what_was_cut(group: str, samples: dict[str, list[Sample]]) -> None:
    turns = count()
    for sample in samples[group]:
        names = files_of(sample.folder)
        path = sample.folder / names[next(turns) % len(names)]
        data = path.read_bytes()
        try:
            write(path, data[: len(data) // 2])
            with Lake.of_files(sample.folder, kind=sample.kind, options=sample.options) as lake:
                assert lake.replay().exit_code in (1, 3)
                assert lake.explain().report.exit_code in (1, 3)
                assert lake.imported is not None
                changed = lake.imported.refused
                assert not (changed and lake.validate().ok)
                assert not (changed and not lake.what_if({"loss.eps_clip": 0.1}).refused)
        except TrajReplayError:
            pass
        finally:
            write(path, data)
