"""Latency of single requests: `latency`, `prefill` and W2."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from octavo.bench import workloads
from octavo.bench.command import BenchOptions, Results, note, progress
from octavo.bench.offline_engine import EngineBench, OfflineEngine
from octavo.bench.workloads import Request

__all__ = ["demo_latency", "latency", "prefill"]

_BATCHES = (1, 8, 32, 128)
_PROMPTS = (512, 2048, 8192)
# Prompts of W2 that only its first token is taken of.
_FIRST_TOKEN_REPEAT = 50


@EngineBench
def latency(engine: OfflineEngine, options: BenchOptions) -> Results:
    """`batch`, `ttft_ms`, `tpot_ms`: the time of one output token, and a 128th of what 128 more take."""
    results = []
    for batch in options.batch or _BATCHES:
        pairs = [
            (workloads.latency(batch, 1, repeat), workloads.latency(batch, 129, repeat))
            for repeat in range(options.runs)
        ]
        results.append({"batch": batch, **_first_and_next(engine, pairs, 128, options.workload)})
    return results


@EngineBench
def demo_latency(engine: OfflineEngine, options: BenchOptions) -> Results:
    """W2: the results of `latency`."""
    pairs = []
    for repeat in range(options.runs):
        ((prompt, _),) = workloads.demo("W2", _FIRST_TOKEN_REPEAT + repeat)
        pairs.append(([(prompt, 1)], workloads.demo("W2", repeat)))
    return [{"batch": 1, **_first_and_next(engine, pairs, 127, options.workload)}]


def _first_and_next(
    engine: OfflineEngine, pairs: Sequence[tuple[Sequence[Request], Sequence[Request]]], more: int, workload: str
) -> dict[str, float | int]:
    firsts, nexts = [], []
    for run, (one_token, many_tokens) in enumerate(pairs, 1):
        progress(f"{workload}: run {run} of {len(pairs)}, {workloads.size(many_tokens)}")
        first = engine.seconds(one_token)
        firsts.append(first)
        nexts.append((engine.seconds(many_tokens) - first) / more)
    return {
        "ttft_ms": round(median(firsts) * 1e3, 3),
        "tpot_ms": round(median(nexts) * 1e3, 4),
        "runs": len(pairs),
    }


@EngineBench
def prefill(engine: OfflineEngine, options: BenchOptions) -> Results:
    """`prompt_tokens`, `ms`, `tok_s`, for every prompt that fits the model's context."""
    results = []
    fitting = [size for size in _PROMPTS if size < engine.max_model_len]
    for size in _PROMPTS[len(fitting) :]:
        note(f"prefill: {size} tokens and an answer do not fit the context of {engine.max_model_len}; left out")
    for size in fitting:
        times = []
        for repeat in range(options.runs):
            progress(f"{options.workload}: run {repeat + 1} of {options.runs}, one prompt of {size} tokens")
            times.append(engine.seconds(workloads.prefill(size, repeat)))
        seconds = median(times)
        results.append(
            {
                "prompt_tokens": size,
                "ms": round(seconds * 1e3, 3),
                "tok_s": round(size / seconds, 1),
                "runs": options.runs,
            }
        )
    return results
