"""How long one answer takes: `latency`, `prefill` and W2."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from octavo.bench import workloads
from octavo.bench.command import BenchOptions, Results, note
from octavo.bench.offline_engine import EngineBench, OfflineEngine
from octavo.bench.workloads import Request
from octavo.errors import ConfigError

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
        results.append({"batch": batch, **_first_and_next(engine, pairs, 128)})
    return results


@EngineBench
def demo_latency(engine: OfflineEngine, options: BenchOptions) -> Results:
    """As `latency`, for W2."""
    pairs = []
    for repeat in range(options.runs):
        ((prompt, _),) = workloads.demo("W2", _FIRST_TOKEN_REPEAT + repeat)
        pairs.append(([(prompt, 1)], workloads.demo("W2", repeat)))
    return [{"batch": 1, **_first_and_next(engine, pairs, 127)}]


def _first_and_next(
    engine: OfflineEngine, pairs: Sequence[tuple[Sequence[Request], Sequence[Request]]], more: int
) -> dict[str, float | int]:
    firsts, nexts = [], []
    for one_token, many_tokens in pairs:
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
    """`prompt_tokens`, `ms`, `tok_s`, for every prompt that fits the model's context.

    Raises:
        ConfigError: none fits.
    """
    results = []
    fitting = [size for size in _PROMPTS if size < engine.max_model_len]
    for size in _PROMPTS[len(fitting) :]:
        note(f"prefill: {size} tokens and an answer do not fit the context of {engine.max_model_len}; left out")
    if not fitting:
        raise ConfigError(f"max_model_len: {engine.max_model_len} is too small for a prompt of {_PROMPTS[0]}")
    for size in fitting:
        times = [engine.seconds(workloads.prefill(size, repeat)) for repeat in range(options.runs)]
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
