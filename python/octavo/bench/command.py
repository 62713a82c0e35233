"""`octavo bench NAME`: runs a workload, reports it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import typer

from octavo.config import EngineConfig
from octavo.errors import ConfigError

__all__ = ["BENCHES", "BenchOptions", "Results", "bench_command", "note", "run_bench"]

Results = list[dict[str, Any]]


@dataclass(frozen=True)
class BenchOptions:
    """What a bench is told besides the engine's settings.

    Attributes:
        runs: repeats, each with fresh prompts; medians are reported.
        concurrency: `serve`: streaming clients at once, one result each.
        request_rate: `serve`: requests a second of a Poisson process, one result each.
        num_prompts: `serve`: requests of one run.
        base_url: `serve`: an endpoint that runs already.
        batch: `latency`: batch sizes, one result each.
        ttft_slo_ms: `serve`: time to the first token that a good request keeps.
        tpot_slo_ms: `serve`: time per output token that a good request keeps.
    """

    runs: int = 3
    concurrency: tuple[int, ...] = ()
    request_rate: tuple[float, ...] = ()
    num_prompts: int | None = None
    base_url: str | None = None
    batch: tuple[int, ...] = ()
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None


# Name: (module, function, what it measures). The demo model's workloads go by both their names.
_DEMO = {"demo-offline": "W1", "demo-latency": "W2", "demo-shared": "W3", "demo-serve": "W4"}
BENCHES: dict[str, tuple[str, str, str]] = {
    "offline": ("throughput", "offline", "256 requests at once, prompt and output U[100, 1024]"),
    "latency": ("latency", "latency", "batches of prompts of 1024 tokens: first token, time per output token"),
    "prefill": ("latency", "prefill", "one prompt of 512, 2048, 8192 tokens"),
    "shared": ("throughput", "shared", "256 requests that share 4096 tokens"),
    "short": ("throughput", "short", "2048 requests of 16 + 16 tokens: the host's own cost"),
    "start": ("start", "start", "from process start to the first token"),
    "step": ("step", "step", "the core alone, without a model"),
    "serve": ("serve", "serve", "streaming clients against an OpenAI endpoint"),
    "memory": ("memory", "memory", "resident memory against the plan; a long run without a model"),
    "W1": ("throughput", "demo_offline", "64 requests at once, prompt U[64, 512], output U[32, 128]"),
    "W2": ("latency", "demo_latency", "one request, 128 + 128 tokens"),
    "W3": ("throughput", "demo_shared", "32 requests that share 1024 tokens"),
    "W4": ("serve", "demo_serve", "48 requests from 8 streaming clients"),
}


def bench_command(name: str, config: EngineConfig, options: BenchOptions, *, json: bool, plot: str | None) -> None:
    """Run a bench and print it: a table, or with `json` one object and nothing else.

    Raises:
        OctavoError: no such bench, or the model refuses it.
    """
    if name == "list":
        names = {bench: f"{text} (also: {alias})" for alias, bench in _DEMO.items() for _, _, text in [BENCHES[bench]]}
        for bench, (_, _, text) in BENCHES.items():
            typer.echo(f"{bench:9} {names.get(bench, text)}")
        return
    if plot is not None:
        _need_matplotlib()
    report = run_bench(name, config, options)
    if json:
        typer.echo(msgspec.json.encode(report).decode())
    else:
        from octavo.bench.report import print_table

        print_table(report)
    if plot is not None:
        from octavo.bench.report import draw

        draw(report, plot)


def run_bench(name: str, config: EngineConfig, options: BenchOptions) -> dict[str, Any]:
    """The whole report of a bench.

    Raises:
        OctavoError: no such bench, or the model refuses it.
    """
    from octavo._core import __version__
    from octavo.bench.machine import machine

    entry = BENCHES.get(_DEMO.get(name, name))
    if entry is None:
        raise ConfigError(f"bench: there is no {name!r}; there are {', '.join([*BENCHES, *_DEMO])}")
    module, function, _ = entry
    run: Callable[[EngineConfig, BenchOptions], Results] = getattr(
        importlib.import_module(f"octavo.bench.{module}"), function
    )
    where = machine()
    results = run(config, options)
    return {
        "bench": name,
        "version": __version__,
        "machine": where,
        "model": None if name == "step" else config.model,
        "config": msgspec.to_builtins(config),
        "results": results,
    }


def note(text: str) -> None:
    """Tell a person something beside the report."""
    sys.stderr.write(text + "\n")


def _need_matplotlib() -> None:
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        raise ConfigError("plot: needs matplotlib; pip install 'octavo[plot]'") from None
