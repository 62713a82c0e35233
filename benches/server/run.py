"""What the API process costs: streamed chunks, their added latency, and short whole answers.

    python benches/server/run.py --json

Starts the API process (one core) over an engine that answers at once, and a load generator that counts. As the two,
and the engine's process, share whatever cores there are, the figure to compare is `chunks_per_api_cpu_s`: events sent
for each second of the API process's own CPU time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from load import load, served_port

API = Path(__file__).with_name("api.py")
SERVE_OPTIONS = (
    "--load-format",
    "fake",
    "--served-model-name",
    "fake",
    "--port",
    "0",
    "--drain-delay",
    "0",
    "--max-num-batched-tokens",
    "8192",
)
_PORT = re.compile(r"^(\d+)\b")
_MESSAGES = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


@contextlib.contextmanager
def api(options: argparse.Namespace, steps_per_s: float) -> Iterator[tuple[int, int]]:
    """An API process on one core: (its port, its process id)."""
    if options.serve:
        model = f"fake?step_ms={1000 / steps_per_s}" if steps_per_s else "fake"
        command = [sys.executable, "-m", "octavo", "serve", model, *SERVE_OPTIONS]
    else:
        command = [sys.executable, str(API), "--steps-per-s", str(steps_per_s), "--tokenizer", options.tokenizer]
        if options.profile:
            command += ["--profile", options.profile]
    log = tempfile.TemporaryFile("a+") if options.serve else None  # noqa: SIM115 (closed below)
    process = subprocess.Popen(command, stdout=None if options.serve else subprocess.PIPE, stderr=log, text=True)
    try:
        if log is not None:
            port = served_port(process, log)
        else:
            assert process.stdout is not None
            port = next((int(found.group(1)) for line in process.stdout if (found := _PORT.search(line))), 0)
            if not port:
                raise SystemExit("the API process did not start")
        if options.core is not None:
            # Its threads; what it started stays with the load generator.
            for task in Path(f"/proc/{process.pid}/task").iterdir():
                os.sched_setaffinity(int(task.name), {options.core})
        yield port, process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)
        if log is not None:
            log.close()


def measure(options: argparse.Namespace, what: str, chunks_per_s: float) -> dict[str, Any]:
    """One figure."""
    stream = what == "stream"
    tokens = options.tokens if stream else options.short_tokens
    clients = options.streams if stream else options.clients
    body = {
        "model": "fake",
        "messages": _MESSAGES,
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }
    with api(options, chunks_per_s / clients) as (port, pid):
        measured = load(
            port,
            pid,
            path="/v1/chat/completions",
            body=body,
            clients=clients,
            tokens=tokens,
            warm_s=options.warm,
            seconds=options.seconds,
        )
    return {"what": what, "paced_chunks_per_s": chunks_per_s} | measured


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--what", nargs="*", default=["stream", "short"], choices=["stream", "short"])
    parser.add_argument("--streams", type=int, default=256, help="streams at once")
    parser.add_argument("--tokens", type=int, default=512, help="of a streamed answer, a chunk each")
    parser.add_argument("--pace", type=float, nargs="*", default=[12500.0, 25000.0, 60000.0, 0.0],
                        help="tokens/s that the engine gives; 0: as many as are taken, which come merged")  # fmt: skip
    parser.add_argument("--clients", type=int, default=32, help="of short answers, at once")
    parser.add_argument("--short-tokens", type=int, default=8, help="of a short answer")
    parser.add_argument("--warm", type=float, default=1.5)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--tokenizer", default="demo")
    parser.add_argument("--serve", action="store_true", help="`octavo serve --load-format fake` instead: no stamps")
    parser.add_argument("--processes", type=int, default=1, help="API processes at once, a core each where there are")
    parser.add_argument("--core", type=int, default=0, help="of the API process; -1: any")
    parser.add_argument("--profile", help="a file for a profile of the API process")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    options.core = None if options.core < 0 or len(cores) < 2 else cores[options.core]
    if options.core is not None and options.processes == 1:
        os.sched_setaffinity(0, set(cores) - {options.core})
    results = []
    for what in options.what:
        for pace in options.pace if what == "stream" else [0.0]:
            results += several(options, what, pace) if options.processes > 1 else [measure(options, what, pace)]
    if options.json:
        machine = {"platform": platform.platform(), "python": platform.python_version(), "cores": len(cores)}
        print(json.dumps({"machine": machine, "results": results}, indent=1))
    else:
        for result in results:
            print({key: round(value, 2) if isinstance(value, float) else value for key, value in result.items()})


def several(options: argparse.Namespace, what: str, pace: float) -> list[dict[str, Any]]:
    """One figure of each of several API processes that run at the same time, with an engine and a generator each."""
    command = [sys.executable, __file__, "--json", "--what", what, "--pace", str(pace)]
    for name in ("streams", "tokens", "clients", "short_tokens", "warm", "seconds", "tokenizer"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    command += ["--serve"] * options.serve
    cores = len(os.sched_getaffinity(0))
    running = [
        subprocess.Popen([*command, "--core", str(number % cores)], stdout=subprocess.PIPE)
        for number in range(options.processes)
    ]
    return [json.loads(process.communicate()[0])["results"][0] for process in running]


if __name__ == "__main__":
    main()
