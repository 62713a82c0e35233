"""One model's bench table on a GPU: `start`, then `short`, `prefill`, `latency`, `shared` and `offline` on one engine.

    python benches/gpu/run.py --model benches/shapes/qwen3-0.6b --out DIR --runs 3

Writes a JSON report a bench into DIR, as `octavo bench NAME --json` prints it, and a table on standard output. The
reports' machine also says how fast and hot each GPU was before and after.
`--start-runs 0` leaves `start` out.
"""

from __future__ import annotations

import argparse
import functools
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from octavo._core import __version__
from octavo.bench import latency, throughput
from octavo.bench.command import BenchOptions, Results, run_bench
from octavo.bench.machine import machine
from octavo.bench.offline_engine import EngineBench, offline_engine
from octavo.config import EngineConfig

SHARED_ENGINE: dict[str, EngineBench] = {
    "short": throughput.short,
    "prefill": latency.prefill,
    "latency": latency.latency,
    "shared": throughput.shared,
    "offline": throughput.offline,
}

GPU_STATE = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu", "pstate")
TOOL_TIMEOUT_S = 30.0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The bench table of one model on one GPU.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the JSON reports")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument(
        "--start-runs", type=int, default=1, help="warm starts, after a cold one; 0 for no start at all"
    )
    parser.add_argument("--only", nargs="*", choices=[*SHARED_ENGINE, "start"], help="these benches alone")
    parser.add_argument("--batch", nargs="*", type=int, default=[], help="latency's batches")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=JSON", help="other settings of the engine")
    return parser.parse_args()


def settings(options: argparse.Namespace) -> EngineConfig:
    """As the peer had them, and what `--set` says."""
    values: dict[str, Any] = {
        "dtype": "bfloat16",
        "device": os.environ.get("OCTAVO_TEST_DEVICE", "cuda"),
        "load_format": "dummy",
        "max_num_seqs": 256,
        "max_model_len": 9000,
    }
    for item in options.set:
        name, _, value = item.partition("=")
        values[name] = msgspec.json.decode(value)
    return EngineConfig.of(model=options.model, **values)


def gpu_state() -> list[dict[str, str]]:
    """Clocks, power and temperature of each GPU now, as NVIDIA's tool tells them; nothing where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, f"--query-gpu={','.join(GPU_STATE)}", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=TOOL_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if told.returncode != 0:
        return []
    return [dict(zip(GPU_STATE, line.split(", "), strict=False)) for line in told.stdout.strip().splitlines()]


def watched(report: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A report whose machine says how its GPUs were before and after."""
    before = gpu_state()
    made = report()
    made["machine"]["gpu_state"] = {"before": before, "after": gpu_state()}
    return made


def measured(name: str, config: EngineConfig, run: Callable[[], Results]) -> dict[str, Any]:
    """A report of a bench on an engine that is loaded already."""
    where = machine()
    results = run()
    return {
        "bench": name,
        "version": __version__,
        "machine": where,
        "model": config.model,
        "config": msgspec.to_builtins(config),
        "results": results,
    }


def reports(options: argparse.Namespace, config: EngineConfig) -> Iterator[dict[str, Any]]:
    """The reports, each as soon as it is there."""
    bench_options = BenchOptions(runs=options.runs, batch=tuple(options.batch))
    if options.start_runs and (not options.only or "start" in options.only):
        # First: later this process holds the device's memory.
        yield watched(lambda: run_bench("start", config, BenchOptions(runs=options.start_runs)))
    wanted = [name for name in SHARED_ENGINE if not options.only or name in options.only]
    if wanted:
        begin = time.perf_counter()
        with offline_engine(config) as engine:
            print(f"loaded and warmed up in {time.perf_counter() - begin:.1f} s", flush=True)
            for name in wanted:
                run = functools.partial(SHARED_ENGINE[name].on, engine, replace(bench_options, workload=name))
                yield watched(functools.partial(measured, name, config, run))


def show(report: dict[str, Any], seconds: float) -> None:
    """A line a result."""
    for result in report["results"]:
        figures = "  ".join(f"{name} {value:,.6g}" for name, value in result.items() if name != "runs")
        print(f"{report['bench']:8} {figures}  ({result['runs']} runs)", flush=True)
    print(f"{'':8} took {seconds:.1f} s", flush=True)


def main() -> None:
    options = arguments()
    config = settings(options)
    options.out.mkdir(parents=True, exist_ok=True)
    begin = time.perf_counter()
    for report in reports(options, config):
        name = f"{Path(config.model).name}-{report['bench']}.json"
        (options.out / name).write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
        show(report, time.perf_counter() - begin)
        begin = time.perf_counter()


if __name__ == "__main__":
    main()
