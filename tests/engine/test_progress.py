"""The progress bar: for people, and only when there is something to wait for."""

from __future__ import annotations

import io
import sys

import pytest
from octavo.engine import progress
from octavo.engine.progress import ProgressBar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, patience_s: float, *, enabled: bool = True) -> str:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "_PATIENCE_S", patience_s)
    with ProgressBar("Answers", 10, enabled=enabled) as bar:
        bar.update(3, "17 tokens/s")
        bar.stage("weights", 5, 0)
    return stream.getvalue()


def test_long_work_on_a_terminal_shows_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    text = shown(monkeypatch, Terminal(), 0.0)
    assert "Answers" in text or "weights" in text


def test_short_work_pipes_and_the_unasked_stay_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, Terminal(), 60.0) == ""
    assert shown(monkeypatch, io.StringIO(), 0.0) == ""
    assert shown(monkeypatch, Terminal(), 0.0, enabled=False) == ""
