"""The command line, through real processes with a fake engine."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cli_fakes import CommandEngine
from octavo.cli import main, vllm_arguments
from octavo.cli.options import parse_bytes
from octavo.engine import async_engine
from typer.main import get_command

FAKES = str(Path(__file__).with_name("cli_fakes.py"))
REPLY = "Hello, wörld! 🎉 数据 and more. "


def octavo(*arguments: str, stdin: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, FAKES, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
        check=False,
    )


def plain(printed: str) -> list[str]:
    """Lines of standard error as people see them: off a terminal `octavo serve` says the same in JSON."""
    lines = printed.strip().splitlines()
    return [f"error: {json.loads(line)['msg']}" if line.startswith("{") else line for line in lines]


@contextmanager
def serving(*arguments: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str, str]]:
    """A server that is ready: process, address, all it printed to a terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, FAKES, "serve", *arguments, "--port", "0", "--log-format", "console"],
        stdout=theirs,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )
    os.close(theirs)
    try:
        with os.fdopen(ours, encoding="utf-8") as terminal:
            printed = ""
            while "print(" not in printed:
                try:
                    printed += terminal.readline()
                except OSError:  # the other end is closed
                    raise AssertionError(process.stderr.read()) from None
            yield process, re.search(r"http://\S+?:\d+", printed)[0], printed
    finally:
        process.kill()
        process.communicate()


def test_version_and_help() -> None:
    from octavo import __version__

    assert octavo("--version").stdout == f"octavo {__version__}\n"
    done = octavo("--help")
    assert done.returncode == 0
    for command in ("serve", "run", "chat", "plan", "bench"):
        assert re.search(rf"^  {command} ", done.stdout, re.MULTILINE)
    assert "--max-num-batched-tokens" in octavo("serve", "--help").stdout


def test_without_a_command_it_shows_the_help() -> None:
    done = octavo()
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.rstrip() == octavo("--help").stdout.rstrip()


def test_help_of_bench_names_the_workloads() -> None:
    from octavo.bench.command import BENCHES

    text = " ".join(octavo("bench", "--help").stdout.split())
    *first, last = BENCHES
    assert f"{', '.join(first)} or {last};" in text


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("1TiB", 1 << 40),
        ("1.5 TiB", 3 << 39),
        ("2T", 2 * 10**12),
        ("2tb", 2 * 10**12),
        ("8G", 8 * 10**9),
        ("8GiB", 8 << 30),
        ("3M", 3 * 10**6),
        ("512MiB", 512 << 20),
        ("5K", 5000),
        ("5KiB", 5 << 10),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert parse_bytes(text, "kv_cache_memory") == size


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom octavo.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "heavy = ('torch', 'transformers', 'starlette', 'uvicorn', 'numpy', 'rich.console', 'msgspec')\n"
        "sys.stderr.write(str([name for name in heavy if name in sys.modules]))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stderr == "[]"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["frobnicate"], 2, "frobnicate"),
        (["serve"], 2, "model"),
        (["serve", "fake", "--port", "x"], 2, "--port"),
        (["serve", "fake", "--port", "70000"], 2, "--port: '70000' should be less than or equal to 65535"),
        (["serve", "fake", "other", "--served-model-name", "x"], 2, "--served-model-name: only for a single model"),
        (["serve", "fake", "--log-level", "loud"], 2, "error: --log-level: 'loud'"),
        (["serve", "fake", "--api-key", "short"], 2, "error: --api-key, key 1: "),
        (["serve", "fake", "--no-such-flag"], 2, "--no-such-flag"),
        # Mistakes are told by the flag, whatever the setting behind it is called.
        (["serve", "fake", "--block-size", "7"], 2, "error: --block-size: 7"),
        (["serve", "fake", "--dtype", "int3"], 2, "error: --dtype: 'int3'"),
        (["serve", "fake", "--device", "tpu"], 2, "error: --device: 'tpu'"),
        (["serve", "fake", "--kv-cache-memory", "much"], 2, "error: --kv-cache-memory: 'much'"),
        (["serve", "fake", "--trust-remote-code"], 2, "error: --trust-remote-code: "),
        (["serve", "fake", "--gpu-memory-utilization", "nan"], 2, "error: --gpu-memory-utilization: nan"),
        (["serve", "fake", "--host", "no.such.host.invalid"], 1, "error: --host: 'no.such.host.invalid'"),
        (["serve", "fake", "--uvicorn-log-level", "loud"], 2, "error: --uvicorn-log-level: 'loud'"),
        (["serve", "fake", "--max-model-len", "1"], 2, "error: --max-model-len: 1"),
        (["serve", "fake", "--max_model_len=1"], 2, "error: --max-model-len: 1"),
        (["serve", "fake", "--num-gpu-blocks-override", "0"], 2, "error: --num-gpu-blocks-override: 0"),
        (["serve", "fake", "--sse-keep-alive-interval", "-1"], 2, "error: --sse-keep-alive-interval: -1"),
        (
            ["serve", "fake", "--max-num-batched-tokens=4", "--max-num-seqs=5"],
            2,
            "4 is less than --max-num-seqs (5)",
        ),
        (["serve", "fake", "--api-processes", "2", "--idle-unload", "5"], 2, "error: --idle-unload: models cannot"),
        (["serve", "fake", "--tensor-parallel-size", "2"], 2, "error: --tensor-parallel-size: Octavo has no such flag"),
        (["serve", "fake", "-tp", "2"], 2, "error: -tp: Octavo has no such flag; an engine runs on one GPU"),
        (["serve", "fake", "-O3"], 2, "error: -O3: Octavo has no such flag; a GPU's steps are CUDA graphs"),
        (
            ["serve", "fake", "--api_server_count=2"],
            2,
            "error: --api-server-count: Octavo has no such flag; use --api-",
        ),
        (["serve", "fake", "--no-enable-chunked-prefill"], 2, "error: --no-enable-chunked-prefill: Octavo has no such"),
        (["run", "fake", ""], 1, "prompt: empty"),
        (["run", "fake", "x", "--temperature", "-1"], 2, "error: --temperature: -1"),
        (["run", "fake", "x", "--temperature", "nan"], 2, "error: --temperature: nan"),
        (["run", "fake", "x", "--sampling-seed", str(1 << 63)], 2, f"error: --sampling-seed: {1 << 63}"),
        (["run", "fake", "x" * 300], 1, "context of 256"),
        (["chat", "missing"], 1, "model: there is no 'missing'"),
        (["plan", "/no/such/model"], 1, "/no/such/model"),
        (["bench", "nothing"], 1, "there is no 'nothing'"),
        (["bench", "serve", "--base-url", "ftp://x"], 1, "error: --base-url: 'ftp://x'"),
        (["bench", "serve", "--base-url", "http://127.0.0.1:9"], 1, "127.0.0.1:9"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: list[str],
    code: int,
    text: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(async_engine, "AsyncEngine", CommandEngine)
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == code
    printed = capfd.readouterr()
    *before, last = plain(printed.err)
    assert last.startswith("error: ")
    assert text in last
    assert all(line.startswith("[prompt ") for line in before)
    assert printed.out == ""


@pytest.mark.parametrize("command", [["serve", "fake"], ["run", "fake", "x"], ["chat", "fake"], ["plan", "fake"]])
@pytest.mark.parametrize(
    ("flag", "value", "remedy"),
    [
        ("--dtype", "floaty", "'floaty' is not one of auto, bfloat16, float16, float32"),
        (
            "--gpu-memory-utilization",
            "1.5",
            "1.5 is not in (0, 1]; it is the share of the device's free ",
        ),
        ("--gpu-memory-utilization", "90%", "'90%' should be a valid number, such as 0.9"),
        ("--kv-cache-memory", "1xyz", "'1xyz' is no size; give bytes, or such as 512MiB or 2GB"),
        ("--block-size", "17", "17 is not a multiple of 16; use 16 or 32"),
        ("--block-size", "x", "'x' should be a valid integer, such as 16"),
        ("--max-model-len", "4k", "'4k' should be a valid integer"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_right(
    command: list[str], flag: str, value: str, remedy: str, capfd: pytest.CaptureFixture[str]
) -> None:
    for arguments in ([*command, flag, value], [*command, f"{flag}={value}"]):
        with pytest.raises(SystemExit) as exited:
            main(arguments)
        (said,) = plain(capfd.readouterr().err)
        assert said.startswith(f"error: {flag}: {remedy}")
        assert exited.value.code == 2


def test_every_missing_flag_is_told_at_once(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "fake", "--tensor-parallel-size=2", "--enforce-eager", "-q", "awq", "--port", "0"])
    lines = plain(capfd.readouterr().err)
    assert [line.split(": ")[1] for line in lines] == ["--tensor-parallel-size", "--enforce-eager", "-q"]


def test_no_flag_is_both_there_and_missing() -> None:
    from octavo.cli.app import app

    there = {name for option in get_command(app).commands["serve"].params for name in option.opts}
    assert not there & vllm_arguments._INSTEAD.keys()
    assert set(vllm_arguments._SHORT.values()) <= vllm_arguments._INSTEAD.keys()
    # Every flag that a text sends its reader to is there; these are of `hf download`.
    there |= {name for option in get_command(app).commands["serve"].params for name in option.secondary_opts}
    named = {flag for text in vllm_arguments._INSTEAD.values() for flag in re.findall(r"(?<![\w-])--[a-z-]+", text)}
    assert "--admin-port" in named
    assert named - there == {"--revision", "--local-dir"}


def test_a_mistake_in_a_file_is_told_by_its_key(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "serve.toml"
    file.write_text('[models.fake]\nmodel = "fake"\nmax_model_len = 1\n')
    with pytest.raises(SystemExit):
        main(["serve", "--config", str(file)])
    (said,) = plain(capfd.readouterr().err)
    assert said == f"error: {file}: models.fake.max_model_len: 1 is too small; use 2 or more"


def test_a_mistake_ends_the_process() -> None:
    done = octavo("serve", "missing", "--port", "0", "--log-format", "console")
    assert done.returncode == 1
    starting, complaint = done.stderr.splitlines()
    assert " octavo.server: starting version=" in starting
    assert complaint == "error: model: there is no 'missing'"


def test_debug_shows_the_traceback() -> None:
    done = octavo("serve", "missing", "--port", "0", "--log-format", "console", OCTAVO_DEBUG="1")
    assert "Traceback" in done.stderr
    done = octavo("serve", "missing", "--port", "0", OCTAVO_DEBUG="1")
    said = [json.loads(line) for line in done.stderr.splitlines()][-1]
    assert said["msg"] == "model: there is no 'missing'"
    assert "Traceback" in said["exception"]


def test_run_streams_the_answer() -> None:
    done = octavo("run", "fake", "Hi", "--max-tokens", "20", "--temperature", "0")
    assert done.returncode == 0
    assert done.stdout == REPLY[:20] + "\n"
    assert done.stderr == "[prompt '<user>Hi<assistant>' 20 0]\n"


def test_run_variants() -> None:
    assert "[prompt 'Hi' 5 1]" in octavo("run", "fake", "Hi", "--raw", "--max-tokens", "5").stderr
    assert "[prompt 'Hi' 256 1]" in octavo("run", "fake", "Hi", "--raw").stderr
    done = octavo("run", "fake", "-", "--system", "Be brief", "--max-tokens", "5", stdin="From a pipe")
    assert "[prompt '<system>Be brief<user>From a pipe<assistant>' 5 1]" in done.stderr


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} {FAKES} run fake Hi --raw | head -c 3"
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "FAKE_ENGINE_DELAY": "0.002"},
        check=True,
    )
    assert done.stdout == REPLY[:3]
    assert done.stderr == "[prompt 'Hi' 256 1]\n"


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_that_are_closed(closed: str) -> None:
    command = f'exec "$0" "$1" run fake hi --max-tokens 5 {closed}'
    ended = subprocess.run(
        ["/bin/sh", "-c", command, sys.executable, FAKES], capture_output=True, text=True, timeout=60, check=False
    )
    assert (ended.returncode, "error" in ended.stderr) == (0, False)
    assert ended.stdout == ("" if " >&-" in f" {closed}" else "Hello\n")


def test_an_encoding_that_lacks_characters() -> None:
    ended = octavo("run", "fake", "hi", "--max-tokens", "15", PYTHONIOENCODING="ascii")
    assert (ended.returncode, ended.stdout) == (0, "Hello, w?rld! ?\n")


def test_chat_over_a_pipe() -> None:
    script = "One\n\n/system Be kind\nTwo\nThree\n/clear\nFour\n/what\n/help\n/exit\nnever\n"
    done = octavo("chat", "fake", "--max-tokens", "5", stdin=script)
    assert done.returncode == 0
    assert done.stdout == (REPLY[:5] + "\n") * 4
    prompts = re.findall(r"\[prompt '(.*)' 5 1\]", done.stderr)
    assert prompts == [
        "<user>One<assistant>",
        "<system>Be kind<user>Two<assistant>",
        f"<system>Be kind<user>Two<assistant>{REPLY[:5]}<user>Three<assistant>",
        "<system>Be kind<user>Four<assistant>",
    ]
    assert "/what: no such command" in done.stderr
    assert "/clear " in done.stderr


def test_chat_message_of_several_lines() -> None:
    done = octavo("chat", "fake", "--max-tokens", "5", stdin='"""One\nTwo"""\n')
    assert r"<user>One\nTwo<assistant>" in done.stderr


def test_chat_survives_a_conversation_that_is_too_long() -> None:
    done = octavo("chat", "fake", "--max-tokens", "5", stdin=f"{'x' * 300}\nHi\n")
    assert done.returncode == 0
    assert "error: prompt: " in done.stderr
    assert done.stdout == REPLY[:5] + "\n"


def test_serve_says_how_to_use_it() -> None:
    with serving(
        "fake", "--served-model-name", "one", "--served-model-name", "two", "--no-access-log", "--drain-delay", "0"
    ) as (
        process,
        url,
        printed,
    ):
        assert f"Serving one, two at {url}" in printed
        assert "KV cache 1,024 tokens" in printed
        # The printed commands are to work as they are.
        curl = re.search(r"curl .*\n.*'\n", printed)[0]
        done = subprocess.run(["bash", "-c", f"{curl} -s"], capture_output=True, text=True, timeout=30, check=False)
        assert json.loads(done.stdout)["choices"][0]["message"]["content"].startswith(REPLY)
        snippet = printed[printed.index("from openai") :]
        done = subprocess.run([sys.executable, "-c", snippet], capture_output=True, text=True, timeout=60, check=False)
        assert done.stdout.startswith(REPLY), done.stderr
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert process.stderr.read() == ""


@pytest.mark.parametrize("command", [["octavo", "serve"], ["octavo.entrypoints.openai.api_server"]])
def test_vllms_way_of_naming_the_model(command: list[str]) -> None:
    from octavo.cli.vllm_arguments import serve_arguments

    assert serve_arguments(["--port", "1", "--model", "m", "--seed", "2"]) == [
        "serve", "--port", "1", "--seed", "2", "--", "m",
    ]  # fmt: skip
    assert serve_arguments(["--model=m"]) == ["serve", "--", "m"]
    assert serve_arguments(["a", "--model", "b@v1=m", "--model=c"]) == ["serve", "a", "--", "b@v1=m", "c"]
    done = subprocess.run(
        [sys.executable, "-m", *command, "--model", "/no/such", "--port", "0"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "/no/such" in done.stderr


def test_port_in_use_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = octavo("serve", "fake", "--port", str(port), FAKE_ENGINE_LOADING="50")
    assert done.returncode == 1
    said = f"--port: {port} is in use on 127.0.0.1; choose another with --port, or 0 for any"
    assert json.loads(done.stderr)["msg"] == said


def test_an_address_of_another_machine() -> None:
    done = octavo("serve", "fake", "--host", "192.0.2.1")
    assert done.returncode == 1
    assert json.loads(done.stderr)["msg"].startswith("--host: 192.0.2.1 ")


def refused(url: str) -> urllib.error.HTTPError:
    """The error that `url` answers with, as soon as it answers."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except urllib.error.HTTPError as error:
            return error
        except OSError:
            time.sleep(0.02)
    pytest.fail("no error came")


def test_the_port_answers_while_the_model_loads() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, FAKES, "serve", "fake", "--port", str(port)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "FAKE_ENGINE_LOADING": "50"},
    )
    try:
        with refused(f"http://127.0.0.1:{port}/health") as error:
            assert error.code == 503
            assert json.load(error)["error"]["code"] == "model_loading"
            assert error.headers["retry-after"] == "1"
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_answers_finish(number: signal.Signals) -> None:
    with serving("fake", "--max-model-len", "100000", "--drain-delay", "0", FAKE_ENGINE_DELAY="0.01") as (
        process,
        url,
        _,
    ):
        body = json.dumps({"prompt": "Hi", "max_tokens": 100, "stream": True}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as response:
            response.readline()
            process.send_signal(number)
            text = response.read().decode()
        assert text.count('"text"') == 99
        assert text.endswith("data: [DONE]\n\n")
        assert process.wait(10) == 0


def test_a_signal_cuts_answers_short_after_the_grace() -> None:
    options = ("--max-model-len", "100000", "--shutdown-timeout", "0.3", "--drain-delay", "0", "--no-access-log")
    with serving("fake", *options, FAKE_ENGINE_DELAY="0.01") as (process, url, _):
        body = json.dumps({"prompt": "Hi", "max_tokens": 90000, "stream": True}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=20) as response:
            response.readline()
            process.send_signal(signal.SIGTERM)
            events = response.read().decode().strip().split("\n\n")
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "server_stopping"
        assert events[-1] == "data: [DONE]"
        assert process.wait(10) == 0
        assert process.stderr is not None
        assert process.stderr.read() == "stopping: 1 running answer may take 0.3 s more (Ctrl-C: none)\n"
