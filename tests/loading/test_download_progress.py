from __future__ import annotations

import io

from octavo.loading.progress import progress_bar


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_callers_function_is_used():
    told = []
    with progress_bar(lambda *event: told.append(event)) as report:
        report("demo model", 1, 2)
    assert told == [("demo model", 1, 2)]


def test_a_bar_on_a_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    with progress_bar(None) as report:
        for done in (0, 500, 1000):
            report("demo model", done, 1000)
        report("of unknown size", 10, 0)
    assert "demo model" in terminal.getvalue()
    assert "of unknown size" in terminal.getvalue()


def test_nothing_in_a_log(monkeypatch):
    log = io.StringIO()
    monkeypatch.setattr("sys.stderr", log)
    with progress_bar(None) as report:
        report("demo model", 1, 2)
    assert log.getvalue() == ""
