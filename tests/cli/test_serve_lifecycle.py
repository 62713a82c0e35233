"""`octavo serve` from its first moment to its last, as probes, balancers and service managers see it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from octavo.server.transport.listen import bind

FAKES = str(Path(__file__).with_name("cli_fakes.py"))
ADMIN_KEY = "the-key-of-the-admin"


def free_port() -> int:
    with bind("127.0.0.1", 0) as listener:
        return int(listener.getsockname()[1])


@contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A server that has been started, and may not be ready."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, FAKES, "serve", *arguments, "--port", str(port), "--no-access-log"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client:
            yield process, client
    finally:
        process.kill()
        process.communicate()


def wait_for(what: Callable[[], Any], seconds: float = 20.0) -> Any:
    end = time.monotonic() + seconds
    while True:
        try:
            if value := what():
                return value
        except httpx.TransportError:
            pass
        assert time.monotonic() < end
        time.sleep(0.01)


def readiness(client: httpx.Client) -> str:
    return str(client.get("/readyz").json()["status"])


def complete(client: httpx.Client, **fields: Any) -> httpx.Response:
    return client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 2, **fields})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_model_loads(number: signal.Signals) -> None:
    with serving("fake", FAKE_ENGINE_LOADING="60") as (process, client):
        wait_for(lambda: readiness(client) == "loading")
        wait_for(lambda: client.get("/readyz").json()["progress"] == 0.5)
        assert client.get("/readyz").status_code == 503
        assert client.get("/livez").status_code == 200
        began = time.monotonic()
        process.send_signal(number)
        # There is nobody to wait for: no delay for balancers, no grace.
        assert process.wait(10) == 0
        assert time.monotonic() - began < 3


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_as_soon_as_it_starts(number: signal.Signals) -> None:
    with serving("fake", FAKE_ENGINE_LOADING="60") as (process, _):
        assert any('"starting"' in line for line in process.stdout)
        process.send_signal(number)
        output, _ = process.communicate(timeout=10)
        said = [json.loads(line)["msg"] for line in output.splitlines() if line.startswith("{")]
        assert (process.returncode, said[-2:]) == (0, ["stopping", "stopped"])


def test_sigterm_tells_balancers_first_then_refuses_then_ends() -> None:
    options = ("--drain-delay", "1.5", "--shutdown-timeout", "20", "--max-model-len", "100000")
    with serving("fake", *options, FAKE_ENGINE_DELAY="0.01") as (process, client):
        wait_for(lambda: readiness(client) == "ready")
        answers: list[httpx.Response] = []

        def long() -> None:
            answers.append(httpx.post(client.base_url.join("/v1/completions"), json=LONG, timeout=30))

        running = threading.Thread(target=long)
        running.start()
        wait_for(lambda: "num_requests_running" in client.get("/metrics").text)
        time.sleep(0.2)
        process.send_signal(signal.SIGTERM)
        wait_for(lambda: readiness(client) == "draining", 1)
        assert client.get("/health").status_code == 503
        assert client.get("/livez").status_code == 200
        # Balancers have not noticed yet: what they send is answered.
        assert complete(client).status_code == 200
        refused = wait_for(lambda: (got := complete(client)).status_code == 503 and got, 5)
        assert refused.json()["error"]["code"] == "server_stopping"
        assert refused.headers["retry-after"]
        assert readiness(client) == "draining"
        running.join(20)
        assert answers[0].json()["usage"]["completion_tokens"] == 300
        assert process.wait(10) == 0


LONG = {"prompt": "Hi", "max_tokens": 300}


def test_a_second_signal_ends_at_once_with_an_error_event() -> None:
    options = ("--drain-delay", "30", "--shutdown-timeout", "30", "--max-model-len", "100000")
    with serving("fake", *options, FAKE_ENGINE_DELAY="0.01") as (process, client):
        wait_for(lambda: readiness(client) == "ready")
        body = {"prompt": "Hi", "max_tokens": 90000, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            events = [line for line in lines if line]
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "server_stopping"
        assert events[-1] == "data: [DONE]"
        assert process.wait(10) == 0


def test_several_models_an_alias_and_the_admin_listener(tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(
        '[server]\ndrain_delay = 0\n[models."m@v1"]\nmodel = "fake"\n[models."m@v2"]\nmodel = "fake"\n'
        'autostart = false\n[aliases]\nchat = { "m@v1" = 1, "m@v2" = 0 }\n',
        encoding="utf-8",
    )
    admin_port = free_port()
    options = ("other=fake", "--config", str(file), "--admin-port", str(admin_port), "--idle-unload", "60")
    with serving(*options, OCTAVO_ADMIN_KEY=ADMIN_KEY) as (process, client):
        wait_for(lambda: readiness(client) == "ready")
        names = [model["id"] for model in client.get("/v1/models").json()["data"]]
        assert names == ["other", "m@v1", "m@v2", "m", "chat"]
        assert complete(client).headers["x-model-version"] == "other"
        assert complete(client, model="chat").headers["x-model-version"] == "m@v1"
        admin = f"http://127.0.0.1:{admin_port}/admin"
        key = {"Authorization": f"Bearer {ADMIN_KEY}"}
        models = httpx.get(f"{admin}/models", headers=key).json()["models"]
        assert [(model["id"], model["state"]) for model in models] == [
            ("other", "ready"),
            ("m@v1", "ready"),
            ("m@v2", "unloaded"),
        ]
        assert models[0]["keep_alive"] == 60
        assert httpx.get(f"{admin}/models").status_code == 401
        swapped = httpx.post(f"{admin}/models/swap", json={"model": "chat", "to": "m@v2"}, headers=key, timeout=20)
        assert swapped.status_code == 200, swapped.text
        assert complete(client, model="chat").headers["x-model-version"] == "m@v2"
        process.send_signal(signal.SIGTERM)
        output, _ = process.communicate(timeout=10)
        assert process.returncode == 0
        (ready,) = [line for line in map(json.loads, output.splitlines()) if line["msg"] == "ready"]
        assert ready["models"] == ["other", "m@v1", "m@v2", "m", "chat"]
        assert (ready["address"], ready["admin_address"]) == (str(client.base_url), admin.removesuffix("/admin"))
        assert ADMIN_KEY not in output


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (("fake", "--admin-port", "0"), 1, "--admin-port: the admin listener needs a key; set OCTAVO_ADMIN_KEY"),
        (("fake", "missing"), 1, "model: there is no 'missing'"),
        (("fake", "fake"), 1, "models: `fake` appears twice; write NAME=MODEL"),
        (("fake", "--config", "/no/such.toml"), 1, "config: /no/such.toml cannot be read"),
        (("fake", "--model-memory", "much"), 2, "--model-memory: 'much' is no size"),
        (("fake", "--max-loaded-models", "0"), 2, "--max-loaded-models: 0"),
        (("fake", "--idle-unload", "-3"), 2, "--idle-unload: -3.0"),
    ],
)
def test_a_start_that_cannot_work_is_one_line(options: tuple[str, ...], code: int, text: str) -> None:
    with serving(*options) as (process, _):
        output, _ = process.communicate(timeout=20)
        assert process.returncode == code
        *_, last = map(json.loads, output.splitlines())
        assert (last["level"], last["exit_code"]) == ("critical", code)
        assert last["msg"].startswith(text)
        assert "Traceback" not in output
