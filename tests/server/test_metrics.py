"""`/metrics` tells what happened."""

from __future__ import annotations

import urllib.request
from collections.abc import Callable

import openai
from prometheus_client.parser import text_string_to_metric_families
from server_fakes import FakeEngine
from server_harness import Running


def scrape(server: Running) -> dict[str, float]:
    """Sum of every sample, by name."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as response:
        text = response.read().decode()
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] = values.get(sample.name, 0.0) + sample.value
    return values


def test_counts_move_as_requests_run(client: openai.OpenAI, server: Running) -> None:
    before = scrape(server)
    assert before.get("vllm:generation_tokens_total", 0) == 0
    client.completions.create(model="fake", prompt=[72] * 20, max_tokens=10, n=2)
    for _ in client.completions.create(model="fake", prompt=[[72] * 5, [73] * 5], max_tokens=10, stream=True):
        pass
    after = scrape(server)
    assert after["vllm:prompt_tokens_total"] == 30
    assert after["vllm:prompt_tokens_cached_total"] == 16
    assert after["vllm:generation_tokens_total"] == 40
    assert after["vllm:request_success_total"] == 4
    for name in ("time_to_first_token_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds"):
        assert after[f"vllm:{name}_count"] == 2
        assert after[f"vllm:{name}_sum"] > 0
    assert after["vllm:inter_token_latency_seconds_count"] == 36
    assert after["vllm:request_prompt_tokens_sum"] == 30
    assert after["vllm:request_generation_tokens_sum"] == 40
    assert after["octavo_http_requests_total"] == 3  # with the first look at /metrics
    assert after.get("octavo_requests_aborted_total", 0) == 0


def test_the_engines_own(server: Running) -> None:
    values = scrape(server)
    assert values["vllm:num_requests_waiting"] == 3
    assert values["octavo_num_requests_deferred"] == 1
    assert values["vllm:num_requests_running"] == 0
    assert values["octavo_kv_cache_blocks_used"] == 16
    assert values["octavo_kv_cache_blocks_free"] == 48
    assert values["octavo_kv_cache_blocks_cached"] == 8
    assert values["vllm:kv_cache_usage_perc"] == 0.25
    assert values["vllm:prefix_cache_queries_total"] == 100
    assert values["vllm:prefix_cache_hits_total"] == 40
    assert values["vllm:num_preemptions_total"] == 3


def test_running_requests_show(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.01))
    with server.client() as client:
        stream = client.completions.create(model="fake", prompt=[72], max_tokens=100, stream=True)
        next(iter(stream))
        assert scrape(server)["vllm:num_requests_running"] == 1
        assert 0 < scrape(server)["vllm:generation_tokens_total"] < 100
        stream.close()
