"""What README.md shows works as it is shown; a model of a test stands in where one would have to be fetched."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from octavo.cli.app import app
from octavo.server.app import _MODULES
from octavo.server.state import ServerState
from serve_log import ServeLog
from typer.main import get_command

ROOT = Path(__file__).parents[2]
JSON = {"Content-Type": "application/json"}
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    found = re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    assert found
    return found


def commands() -> list[str]:
    """Every command after a `$`, with the lines that go on from it."""
    text = "".join(blocks("console"))
    return [command.replace("\\\n", " ").strip() for command in re.findall(r"^\$ ((?:.*\\\n)*.*)$", text, re.MULTILINE)]


def command_with(part: str) -> str:
    (found,) = [command for command in commands() if part in command]
    return found


@contextmanager
def serving(*options: str, **environment: str) -> Iterator[tuple[str, str | None]]:
    """A server of a fake model; its address and that of its admin listener."""
    command = [sys.executable, "-m", "octavo", "serve", "--load-format", "fake", "--port", "0", "--drain-delay", "0"]
    process = subprocess.Popen(
        [*command, *options], stderr=subprocess.PIPE, text=True, env=os.environ | environment, cwd=ROOT
    )
    log = ServeLog(process)
    try:
        yield log.address(), log.wait_for("ready").get("admin_address")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.wait()
        log.end()


def shell(command: str, **environment: str) -> str:
    done = subprocess.run(
        ["bash", "-euc", command], capture_output=True, text=True, timeout=60, env=os.environ | environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_request() -> None:
    with serving("demo") as (url, _):
        done = json.loads(
            shell(command_with("curl http://127.0.0.1:8000").replace("http://127.0.0.1:8000", f"-s {url}"))
        )
        assert done["choices"][0]["message"]["content"]
        client = blocks("python")[0]
        assert "stream=True" in client
        code = client.replace("http://127.0.0.1:8000", url)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout


def test_the_file_of_keys(tmp_path: Path) -> None:
    (block,) = [block for block in blocks("console") if block.startswith("$ cat keys")]
    text = block.partition("\n")[2].partition("$ ")[0]
    file = tmp_path / "keys"
    file.write_text(text)
    file.chmod(0o600)
    web, grafana = re.findall(r"^\w+ +(sk-\S+)", text, re.MULTILINE)
    (nightly,) = re.findall(r"printf %s (\S+)", text)

    def status(url: str, path: str, key: str) -> int:
        body = None if path == "/metrics" else b'{"model": "any", "prompt": "x", "max_tokens": 1}'
        request = urllib.request.Request(url + path, body, {"Authorization": f"Bearer {key}"} | JSON)
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            with error:
                return error.code

    with serving("any", "--host", "0.0.0.0", "--api-key-file", str(file)) as (url, _):
        assert [status(url, "/v1/completions", key) for key in (web, nightly, grafana, "other")] == [200, 200, 403, 401]
        assert status(url, "/metrics", grafana) == 200


def test_a_swap(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    (text,) = blocks("toml")
    file.write_text(re.sub(r'^model = ".*"', 'model = "fake"', text, flags=re.MULTILINE))
    key = "a-key-for-the-admin-of-tests"
    with serving("--config", str(file), "--admin-port", "0", OCTAVO_ADMIN_KEY=key) as (url, admin):
        assert admin is not None
        command = command_with("/admin/models/swap").replace("http://127.0.0.1:8001", f"-s {admin}")
        done = json.loads(
            shell(command.replace('"/models/next"', '"next", "engine": {"load_format": "fake"}'), OCTAVO_ADMIN_KEY=key)
        )
        assert "error" not in done, done
        with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
            names = [model["id"] for model in json.load(answer)["data"]]
        assert {"chat@v1", "chat@v3", "assistant"} <= set(names)


def test_every_command_can_be_given() -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    seen = set()
    for command in commands():
        for part in command.split("&&"):
            words = shlex.split(part, comments=True)
            program = Path(words[0]).name
            seen.add(program)
            if program == "make":
                assert words[1] in targets
            elif program == "octavo":
                get_command(app).commands[words[1]].make_context(words[1], words[2:])
            elif program in ("docker", "kubectl"):
                named = [word for word in words if word.startswith("deploy/")]
                assert all((ROOT / word).is_file() for word in named)
    assert seen >= {"make", "octavo", "curl", "docker", "kubectl"}


def test_what_it_names_is_there() -> None:
    """Flags, routes and files."""
    flags = {name for one in get_command(app).commands.values() for option in one.params for name in option.opts}
    flags |= {name for one in get_command(app).commands.values() for o in one.params for name in o.secondary_opts}
    others = {"--help", "--file", "--tag", "--from-file"}  # the latter of docker and kubectl
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    assert len(named) > 20
    assert named <= flags | others
    paths = {route.path for module in _MODULES for route in module.routes(ServerState())}
    for path in re.findall(r"`(/(?:v1|health|livez|readyz|ping|metrics|tokenize|docs|generate)[a-z_/]*)`", README):
        assert path in paths, path
    for file in re.findall(r"\]\(((?!http)[^)#]+)\)", README):
        assert (ROOT / file).exists(), file


@pytest.mark.demo
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [1, 2])
def test_programs_of_ones_own(number: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", blocks("python")[number]], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
