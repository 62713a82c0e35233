"""Prometheus metrics, scraped at `/metrics`: named as vLLM names them, with our prefix."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from octavo.engine.outputs import OutputDelta

__all__ = ["Metrics", "RequestRecord"]

# When each series began doubles what is scraped and no dashboard asks for it.
disable_created_metrics()  # type: ignore[no-untyped-call]

_LABEL = ["model_name"]
# Finer below than vLLM's: a small model's token takes less than a millisecond.
_TOKEN_SECONDS = (
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5,
    0.75, 1, 2.5, 5, 10, 40, 80,
)  # fmt: skip
_FIRST_SECONDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_WHOLE_SECONDS = (
    0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920,
)  # fmt: skip
_TOKENS = tuple(factor * 10**power for power in range(6) for factor in (1, 2, 5))

# Of the engine's stats: (metric without prefix, help, the stats' name).
_GAUGES = (
    ("num_requests_running", "Answers in the running batch.", "running"),
    ("num_requests_deferred", "Answers that wait for a prefix another one computes.", "deferred"),
    ("kv_cache_blocks", "Blocks of the KV cache, the null block apart.", "blocks_total"),
    ("kv_cache_blocks_used", "Blocks that sequences hold.", "blocks_used"),
    ("kv_cache_blocks_free", "Blocks that can be taken, cached ones among them.", "blocks_free"),
    ("kv_cache_blocks_cached", "Blocks that the prefix cache knows, held or free.", "blocks_cached"),
)
_COUNTERS = (
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "prefix_query_tokens"),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", "prefix_hit_tokens"),
    ("prefix_cache_evictions", "Cached blocks lost because they were needed.", "evictions"),
    ("num_preemptions", "Sequences whose blocks were taken back.", "preemptions"),
    ("engine_steps", "Steps the engine has planned.", "steps"),
    ("kv_cache_block_allocations", "Blocks taken.", "allocations"),
    ("kv_cache_block_frees", "Blocks given back.", "frees"),
)


class _EngineStats(Collector):
    """Turns the last stats of every engine into metrics at scrape time."""

    def __init__(self) -> None:
        self.by_model: dict[str, Mapping[str, int | float]] = {}

    def collect(self) -> Iterable[Metric]:
        """The engines' gauges and counters."""
        for name, text, key in _GAUGES:
            gauge = GaugeMetricFamily(f"octavo_{name}", text, labels=_LABEL)
            for model, stats in self.by_model.items():
                gauge.add_metric([model], float(stats[key]))
            yield gauge
        waiting = GaugeMetricFamily("octavo_num_requests_waiting", "Answers that wait to be scheduled.", labels=_LABEL)
        share = GaugeMetricFamily("octavo_kv_cache_usage_perc", "Share of the blocks in use, 0 to 1.", labels=_LABEL)
        for model, stats in self.by_model.items():
            waiting.add_metric([model], float(stats["waiting"] + stats["deferred"]))
            share.add_metric([model], stats["blocks_used"] / max(stats["blocks_total"], 1))
        yield waiting
        yield share
        for name, text, key in _COUNTERS:
            counter = CounterMetricFamily(f"octavo_{name}", text, labels=_LABEL)
            for model, stats in self.by_model.items():
                counter.add_metric([model], float(stats[key]))
            yield counter


class Metrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self, version: str) -> None:
        registry = CollectorRegistry()
        self._registry = registry
        self._engines = _EngineStats()
        registry.register(self._engines)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"octavo_{name}", text, [*_LABEL, *labels], registry=registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"octavo_{name}", text, _LABEL, buckets=buckets, registry=registry)

        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of requests that got their first token.")
        self.prompt_tokens_cached = counter("prompt_tokens_cached", "Prompt tokens taken from the prefix cache.")
        self.generation_tokens = counter("generation_tokens", "Tokens generated.")
        self.request_success = counter("request_success", "Answers finished, by reason.", "finished_reason")
        self.requests_aborted = counter("requests_aborted", "Requests ended before their answer was complete.")
        self.first_token = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token.", _FIRST_SECONDS
        )
        self.inter_token = histogram(
            "inter_token_latency_seconds", "Between two pieces of an answer, a token.", _TOKEN_SECONDS
        )
        self.per_token = histogram(
            "request_time_per_output_token_seconds", "Mean time a token of an answer after its first.", _TOKEN_SECONDS
        )
        self.whole = histogram("e2e_request_latency_seconds", "From arrival to the answer's end.", _WHOLE_SECONDS)
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens a request.", _TOKENS)
        self.request_generation_tokens = histogram("request_generation_tokens", "Output tokens a request.", _TOKENS)
        self.http_requests = Counter(
            "octavo_http_requests", "HTTP requests answered.", ["path", "code"], registry=registry
        )
        self.client_disconnects = Counter(
            "octavo_client_disconnects", "Requests whose client went away.", registry=registry
        )
        info = Gauge("octavo_build_info", "The version that runs.", ["version"], registry=registry)
        info.labels(version).set(1)

    def expose(self, stats: Mapping[str, Mapping[str, int | float]]) -> bytes:
        """The text of `/metrics`.

        Args:
            stats: `AsyncEngine.stats()` by served name; a model left out keeps no engine gauges.
        """
        self._engines.by_model = dict(stats)
        return generate_latest(self._registry)


class RequestRecord:
    """Times and counts of one request as its pieces arrive.

    Args:
        model: served name, the label.
        prompt_tokens: of all its prompts together.

    Attributes:
        completion_tokens: generated so far.
        cached_tokens: prompt tokens found in the prefix cache.
    """

    def __init__(self, metrics: Metrics, model: str, prompt_tokens: int, num_prompts: int) -> None:
        self._metrics = metrics
        self._model = model
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = 0
        self._cached = [0] * num_prompts
        self._arrival = time.monotonic()
        self._first = 0.0
        self._last: dict[int, float] = {}
        self._generation_tokens = metrics.generation_tokens.labels(model)
        self._inter_token = metrics.inter_token.labels(model)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens found in the prefix cache."""
        return sum(self._cached)

    def add(self, prompt: int, choice: int, delta: OutputDelta) -> None:
        """Count a piece of answer `choice`, of prompt `prompt`."""
        now = time.monotonic()
        count = len(delta.token_ids)
        if delta.num_cached_tokens and not self._cached[prompt]:
            self._cached[prompt] = delta.num_cached_tokens
            self._metrics.prompt_tokens_cached.labels(self._model).inc(delta.num_cached_tokens)
        if count:
            if not self._first:
                self._first = now
                self._metrics.prompt_tokens.labels(self._model).inc(self.prompt_tokens)
                self._metrics.first_token.labels(self._model).observe(now - self._arrival)
            self.completion_tokens += count
            self._generation_tokens.inc(count)
            before = self._last.get(choice)
            if before is not None:
                self._inter_token.observe((now - before) / count)
            self._last[choice] = now
        if delta.finish_reason is not None:
            self._metrics.request_success.labels(self._model, delta.finish_reason).inc()

    def finish(self) -> None:
        """The whole request is answered."""
        now, metrics, model = time.monotonic(), self._metrics, self._model
        metrics.whole.labels(model).observe(now - self._arrival)
        metrics.request_prompt_tokens.labels(model).observe(self.prompt_tokens)
        metrics.request_generation_tokens.labels(model).observe(self.completion_tokens)
        answers = max(len(self._last), 1)
        if self.completion_tokens > answers:
            seconds = (now - self._first) * answers / (self.completion_tokens - answers)
            metrics.per_token.labels(model).observe(seconds)

    def abandon(self) -> None:
        """The request ended early: its client left, or it failed."""
        self._metrics.requests_aborted.labels(self._model).inc()
