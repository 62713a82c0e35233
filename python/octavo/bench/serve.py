"""An OpenAI endpoint under streaming clients: `serve` and W4."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from octavo.bench import workloads
from octavo.bench.client import Endpoint, Timing, find_key
from octavo.bench.command import SERVE_REQUESTS, BenchOptions, Results, check_context, progress
from octavo.bench.server_process import server_process
from octavo.bench.workloads import Request
from octavo.config import EngineConfig
from octavo.errors import ConfigError

__all__ = ["demo_serve", "percentiles", "serve"]

_CLIENTS = 8
_FIGURES: dict[str, Callable[[Timing], list[float]]] = {
    "ttft_ms": lambda timing: [timing.first],
    "tpot_ms": lambda timing: [timing.per_token],
    "itl_ms": lambda timing: timing.gaps,
    "e2e_ms": lambda timing: [timing.end],
}


def serve(config: EngineConfig, options: BenchOptions) -> Results:
    """`concurrency` or `rate`, `requests_s`, `output_tok_s`; percentiles of `ttft_ms`, `tpot_ms`, `itl_ms`, `e2e_ms`.

    The requests are the first of the `offline` workload. With limits set, `goodput_requests_s` counts the requests
    that keep them.

    Raises:
        ConfigError: the server cannot be started, does not answer, or refuses.
    """
    count = options.num_prompts or SERVE_REQUESTS
    return _measure(config, options, lambda repeat: workloads.offline(repeat)[:count])


def demo_serve(config: EngineConfig, options: BenchOptions) -> Results:
    """W4: the results of `serve`."""
    return _measure(config, options, lambda repeat: workloads.demo("W4", repeat)[: options.num_prompts])


def _measure(config: EngineConfig, options: BenchOptions, draw: Callable[[int], list[Request]]) -> Results:
    concurrencies: Sequence[int] = options.concurrency
    if not concurrencies and not options.request_rate:
        concurrencies = (_CLIENTS,)
    if any(not 0 < rate < float("inf") for rate in options.request_rate):
        raise ConfigError(f"request_rate: {list(options.request_rate)} must be above 0")
    with _base_url(config, options) as base_url:
        endpoint = Endpoint(base_url, None if options.base_url is None else find_key(options.api_key))
        cases: list[tuple[str, float]] = [("concurrency", value) for value in concurrencies]
        cases += [("rate", value) for value in options.request_rate]
        return [
            asyncio.run(_case(endpoint, name, value, options, draw, index)) for index, (name, value) in enumerate(cases)
        ]


@contextmanager
def _base_url(config: EngineConfig, options: BenchOptions) -> Iterator[str]:
    if options.base_url is not None:
        yield options.base_url
        return
    progress(f"{options.workload}: starting a server of {config.model}")
    with server_process(config) as server:
        yield server.base_url


async def _case(
    endpoint: Endpoint,
    name: str,
    value: float,
    options: BenchOptions,
    draw: Callable[[int], list[Request]],
    index: int,
) -> dict[str, Any]:
    model = options.model
    if options.base_url is None:
        model, max_model_len = next(iter((await endpoint.models()).items()))
        check_context(options, max_model_len or options.context)
    assert model is not None
    await endpoint.complete(model, *workloads.WARM_UP)
    runs = []
    for repeat in range(options.runs):
        # Cases after the first take repeats of their own, so that none finds the prompts of another in the cache.
        requests = draw(index * options.runs + repeat)
        told = f"{options.workload}: {name} {value:g}, run {repeat + 1} of {options.runs}"
        progress(f"{told}, {workloads.size(requests)}")
        begin = time.perf_counter()
        if name == "concurrency":
            timings = await _closed_loop(endpoint, model, requests, int(value))
        else:
            timings = await _poisson(endpoint, model, requests, value, repeat)
        runs.append(_summary(timings, time.perf_counter() - begin, options))
    medians = {
        key: (
            {share: round(median(run[key][share] for run in runs), 3) for share in first}
            if isinstance(first, dict)
            else round(median(run[key] for run in runs), 3)
        )
        for key, first in runs[0].items()
    }
    return {name: value, **medians, "requests": len(requests), "runs": options.runs}


async def _closed_loop(endpoint: Endpoint, model: str, requests: Sequence[Request], clients: int) -> list[Timing]:
    waiting = iter(requests)
    timings: list[Timing] = []

    async def client() -> None:
        for prompt, output in waiting:
            timings.append(await endpoint.complete(model, prompt, output))

    await asyncio.gather(*(client() for _ in range(clients)))
    return timings


async def _poisson(
    endpoint: Endpoint, model: str, requests: Sequence[Request], rate: float, repeat: int
) -> list[Timing]:
    arrivals = random.Random(f"arrivals {repeat}")  # noqa: S311 - reproducible draws

    async def one(delay: float, request: Request) -> Timing:
        await asyncio.sleep(delay)
        return await endpoint.complete(model, *request)

    delay = 0.0
    tasks = []
    for request in requests:
        tasks.append(one(delay, request))
        delay += arrivals.expovariate(rate)
    return list(await asyncio.gather(*tasks))


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """`p50`, `p90` and `p99`, interpolated; zeros when there are no values."""
    ordered = sorted(values) or [0.0]
    shares = {}
    for percent in (50, 90, 99):
        place = (len(ordered) - 1) * percent / 100
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        shares[f"p{percent}"] = ordered[low] + (ordered[high] - ordered[low]) * (place - low)
    return shares


def _summary(timings: Sequence[Timing], seconds: float, options: BenchOptions) -> dict[str, Any]:
    summary: dict[str, Any] = {
        "requests_s": len(timings) / seconds,
        "output_tok_s": sum(timing.tokens for timing in timings) / seconds,
    }
    if options.ttft_slo_ms is not None or options.tpot_slo_ms is not None:
        good = sum(
            timing.first * 1e3 <= (options.ttft_slo_ms or float("inf"))
            and timing.per_token * 1e3 <= (options.tpot_slo_ms or float("inf"))
            for timing in timings
        )
        summary["goodput_requests_s"] = good / seconds
    for name, figure in _FIGURES.items():
        summary[name] = percentiles([1e3 * value for timing in timings for value in figure(timing)])
    return summary
