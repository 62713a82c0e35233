"""What a streamed chunk costs with one API process and with several: CPU time, as cores are few where this may run.

    python benches/server/processes.py --processes 1 2

The sum over the API processes of a run; the engine's process and the load generator have theirs beside it.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import tempfile
from typing import Any

import psutil
from load import cpu_seconds, load, served_port


def measure(processes: int, streams: int, tokens: int, seconds: float) -> dict[str, Any]:
    """One run."""
    command = [sys.executable, "-m", "octavo", "serve", "fake", "--load-format", "fake", "--port", "0"]
    command += ["--api-processes", str(processes), "--drain-delay", "0", "--max-num-batched-tokens", "8192"]
    log = tempfile.TemporaryFile("a+")  # noqa: SIM115 (closed below)
    server = subprocess.Popen(command, stderr=log)
    try:
        port = served_port(server, log)
        body = {
            "model": "fake",
            "messages": [{"role": "user", "content": "What is the capital of France?"}],
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        common: dict[str, Any] = {"path": "/v1/chat/completions", "body": body, "clients": streams, "tokens": tokens}
        # Until all processes are there and warm.
        load(port, server.pid, **common, warm_s=4, seconds=0.5)
        children = psutil.Process(server.pid).children()
        api = [server.pid, *(child.pid for child in children if "octavo.cli.api_process" in child.cmdline())]
        worker = next(child.pid for child in children if "octavo.engine.worker" in child.cmdline())
        before = [cpu_seconds(pid) for pid in (*api, worker)]
        measured = load(port, server.pid, **common, warm_s=0, seconds=seconds)
        used = [cpu_seconds(pid) - then for pid, then in zip((*api, worker), before, strict=True)]
        chunks = measured["chunks_per_s"] * measured["seconds"]
        return {
            "processes": processes,
            "chunks_per_s": round(measured["chunks_per_s"]),
            "api_cpu_us_a_chunk": round(sum(used[:-1]) / chunks * 1e6, 2),
            "engine_cpu_us_a_chunk": round(used[-1] / chunks * 1e6, 2),
            "share_of_each_api_process": [round(one / sum(used[:-1]), 2) for one in used[:-1]],
        }
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(20)
        log.close()


def main() -> None:
    """Measure and print, a line a run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    for processes in options.processes:
        print(json.dumps(measure(processes, options.streams, options.tokens, options.seconds)))


if __name__ == "__main__":
    main()
