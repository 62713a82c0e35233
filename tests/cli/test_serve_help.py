"""`octavo serve --help` is read by people: every option once, in its group, with what it takes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest
from octavo.cli.app import app
from typer.main import get_command


def help_of(command: str, columns: int = 120) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "octavo", command, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"COLUMNS": str(columns)},
    )
    assert done.stderr == ""
    return done.stdout


def groups_of(text: str) -> dict[str, str]:
    parts = re.split(r"^(\w[\w, ]+):$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_serve_is_in_groups() -> None:
    text = help_of("serve")
    groups = groups_of(text)
    assert list(groups) == [
        "Arguments", "Options", "Engine", "Models", "Security", "Load", "Limits of a request",
        "Logs, metrics and traces", "Examples", "Exit codes",
    ]  # fmt: skip
    for option, group in {
        "--port": "Options",
        "--max-model-len": "Engine",
        "--admin-port": "Models",
        "--api-key-file": "Security",
        "--max-queue-requests": "Load",
        "--log-format": "Logs, metrics and traces",
    }.items():
        assert re.search(rf"^  {option} ", groups[group], re.MULTILINE), option
    assert "--port N " in text
    assert "(default: 8000)" in text
    assert "--[no-]enable-prefix-caching" in text
    assert "(default: yes)" in text
    assert not re.search(r"<\w|RANGE|\[default", text)
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("command", ["serve", "run", "chat", "plan", "bench"])
def test_every_option_is_there_once_and_says_what_it_is(command: str) -> None:
    text = help_of(command).split("\nExamples:")[0]
    options = [option for option in get_command(app).commands[command].params if option.param_type_name == "option"]
    assert len(options) > 15
    for option in options:
        name = option.opts[0]
        shown = re.findall(rf"^  (?:-\w, )?{name.replace('--', '--(?:.no-.)?')}(?=[ ,\n])", text, re.MULTILINE)
        assert len(shown) == 1, name
        assert option.help.strip().endswith(".") or option.name == "help", name


def test_it_can_be_narrow() -> None:
    assert max(map(len, help_of("serve", 60).split("\nExamples:")[0].splitlines())) <= 80


def test_examples_are_command_lines_that_are_taken() -> None:
    examples = [line.split() for line in groups_of(help_of("serve"))["Examples"].strip().splitlines()]
    assert len(examples) >= 4
    for program, command, *arguments in examples:
        assert (program, command) == ("octavo", "serve")
        get_command(app).commands["serve"].make_context("serve", arguments)


def test_exit_codes_are_those_that_it_says() -> None:
    """0 and what ends a start are tested with its log."""
    text = groups_of(help_of("serve"))["Exit codes"]
    assert re.findall(r"^  (\d)  ", text, re.MULTILINE) == ["0", "1", "2"]
    command = [sys.executable, "-m", "octavo", "serve", "any", "--load-format", "fake", "--port", "0"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        with process.stderr:
            assert any('"msg":"ready"' in line for line in process.stderr)
            process.send_signal(signal.SIGKILL)
            process.stderr.read()
        assert process.wait(10) == -signal.SIGKILL
    finally:
        process.kill()
        process.wait()
