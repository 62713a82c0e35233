"""Throughput of many concurrent requests: `offline`, `shared`, `short`, W1 and W3."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

from octavo.bench import workloads
from octavo.bench.command import BenchOptions, Results, progress
from octavo.bench.offline_engine import EngineBench, OfflineEngine
from octavo.bench.workloads import Request

__all__ = ["demo_offline", "demo_shared", "offline", "shared", "short"]


@EngineBench
def offline(engine: OfflineEngine, options: BenchOptions) -> Results:
    """`output_tok_s`, `total_tok_s`, `seconds`."""
    return _tokens(engine, options, workloads.offline)


@EngineBench
def demo_offline(engine: OfflineEngine, options: BenchOptions) -> Results:
    """W1: the results of `offline`."""
    return _tokens(engine, options, lambda repeat: workloads.demo("W1", repeat))


@EngineBench
def demo_shared(engine: OfflineEngine, options: BenchOptions) -> Results:
    """W3: the results of `offline`; the time includes the prefix."""
    return _tokens(engine, options, lambda repeat: workloads.demo("W3", repeat))


@EngineBench
def shared(engine: OfflineEngine, options: BenchOptions) -> Results:
    """The results of `offline`; the prefix is computed before the time begins."""

    def prepare(engine: OfflineEngine, repeat: int) -> Sequence[Request]:
        prefix, requests = workloads.shared(repeat)
        engine.seconds([(prefix, 1)])
        return requests

    return _measure(engine, options, prepare, per_request=False)


@EngineBench
def short(engine: OfflineEngine, options: BenchOptions) -> Results:
    """`requests_s`, `output_tok_s`."""
    return _measure(engine, options, lambda engine, repeat: workloads.short(repeat), per_request=True)


def _tokens(engine: OfflineEngine, options: BenchOptions, draw: Callable[[int], Sequence[Request]]) -> Results:
    return _measure(engine, options, lambda engine, repeat: draw(repeat), per_request=False)


def _measure(
    engine: OfflineEngine,
    options: BenchOptions,
    prepare: Callable[[OfflineEngine, int], Sequence[Request]],
    *,
    per_request: bool,
) -> Results:
    times = []
    for repeat in range(options.runs):
        requests = prepare(engine, repeat)
        progress(f"{options.workload}: run {repeat + 1} of {options.runs}, {workloads.size(requests)}")
        times.append(engine.seconds(requests))
    # Lengths are the same in every repeat.
    seconds = median(times)
    output = sum(asked for _, asked in requests)
    total = output + sum(len(prompt) for prompt, _ in requests)
    if per_request:
        figures = {"requests_s": len(requests) / seconds, "output_tok_s": output / seconds}
    else:
        figures = {"output_tok_s": output / seconds, "total_tok_s": total / seconds, "seconds": seconds}
    return [{**{name: round(value, 3) for name, value in figures.items()}, "runs": options.runs}]
