"""What `octavo serve` does about keys and open ports, through real processes."""

from __future__ import annotations

import re
import signal
import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from test_cli_commands import octavo, plain, serving

KEY = "a-secret-of-mine"


def status(url: str, key: str | None = None) -> int:
    request = urllib.request.Request(f"{url}/v1/models", headers={"X-Api-Key": key} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=10) as found:
            return int(found.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_port_for_others_needs_keys(host: str) -> None:
    done = octavo("serve", "fake", "--host", host, "--port", "0")
    assert done.returncode != 0
    assert "--api-key-file" in done.stderr
    assert "--insecure" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_or_that_nobody_wants_any() -> None:
    with serving("fake", "--host", "0.0.0.0", "--insecure") as (_, url, _printed):
        assert status(url) == 200


def test_a_key_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"me {KEY}\n")
    file.chmod(0o600)
    with serving("fake", "--host", "0.0.0.0", "--api-key-file", str(file), "--no-access-log") as (
        process,
        url,
        printed,
    ):
        assert (status(url), status(url, "another-secret"), status(url, KEY)) == (401, 401, 200)
        assert KEY not in printed
        # What is printed shows where the key goes.
        curl = re.search(r"curl .*\n.*'\n", printed)
        assert curl is not None
        done = subprocess.run(
            ["bash", "-c", f"curl -s {curl[0].removeprefix('curl').replace('KEY', KEY)}"],
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )
        assert '"choices"' in done.stdout
        assert 'api_key="KEY"' in printed
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
        assert KEY not in said


def test_a_broken_key_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(f"me {KEY} urgent\n")
    done = octavo("serve", "fake", "--port", "0", "--api-key-file", str(file))
    assert done.returncode != 0
    assert "line 1" in done.stderr
    assert KEY not in done.stderr
    assert "Traceback" not in done.stderr


def test_keys_of_the_environment() -> None:
    with serving("fake", OCTAVO_API_KEY=f"{KEY},other-secret-1") as (process, url, _):
        assert (status(url), status(url, KEY), status(url, "other-secret-1")) == (401, 200, 200)
        process.send_signal(signal.SIGINT)
        assert KEY not in process.communicate(timeout=20)[1]


def test_a_key_on_the_command_line_is_taken_with_a_warning() -> None:
    with serving("fake", "--api-key", KEY, "--no-access-log") as (process, url, _):
        assert (status(url), status(url, KEY)) == (401, 200)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=20)[1]
    assert "prefer --api-key-file" in said
    assert KEY not in said


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--ssl-keyfile", "x"], 2, "error: --ssl-certfile: a certificate is missing"),
        (["--ssl-certfile", "/nowhere.pem"], 1, "/nowhere.pem"),
        (["--allowed-origins", "*", "--allow-credentials"], 2, "error: --allow-credentials"),
        (["--allowed-hosts", "http://x"], 2, "error: --allowed-hosts"),
        (["--root-path", "llm"], 2, "error: --root-path"),
        (["--max-queue-requests", "0"], 2, "error: --max-queue-requests: 0"),
        (["--api-key", "short"], 2, "8 to 512"),
        (["--otlp-traces-endpoint", "xx"], 2, "error: --otlp-traces-endpoint: 'xx' is not the URL of a collector"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_a_model_is_loaded(
    arguments: list[str], code: int, said: str
) -> None:
    done = octavo("serve", "fake", "--port", "0", *arguments, FAKE_ENGINE_LOADING="30")
    assert done.returncode == code
    assert any(said in line for line in plain(done.stderr))
    assert "Traceback" not in done.stderr
