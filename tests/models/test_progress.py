"""The progress bar shows itself on a terminal, when it is worth it."""

import io

import pytest

from pagedjax.models import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def drawn(stderr: io.StringIO, monkeypatch: pytest.MonkeyPatch, patience: float) -> str:
    monkeypatch.setattr("sys.stderr", stderr)
    monkeypatch.setattr(progress, "_PATIENCE", patience)
    with progress.progress_bar("Loading a model", 100) as advance:
        advance(40)
        advance(60)
    return stderr.getvalue()


def test_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Loading a model" in drawn(Terminal(), monkeypatch, patience=-1.0)


def test_nothing_for_quick_work(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "Loading" not in drawn(Terminal(), monkeypatch, patience=60.0)


def test_nothing_in_a_log_file(monkeypatch: pytest.MonkeyPatch) -> None:
    assert drawn(io.StringIO(), monkeypatch, patience=-1.0) == ""
