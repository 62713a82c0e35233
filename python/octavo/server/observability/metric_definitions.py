"""Definitions of all metrics: vLLM's names for what vLLM has, `octavo_` for the rest."""

from __future__ import annotations

from typing import NamedTuple

from octavo.engine.step_sizes import STEP_TOKEN_BOUNDS

__all__ = [
    "AUTH_FAILURES",
    "DEFINITIONS",
    "ENGINE_LABELS",
    "ENGINE_STATS",
    "FINISH_REASONS",
    "REJECTIONS",
    "SOURCES",
    "VARIANT_LABELS",
    "Definition",
]

ENGINE_LABELS = ("model_name", "engine")
VARIANT_LABELS = ("model_name", "variant")
FINISH_REASONS = ("stop", "length", "abort", "error")
SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
# Codes of error objects.
AUTH_FAILURES = ("invalid_api_key", "insufficient_scope", "host_not_allowed")
REJECTIONS = ("queue_full", "queue_timeout", "concurrency_exceeded")

# All of vLLM's bucket bounds, so that queries by bound work, and smaller ones: a small model generates a token in less
# than a millisecond, and vLLM's first bound is 10 ms for tokens and 300 ms for requests.
_FIRST_TOKEN_SECONDS = (
    0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 0.75, 1, 2.5,
    5, 7.5, 10, 20, 40, 80, 160, 640, 2560,
)  # fmt: skip
_TOKEN_SECONDS = (
    0.0005, 0.001, 0.0015, 0.002, 0.003, 0.004, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1,
    0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
_REQUEST_SECONDS = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20,
    30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
# Fewer buckets for the series of each version or path.
_VARIANT_FIRST_TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 40)
_VARIANT_TOKEN_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.075, 0.15, 0.3, 0.5, 1, 5)
_VARIANT_REQUEST_SECONDS = (0.05, 0.1, 0.3, 0.5, 1, 2, 5, 10, 20, 40, 60, 120, 480)
_HTTP_SECONDS = (0.005, 0.02, 0.1, 0.5, 1, 2.5, 10, 30, 60, 240)
_TOKENS = (*(float(factor * 10**power) for power in range(6) for factor in (1, 2, 5)), 1e6)
_ANSWERS = (1.0, 2.0, 5.0, 10.0, 20.0)


class Definition(NamedTuple):
    """One metric.

    Attributes:
        name: without prefix, and without the `_total` of a counter.
        text: help text.
        kind: counter, gauge or histogram.
        labels: names.
        bounds: of a histogram's buckets.
        vllm: vLLM has this metric too, so it gets vLLM's prefix; else `octavo_`.
        old_name: vLLM's former name.
        stat: the name in the engine's stats that gives the value.
        from_engine: set from the engines at every scrape; else counted by the server.
    """

    name: str
    text: str
    kind: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    vllm: bool = False
    old_name: str | None = None
    stat: str | None = None
    from_engine: bool = False


def _request(name: str, text: str, bounds: tuple[float, ...], old_name: str | None = None) -> Definition:
    return Definition(name, text, "histogram", ENGINE_LABELS, bounds, vllm=True, old_name=old_name)


def _counted(name: str, text: str, *labels: str) -> Definition:
    return Definition(name, text, "counter", (*ENGINE_LABELS, *labels), vllm=True)


def _read(
    name: str, text: str, kind: str, *labels: str, vllm: bool = False, stat: str | None = None, old: str | None = None
) -> Definition:
    labels = (*ENGINE_LABELS, *labels)
    return Definition(name, text, kind, labels, vllm=vllm, old_name=old, stat=stat, from_engine=True)


def _server(
    name: str, text: str, kind: str, labels: tuple[str, ...] = (), bounds: tuple[float, ...] = ()
) -> Definition:
    return Definition(name, text, kind, labels, bounds)


DEFINITIONS: tuple[Definition, ...] = (
    # vLLM's, counted by the server.
    _request("time_to_first_token_seconds", "From a request's arrival to its first token.", _FIRST_TOKEN_SECONDS),
    _request(
        "inter_token_latency_seconds",
        "Between two tokens of a completion.",
        _TOKEN_SECONDS,
        old_name="time_per_output_token_seconds",
    ),
    _request(
        "request_time_per_output_token_seconds", "Mean time per token of a request after its first.", _TOKEN_SECONDS
    ),
    _request("e2e_request_latency_seconds", "From a request's arrival to its end.", _REQUEST_SECONDS),
    _request("request_queue_time_seconds", "Time in the queues of the server and of the engine.", _REQUEST_SECONDS),
    _request("request_inference_time_seconds", "From admission to the last token.", _REQUEST_SECONDS),
    _request("request_prefill_time_seconds", "From admission to the first token.", _REQUEST_SECONDS),
    _request("request_decode_time_seconds", "From the first token to the last.", _REQUEST_SECONDS),
    _request("request_prompt_tokens", "Prompt tokens per request.", _TOKENS),
    _request("request_generation_tokens", "Output tokens per request.", _TOKENS),
    _request("request_max_num_generation_tokens", "Output tokens of a request's longest completion.", _TOKENS),
    _request("request_prefill_kv_computed_tokens", "Prompt tokens per request that were not cached.", _TOKENS),
    _request("request_params_n", "Completions asked for per request.", _ANSWERS),
    _request("request_params_max_tokens", "max_tokens per request.", _TOKENS),
    _counted("prompt_tokens", "Prompt tokens of requests that got their first token."),
    _counted("prompt_tokens_cached", "Prompt tokens taken from the prefix cache."),
    _counted("generation_tokens", "Tokens generated."),
    _counted("prompt_tokens_by_source", "Prompt tokens by the source of their keys and values.", "source"),
    _counted("request_success", "Completions that ended, by reason. Refused requests do not count.", "finished_reason"),
    Definition(
        "admission_rejections", "Requests that the queue refused, by reason.", "counter", ("model_name", "reason"),
        vllm=True,
    ),
    # vLLM's, read from the engine.
    _read("num_requests_running", "Completions in the running batch.", "gauge", vllm=True, stat="running"),
    _read("num_requests_waiting", "Completions that wait, in the server or in the engine.", "gauge", vllm=True),
    _read("num_requests_waiting_by_reason", "Completions that wait, by reason.", "gauge", "reason", vllm=True),
    _read("kv_cache_usage_perc", "Share of the blocks in use, 0 to 1.", "gauge", vllm=True, old="gpu_cache_usage_perc"),
    _read("engine_sleep_state", "1 for the engine's state.", "gauge", "sleep_state", vllm=True),
    _read("num_preemptions", "Sequences that were preempted.", "counter", vllm=True, stat="preemptions"),
    _read(
        "prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", "counter", vllm=True,
        stat="prefix_query_tokens",
    ),
    _read(
        "prefix_cache_hits", "Prompt tokens found in the prefix cache.", "counter", vllm=True, stat="prefix_hit_tokens"
    ),
    Definition(
        "iteration_tokens_total", "Tokens per step.", "histogram", ENGINE_LABELS,
        tuple(map(float, STEP_TOKEN_BOUNDS)), vllm=True, from_engine=True,
    ),
    # Ours, read from the engine.
    _read(
        "num_requests_deferred", "Completions that wait for a prefix or a grammar.", "gauge", stat="deferred"
    ),
    _read("open_requests", "Requests that the engine holds for this server.", "gauge", stat="open_requests"),
    _read("kv_cache_blocks", "Blocks of the KV cache, without the null block.", "gauge", stat="blocks_total"),
    _read("kv_cache_blocks_used", "Blocks that sequences hold.", "gauge", stat="blocks_used"),
    _read("kv_cache_blocks_free", "Blocks that can be allocated, cached ones included.", "gauge", stat="blocks_free"),
    _read("kv_cache_blocks_cached", "Blocks in the prefix cache, in use or free.", "gauge", stat="blocks_cached"),
    _read("kv_cache_blocks_free_cached", "Free blocks in the prefix cache.", "gauge", stat="blocks_free_cached"),
    _read("kv_cache_slots_unfilled", "Token slots of blocks in use without a token.", "gauge", stat="slots_unfilled"),
    _read("prefix_cache_evictions", "Cached blocks that were evicted.", "counter", stat="evictions"),
    _read("engine_steps", "Steps that the engine has planned.", "counter", stat="steps"),
    _read("kv_cache_block_allocations", "Blocks allocated.", "counter", stat="allocations"),
    _read("kv_cache_block_frees", "Blocks freed.", "counter", stat="frees"),
    _read("prefix_cache_hit_ratio", "Share of looked up prompt tokens that were cached, since the start.", "gauge"),
    _read("kv_cache_fragmentation_ratio", "Share of token slots in use without a token.", "gauge"),
    _read("engine_host_seconds", "Host time of the engine's steps, by part.", "counter", "part"),
    _read("engine_restarts", "Restarts of the engine's process.", "counter"),
    _read("model_load_seconds", "Duration of the model's last load.", "gauge"),
    _read("model_state", "1 for the model's state.", "gauge", "state"),
    _read("queue_requests", "Prompts in the server's queue, by priority class.", "gauge", "class"),
    _read("queue_tokens", "Tokens in the server's queue, of prompts and expected completions.", "gauge"),
    _read("queue_admitted", "Completions admitted to the engine that have not ended.", "gauge"),
    # Ours, counted by the server.
    _server(
        "variant_requests", "Completions that ended, by version and reason.", "counter",
        (*VARIANT_LABELS, "finished_reason"),
    ),
    _server("variant_prompt_tokens", "Prompt tokens, by version.", "counter", VARIANT_LABELS),
    _server("variant_generation_tokens", "Tokens generated, by version.", "counter", VARIANT_LABELS),
    _server(
        "variant_time_to_first_token_seconds", "From arrival to the first token, by version.", "histogram",
        VARIANT_LABELS, _VARIANT_FIRST_TOKEN_SECONDS,
    ),
    _server(
        "variant_time_per_output_token_seconds", "Mean time per token after the first, by version.", "histogram",
        VARIANT_LABELS, _VARIANT_TOKEN_SECONDS,
    ),
    _server(
        "variant_request_latency_seconds", "From a request's arrival to its end, by version.", "histogram",
        VARIANT_LABELS, _VARIANT_REQUEST_SECONDS,
    ),
    _server("http_requests", "HTTP requests by path template and status.", "counter", ("path", "code")),
    _server(
        "http_request_duration_seconds", "From a request's head to its response's end.", "histogram", ("path",),
        _HTTP_SECONDS,
    ),
    _server("client_disconnects", "Requests with a client that disconnected.", "counter"),
    _server("requests_aborted", "Requests that ended before they were complete.", "counter", ("model_name",)),
    _server("request_errors", "Requests that ended with an error, by its code.", "counter", ("code",)),
    _server("deadline_exceeded", "Requests that exceeded their deadline.", "counter"),
    _server("auth_failures", "Requests without access, by reason.", "counter", ("reason",)),
    _server("log_lines_dropped", "Log lines dropped, as the reader of the log is too slow.", "counter"),
    _server("build_info", "The running version.", "gauge", ("version",)),
)  # fmt: skip

ENGINE_STATS = tuple((definition.name, definition.stat) for definition in DEFINITIONS if definition.stat is not None)
"""Metrics and the names in the engine's stats that give their values."""
