"""What an installation contains, and what starting the command line loads."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path, PurePosixPath
from tarfile import TarFile

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).parents[1]
FOLDERS = ("schema", "writer", "query", "stages", "capture", "cli")


def files_under(folder: Path) -> list[Path]:
    """List the files that belong to a folder, its links and what Python leaves there aside."""
    children = [path for path in sorted(folder.iterdir()) if not path.is_symlink()]
    files = [path for path in children if path.is_file()]
    inner = [path for path in children if path.is_dir() and path.name != "__pycache__"]
    return files + [file for path in inner for file in files_under(path)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built by the backend itself: nothing is fetched."""
    return Path(next(WheelBuilder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("dist")))))


def test_the_wheel_holds_the_tree_and_nothing_else(wheel: Path) -> None:
    expected = [
        PurePosixPath("trajreplay", folder, path.relative_to(ROOT / folder).as_posix())
        for folder in FOLDERS
        for path in files_under(ROOT / folder)
    ]
    package = ROOT / "src" / "trajreplay"
    expected += [
        PurePosixPath("trajreplay", path.relative_to(package).as_posix())
        for path in files_under(package)
    ]
    with zipfile.ZipFile(wheel) as archive:
        found = [PurePosixPath(name) for name in archive.namelist()]
    packed = [path for path in found if not path.parts[0].endswith(".dist-info")]
    assert sorted(packed) == sorted(expected)


def test_the_source_distribution_rebuilds_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    sdist = next(SdistBuilder(str(ROOT)).build(directory=str(tmp_path)))
    with TarFile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    rebuilt = next(WheelBuilder(str(unpacked)).build(directory=str(tmp_path)))
    with zipfile.ZipFile(wheel) as first, zipfile.ZipFile(rebuilt) as second:
        assert sorted(first.namelist()) == sorted(second.namelist())


def test_every_folder_has_its_link_beside_the_package() -> None:
    package = ROOT / "src" / "trajreplay"
    links = {path.name: path.resolve() for path in package.iterdir() if path.is_symlink()}
    assert links == {folder: ROOT / folder for folder in FOLDERS}


def modules_loaded_by(statement: str) -> set[str]:
    """Run a statement in a fresh interpreter and report the top-level modules that it loaded."""
    report = (
        "import json, sys; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    program = f"import atexit\natexit.register(lambda: exec({report!r}))\n{statement}"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT.parent
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_help_loads_no_torch() -> None:
    loaded = modules_loaded_by("from trajreplay.cli.main import main; main(['--help'])")
    assert not loaded & {"torch", "duckdb", "polars"}


def test_importing_the_package_loads_no_dependency() -> None:
    loaded = modules_loaded_by("import trajreplay")
    assert not loaded & {"torch", "duckdb", "polars", "pyarrow", "numpy", "click"}


def test_every_exported_name_resolves() -> None:
    import trajreplay

    missing = [name for name in trajreplay.__all__ if not hasattr(trajreplay, name)]
    assert not missing
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = trajreplay.nonsense
