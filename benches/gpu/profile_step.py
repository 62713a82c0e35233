"""Where the time of a step goes: kernels by name, what the device waits, what the host costs.

    python benches/gpu/profile_step.py --model benches/shapes/qwen3-0.6b --batch 1 32 256 --prefill 2048 8192

Wall times and the host's own are taken without the profiler, kernel times with it. `gap` is wall time less the sum of
the kernels' times: launches, and the device waiting for the host; below zero, kernels overlapped.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from statistics import median

from step_engine import DEVICE, Engine, settings, synchronize

# By then every graph has been recorded.
WARM_STEPS = 12
TOP = 25
NAME_WIDTH = 84


def kernels(work: Callable[[], int]) -> tuple[dict[str, tuple[int, float]], int]:
    """(launches, microseconds) of each kernel of some work, and the steps that it took."""
    if DEVICE != "cuda":
        return {}, work()
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        steps = work()
        synchronize()
    found: dict[str, tuple[int, float]] = {}
    for event in profiler.events() or ():
        if event.device_type == DeviceType.CUDA:
            count, total = found.get(event.name, (0, 0.0))
            found[event.name] = (count + 1, total + event.time_range.elapsed_us())
    return found, steps


def start_profiler() -> None:
    """Have the profiler begin before any graph is recorded, and stay: later it may miss what lies in a graph."""
    os.environ.setdefault("TEARDOWN_CUPTI", "0")
    if DEVICE != "cuda":
        return
    import torch

    def work() -> int:
        torch.zeros(1, device="cuda")
        return 1

    kernels(work)


def report(title: str, found: dict[str, tuple[int, float]], steps: int, wall_us: float) -> None:
    """The table of one case; every figure is of one step."""
    total = sum(microseconds for _, microseconds in found.values()) / steps
    launches = sum(count for count, _ in found.values()) / steps
    print(
        f"\n== {title}: wall {wall_us:,.0f} us, kernels {total:,.0f} us in {launches:,.0f}, "
        f"gap {wall_us - total:,.0f} us"
    )
    ordered = sorted(found.items(), key=lambda item: -item[1][1])
    for name, (count, microseconds) in ordered[:TOP]:
        each = microseconds / count
        share = microseconds / steps / total
        print(f"{microseconds / steps:10.1f} us {share:6.1%} {count / steps:7.1f} x {each:8.2f}  {name[:NAME_WIDTH]}")
    if len(ordered) > TOP:
        rest = sum(microseconds for _, (_, microseconds) in ordered[TOP:]) / steps
        print(f"{rest:10.1f} us {rest / total:6.1%}  {len(ordered) - TOP} others")


def host(times: dict[str, list[float]]) -> None:
    """What the host's parts of a step take."""
    parts = "  ".join(f"{name} {median(values) * 1e6:,.1f}" for name, values in times.items())
    busy = [whole - wait for whole, wait in zip(times["whole"], times["wait"], strict=True)]
    print(f"host, us (median): {parts}  busy {median(busy) * 1e6:,.1f} (most {max(busy) * 1e6:,.1f})")


def decode(engine: Engine, batch: int, context: int, steps: int, shared: int) -> None:
    """Steady decode steps of `batch` rows that begin at `context` tokens, `shared` of them common to all."""
    engine.settle(batch, context, shared, WARM_STEPS + 3 * steps + 64, WARM_STEPS)
    engine.times.clear()
    synchronize()
    begin = time.perf_counter()
    for _ in range(steps):
        engine.step()
    wall_us = (time.perf_counter() - begin) / steps * 1e6
    times = {name: list(values) for name, values in engine.times.items()}

    def work() -> int:
        for _ in range(steps):
            engine.step()
        return steps

    synchronize()
    found, counted = kernels(work)
    report(f"decode, batch {batch}, context {context}, shared {shared}", found, counted, wall_us)
    host(times)
    engine.abandon(batch)


def prefill(engine: Engine, tokens: int) -> None:
    """One prompt and one output token, whole."""

    def work() -> int:
        engine.submit(tokens, 1)
        engine.drain()
        return 1

    for _ in range(3):
        work()
    engine.times.clear()
    engine.steps = 0
    walls = []
    for _ in range(3):
        synchronize()
        begin = time.perf_counter()
        work()
        walls.append((time.perf_counter() - begin) * 1e6)
    steps, times = engine.steps // 3, {name: list(values) for name, values in engine.times.items()}
    found, _ = kernels(work)
    report(f"prefill of {tokens} tokens in {steps} steps", found, 1, median(walls))
    host(times)


def main() -> None:
    parser = argparse.ArgumentParser(description="Where the time of a step goes.")
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, nargs="*", default=[1, 32, 256])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--shared", type=int, default=0, help="tokens of the context that all rows have in common")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--prefill", type=int, nargs="*", default=[])
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=JSON", help="other settings of the engine")
    options = parser.parse_args()
    start_profiler()
    engine = Engine(settings(options.model, options.set))
    for batch in options.batch:
        decode(engine, batch, options.context, options.steps, options.shared)
    for tokens in options.prefill:
        prefill(engine, tokens)
    engine.loop.close()


if __name__ == "__main__":
    main()
