"""`benches/server` goes on working: a second of it, with all its own checks of what the server answers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

RUN = Path(__file__).parents[2] / "benches" / "server" / "run.py"


def run(*options: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(RUN), "--json", "--core", "-1", "--warm", "0.5", "--seconds", "1", *options]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert finished.returncode == 0, finished.stderr
    results: list[dict[str, Any]] = json.loads(finished.stdout)["results"]
    return results


@pytest.mark.demo
def test_a_paced_engine_streams_a_chunk_a_token() -> None:
    stream, short = run("--streams", "16", "--tokens", "64", "--pace", "800", "--clients", "4")
    assert stream["chunks_per_s"] > 300
    assert stream["tokens_per_s"] > 300
    assert 0 < stream["delay_ms_p50"] <= stream["delay_ms_p99"] <= stream["delay_ms_max"]
    assert stream["api_cpu_us_a_chunk"] > 0
    assert short["answers_per_s"] > 20


def test_serve_itself() -> None:
    stream, short = run("--serve", "--streams", "16", "--tokens", "64", "--pace", "800", "--clients", "4")
    assert stream["chunks_per_s"] > 300
    assert stream["chunks_per_api_cpu_s"] > 1000
    assert short["answers_per_s"] > 20
