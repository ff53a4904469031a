"""The progress bar: only for people, and only when there is something to wait for."""

import sys

import pytest

from trajreplay.cli.terminal.progress import ProgressBar


def watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make stderr look like a terminal."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")


def shown(label: str, capsys: pytest.CaptureFixture[str], *, quiet: bool = False) -> bool:
    with ProgressBar(label, quiet=quiet) as progress:
        progress(1, 3)
        progress(3, 3)
    captured = capsys.readouterr()
    assert captured.out == ""
    return label in captured.err


def test_nothing_is_shown_where_no_one_watches(capsys: pytest.CaptureFixture[str]) -> None:
    assert not shown("Replaying", capsys)


def test_short_work_shows_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch(monkeypatch)
    assert not shown("Replaying", capsys)


def test_long_work_shows_a_bar_unless_quiet(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    watch(monkeypatch)
    monkeypatch.setattr("trajreplay.cli.terminal.progress._PATIENCE_S", 0.0)
    assert shown("[red]Replaying", capsys)
    assert not shown("Replaying", capsys, quiet=True)
