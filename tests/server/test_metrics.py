"""`/metrics`: names, labels and values."""

from __future__ import annotations

import contextlib
import json
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from octavo.engine.outputs import OutputDelta
from octavo.errors import CapacityExceeded, ConfigError
from octavo.sampling_params import SamplingParams
from octavo.server.access.api_keys import KeyRing
from octavo.server.observability.metric_types import MAX_HISTOGRAMS, MAX_SERIES, Family
from octavo.server.observability.metrics import Metrics
from octavo.server.observability.request_record import RequestRecord
from octavo.server.settings import ServerSettings
from octavo.server.state import ServerState
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from routing_harness import ADMIN_KEY, Routed
from server_fakes import BROKEN_TOKEN, FakeEngine
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


def test_engine_metrics(server: Running) -> None:
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


VLLM_EDGES = {
    "time_to_first_token_seconds": (
        ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
    ),
    "inter_token_latency_seconds": ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80",
    "e2e_request_latency_seconds": (
        ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
    ),
    "request_queue_time_seconds": (
        ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
    ),
    "request_prompt_tokens": "1 2 5 10 20 50 100 200 500 1000 2000 5000 10000 20000 50000 100000",
    "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
}  # fmt: skip
FINEST = {
    "time_to_first_token_seconds": 0.001,
    "inter_token_latency_seconds": 0.0005,
    "e2e_request_latency_seconds": 0.001,
    "request_queue_time_seconds": 0.001,
}
VLLM_TYPES = {
    "gauge": "num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc "
    "engine_sleep_state cache_config_info",
    "counter": "num_preemptions prompt_tokens prompt_tokens_by_source prompt_tokens_cached generation_tokens "
    "request_success prefix_cache_queries prefix_cache_hits",
    "histogram": "time_to_first_token_seconds inter_token_latency_seconds request_time_per_output_token_seconds "
    "e2e_request_latency_seconds request_queue_time_seconds request_inference_time_seconds "
    "request_prefill_time_seconds request_decode_time_seconds request_prompt_tokens request_generation_tokens "
    "request_max_num_generation_tokens request_params_n request_params_max_tokens iteration_tokens_total "
    "request_prefill_kv_computed_tokens",
}


def families(server: Running) -> dict[str, Metric]:
    """What is exposed, by family, as Prometheus' own parser reads it."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=10) as response:
        assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
        return {family.name: family for family in text_string_to_metric_families(response.read().decode())}


def labels_of(family: Metric) -> set[str]:
    return {label for sample in family.samples for label in sample.labels} - {"le"}


def test_names_types_and_labels_are_vllms(client: openai.OpenAI, server: Running) -> None:
    client.completions.create(model="fake", prompt=[72] * 20, max_tokens=10)
    exposed = families(server)
    for kind, names in VLLM_TYPES.items():
        for name in names.split():
            family = exposed[f"vllm:{name}"]
            assert family.type == kind, name
            assert labels_of(family) >= {"model_name", "engine"}, name
            for sample in family.samples:
                assert (sample.labels["model_name"], sample.labels["engine"]) == ("fake", "0")
    more = {"request_success": "finished_reason", "prompt_tokens_by_source": "source"}
    more |= {"num_requests_waiting_by_reason": "reason", "engine_sleep_state": "sleep_state"}
    for name, label in more.items():
        assert labels_of(exposed[f"vllm:{name}"]) == {"model_name", "engine", label}
    assert labels_of(exposed["vllm:cache_config_info"]) >= {"block_size", "num_gpu_blocks"}


def test_buckets_include_those_of_vllm(server: Running) -> None:
    exposed = families(server)
    for name, edges in VLLM_EDGES.items():
        found = {
            float(sample.labels["le"])
            for sample in exposed[f"vllm:{name}"].samples
            if sample.name.endswith("_bucket") and sample.labels["le"] != "+Inf"
        }
        assert {float(edge) for edge in edges.split()} <= found, name
        if name in FINEST:
            assert min(found) == FINEST[name]


def test_a_histogram_adds_up(client: openai.OpenAI, server: Running) -> None:
    for count in (1, 3, 30):
        client.completions.create(model="fake", prompt=[72] * count, max_tokens=1)
    samples = families(server)["vllm:request_prompt_tokens"].samples
    buckets = {sample.labels["le"]: sample.value for sample in samples if sample.name.endswith("_bucket")}
    values = list(buckets.values())
    assert values == sorted(values)
    assert [buckets[edge] for edge in ("1.0", "2.0", "5.0", "20.0", "50.0", "+Inf")] == [1, 1, 2, 2, 3, 3]
    assert {sample.name.rsplit("_", 1)[1]: sample.value for sample in samples if "le" not in sample.labels} == {
        "sum": 34,
        "count": 3,
    }


def test_random_paths_create_no_series(server: Running) -> None:
    for index in range(30):
        for path in (f"/nope/{index}", f"/v1/models/none-{index}", f"/v1/chat/completions?x={index}"):
            with contextlib.suppress(urllib.error.HTTPError):
                urllib.request.urlopen(f"{server.url}{path}", timeout=10).close()
    exposed = families(server)
    series = {
        (sample.labels["path"], sample.labels["code"]): sample.value
        for sample in exposed["octavo_http_requests"].samples
    }
    assert series["unmatched", "404"] == 30
    assert series["/v1/models/{name:path}", "404"] == 30
    assert series["/v1/chat/completions", "405"] == 30
    assert len(series) <= 5


def test_series_are_bounded() -> None:
    family = Family("octavo_things", "Things.", "counter", ("name",))
    for index in range(MAX_SERIES * 2):
        family.labels(str(index)).inc()
    lines = [line for line in family.render() if not line.startswith("#")]
    assert len(lines) == MAX_SERIES + 1
    assert f'octavo_things_total{{name="other"}} {float(MAX_SERIES)}\n' in lines
    times = Family("octavo_times", "Times.", "histogram", ("name",), (1.0,))
    for index in range(MAX_HISTOGRAMS * 2):
        times.histogram(str(index)).observe(0.5)
    text = "".join(times.render())
    assert text.count("octavo_times_count{") == MAX_HISTOGRAMS + 1
    assert f'octavo_times_count{{name="other"}} {float(MAX_HISTOGRAMS)}\n' in text


def test_label_values_are_escaped() -> None:
    family = Family("octavo_things", "Of a \\ and a\nnewline.", "gauge", ("name",))
    name = 'a"b\\c\nd\\n'
    family.labels(name).set(2)
    (parsed,) = text_string_to_metric_families("".join(family.render()))
    assert parsed.samples[0].labels == {"name": name}
    assert parsed.documentation == "Of a \\ and a\nnewline."


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5))))
def test_buckets_equal_those_of_prometheus_client(observations: list[tuple[float, int]]) -> None:
    bounds = (0.001, 0.1, 1.0, 10.0)
    ours, registry = Family("x", "X.", "histogram", bounds=bounds), CollectorRegistry()
    theirs = Histogram("x", "X.", buckets=bounds, registry=registry)
    for value, times in observations:
        ours.histogram().observe(value, times)
        for _ in range(times):
            theirs.observe(value)
    ours.histogram()
    (mine,) = text_string_to_metric_families("".join(ours.render()))
    reference = next(iter(text_string_to_metric_families(generate_latest(registry).decode())))
    values = {(sample.name, *sample.labels.values()): sample.value for sample in mine.samples}
    right = {(sample.name, *sample.labels.values()): sample.value for sample in reference.samples}
    assert values == pytest.approx(right)


def test_another_prefix_and_old_names(start: Callable[..., Running]) -> None:
    server = start(metrics_prefix="octavo_", metrics_old_names=True)
    exposed = families(server)
    assert not [name for name in exposed if name.startswith("vllm:")]
    assert exposed["octavo_num_requests_waiting"].samples[0].value == 3
    assert exposed["octavo_gpu_cache_usage_perc"].samples[0].value == 0.25
    assert exposed["octavo_time_per_output_token_seconds"].type == "histogram"
    with pytest.raises(ConfigError, match="metrics_prefix"):
        ServerSettings(metrics_prefix="9 ")


def test_ends_of_requests_by_reason(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.01))
    with server.client() as client:
        client.completions.create(model="fake", prompt=[72], max_tokens=2, n=2)
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="fake", prompt=[BROKEN_TOKEN], max_tokens=2)
        stream = client.completions.create(model="fake", prompt=[72], max_tokens=200, stream=True)
        next(iter(stream))
        stream.close()
    for _ in range(200):
        exposed = families(server)
        ends = {sample.labels["finished_reason"]: sample.value for sample in exposed["vllm:request_success"].samples}
        if ends["abort"] and exposed["octavo_client_disconnects"].samples[0].value:
            break
        time.sleep(0.01)
    assert ends == {"stop": 0, "length": 2, "abort": 1, "error": 1}
    assert exposed["octavo_request_errors"].samples[0].labels == {"code": "internal_error"}
    assert exposed["octavo_client_disconnects"].samples[0].value == 1
    assert exposed["octavo_requests_aborted"].samples[0].value == 2


def test_a_refused_request_does_not_count_as_ended(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.3), max_stops=1, max_engine_requests=1, request_timeout=0.2)
    with server.client() as client:
        for fields in ({"prompt": [72], "stop": ["a", "b"]}, {"prompt": [72] * 300}, {"prompt": [72], "n": 0}):
            with pytest.raises(openai.BadRequestError):
                client.completions.create(model="fake", **fields)
        # Refused by the engine, not by the server.
        server.engine.stream = refusing_stream  # type: ignore[method-assign]
        with pytest.raises(openai.BadRequestError, match="does not fit"):
            client.completions.create(model="fake", prompt=[72])
        del server.engine.stream
        with pytest.raises(openai.InternalServerError) as late:
            client.completions.create(model="fake", prompt=[72])
        assert late.value.code == "queue_timeout"
    exposed = families(server)
    assert not any(sample.value for sample in exposed["vllm:request_success"].samples)
    assert not any(sample.value for sample in exposed["octavo_requests_aborted"].samples)
    errors = {sample.labels["code"]: sample.value for sample in exposed["octavo_request_errors"].samples}
    assert errors == {"invalid_value": 3, "context_length_exceeded": 1, "queue_timeout": 1}
    codes = Counter({sample.labels["code"]: sample.value for sample in exposed["octavo_http_requests"].samples})
    assert (codes["400"], codes["503"]) == (4, 1)


async def refusing_stream(*_: Any, **__: Any) -> AsyncIterator[OutputDelta]:
    raise CapacityExceeded("prompt: does not fit", "prompt")
    yield


def test_optional_engine_stats_are_shown(server: Running) -> None:
    exposed = families(server)
    parts = {sample.labels["part"]: sample.value for sample in exposed["octavo_engine_host_seconds"].samples}
    assert parts == {"plan": 0.5, "wait": 2.25}
    assert exposed["octavo_kv_cache_fragmentation_ratio"].samples[0].value == 0.25
    samples = exposed["vllm:iteration_tokens_total"].samples
    steps = {sample.labels.get("le", sample.name): sample.value for sample in samples}
    assert (steps["1.0"], steps["64.0"], steps["128.0"], steps["+Inf"]) == (2, 2, 3, 3)
    assert steps["vllm:iteration_tokens_total_sum"] == 300


def test_times_of_a_request_add_up(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.02))
    with server.client() as client:
        client.completions.create(model="fake", prompt=[72], max_tokens=10)
    values = scrape(server)
    whole, decode = values["vllm:e2e_request_latency_seconds_sum"], values["vllm:request_decode_time_seconds_sum"]
    prefill, queue = values["vllm:request_prefill_time_seconds_sum"], values["vllm:request_queue_time_seconds_sum"]
    assert 0.18 <= decode <= whole
    assert prefill >= 0.02
    assert values["vllm:request_inference_time_seconds_sum"] == pytest.approx(prefill + decode, abs=1e-6)
    # What is left is reading the request.
    assert 0 <= values["vllm:time_to_first_token_seconds_sum"] - queue - prefill < 1
    assert values["vllm:inter_token_latency_seconds_sum"] == pytest.approx(decode, abs=1e-6)
    assert values["vllm:request_time_per_output_token_seconds_sum"] == pytest.approx(decode / 9, abs=1e-6)


def test_queue_metrics(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.01), max_engine_requests=1, max_queue_requests=2, request_timeout=0.4)
    body = json.dumps({"prompt": [72], "max_tokens": 100}).encode()
    with ThreadPoolExecutor(5) as pool:
        asks = [pool.submit(httpx.post, f"{server.url}/v1/completions", content=body) for _ in range(5)]
        for _ in range(100):
            exposed = families(server)
            queued = {sample.labels["class"]: sample.value for sample in exposed["octavo_queue_requests"].samples}
            if queued["normal"] == 2:
                break
            time.sleep(0.005)
        assert queued == {"high": 0, "normal": 2, "low": 0}
        assert exposed["octavo_queue_tokens"].samples[0].value > 2
        assert exposed["octavo_queue_admitted"].samples[0].value == 1
        by_reason = exposed["vllm:num_requests_waiting_by_reason"].samples
        assert {sample.labels["reason"]: sample.value for sample in by_reason}["admission"] == 2
        # An autoscaler sees who waits at the door beside who waits in the engine (3 of them, says the fake one).
        assert exposed["vllm:num_requests_waiting"].samples[0].value == 5
        answers = [ask.result() for ask in asks]
    codes = Counter(answer.json()["error"]["code"] for answer in answers if answer.status_code == 503)
    # The time of two that wait is over when the first one's is, give or take who came when.
    assert codes["queue_full"] == 2
    exposed = families(server)
    rejected = {sample.labels["reason"]: sample.value for sample in exposed["vllm:admission_rejections"].samples}
    assert rejected == {"queue_full": 2, "queue_timeout": codes["queue_timeout"], "concurrency_exceeded": 0}
    assert exposed["octavo_deadline_exceeded"].samples[0].value == 3


def test_versions_of_one_name() -> None:
    """Two engines of one model name are told apart; what is ours names the name asked for and the version."""
    metrics = Metrics("test")
    for version, count in (("m@v1", 3), ("m@v2", 1)):
        for _ in range(count):
            record = RequestRecord(
                metrics, "m", 5, 1, name="chat", variant=version, engine=metrics.engine_label("m", version)
            )
            record.add(0, 0, OutputDelta(index=0, text="x", token_ids=[1], finish_reason="stop"))
            record.finish()
    text = metrics.expose([]).decode()
    assert 'vllm:request_success_total{model_name="m",engine="v1",finished_reason="stop"} 3.0' in text
    assert 'vllm:request_success_total{model_name="m",engine="v2",finished_reason="stop"} 1.0' in text
    assert 'octavo_variant_requests_total{model_name="chat",variant="m@v1",finished_reason="stop"} 3.0' in text
    assert 'octavo_variant_generation_tokens_total{model_name="chat",variant="m@v2"} 1.0' in text


def test_queue_time_counts_the_servers_queue_and_the_engines() -> None:
    metrics = Metrics("test")

    class Queue:
        waited = 2.0
        deadline_passed = False

    for started_at in (0.0, time.monotonic() + 5.0):
        record = RequestRecord(metrics, "m", 5, 1)
        record.begin(SamplingParams())
        record.waits(Queue())
        assert record.queue_time == 2.0
        record.add(0, 0, OutputDelta(text="x", token_ids=[1], finish_reason="stop", started_at=started_at))
        record.finish()
        assert record.queue_time is not None
        assert abs(record.queue_time - (5.0 if started_at else 2.0)) < 0.5
    text = metrics.expose([]).decode()
    total = next(line for line in text.splitlines() if line.startswith("vllm:request_queue_time_seconds_sum"))
    assert abs(float(total.split()[-1]) - 7.0) < 1.0


def test_auth_failures_are_counted() -> None:
    state = ServerState(keys=KeyRing(arguments=["alices-own-key"]))
    server = Running(FakeEngine(), state)
    try:
        for headers, status in (({}, 401), ({"authorization": "Bearer nonsense"}, 401)):
            assert httpx.post(f"{server.url}/v1/completions", json={}, headers=headers).status_code == status
            assert httpx.get(f"{server.url}/elsewhere", headers=headers).status_code == status
    finally:
        server.stop()
    text = state.metrics.expose([]).decode()
    assert 'octavo_auth_failures_total{reason="invalid_api_key"} 4.0' in text
    assert 'octavo_http_requests_total{path="/v1/completions",code="401"} 2.0' in text
    assert 'octavo_http_requests_total{path="unmatched",code="401"} 2.0' in text


def test_variants_states_and_the_admin_listener() -> None:
    server = Routed("m@v1", "m@v2", "~idle")
    try:
        server.registry.set_alias("chat", {"m@v1": 1, "m@v2": 1})
        for variant, count in (("m@v1", 3), ("m@v2", 2)):
            for _ in range(count):
                assert server.ask("chat", {"X-Variant": variant}).status_code == 200
        assert server.ask("m@v2").status_code == 200
        httpx.get(f"{server.admin_url}/admin/models", headers={"authorization": f"Bearer {ADMIN_KEY}"})
        httpx.get(f"{server.admin_url}/admin/models/any")
        text = server.get("metrics").text
    finally:
        server.stop()
    samples = {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }

    def value(name: str, **labels: str) -> float | None:
        return samples.get((name, frozenset(labels.items())))

    requests = "octavo_variant_requests_total"
    assert value(requests, model_name="chat", variant="m@v1", finished_reason="length") == 3
    assert value(requests, model_name="chat", variant="m@v2", finished_reason="length") == 2
    assert value(requests, model_name="m@v2", variant="m@v2", finished_reason="length") == 1
    latency = "octavo_variant_time_to_first_token_seconds_count"
    assert value(latency, model_name="chat", variant="m@v2") == 2
    for engine in ("v1", "v2"):
        count = value("vllm:request_success_total", model_name="m", engine=engine, finished_reason="length")
        assert count == 3
        assert value("vllm:num_requests_running", model_name="m", engine=engine) == 0
        assert value("octavo_model_state", model_name="m", engine=engine, state="ready") == 1
        assert value("octavo_model_load_seconds", model_name="m", engine=engine) is not None
    assert value("octavo_model_state", model_name="idle", engine="0", state="unloaded") == 1
    assert value("vllm:num_requests_running", model_name="idle", engine="0") is None
    assert value("octavo_http_requests_total", path="/admin/models", code="200") == 1
    assert value("octavo_http_requests_total", path="unmatched", code="401") == 1


def test_series_exist_for_loaded_models_only() -> None:
    server = Routed("m@v1", "m@v2", "other", *(f"~idle{number}" for number in range(20)))
    try:
        for name in ("m@v1", "m@v2", "m", "other"):
            assert server.ask(name).status_code == 200
        before = server.get("metrics").text
        assert before.count("\n") < 2000
        assert "idle1" in before
        assert len([line for line in before.splitlines() if '"idle1"' in line]) < 10
        server.do(server.registry.unload("m@v2", remove=True))
        text = server.get("metrics").text
        assert "v2" not in text
        assert 'vllm:request_success_total{model_name="m",engine="v1",finished_reason="length"} 2.0' in text
        assert 'octavo_requests_aborted_total{model_name="m"}' in text
        server.registry.set_aliases({})
        server.do(server.registry.unload("m@v1", remove=True))
        server.do(server.registry.unload("other", remove=True))
        text = server.get("metrics").text
        assert '"m"' not in text
        assert "other" not in text
        # What comes back under the name begins anew.
        server.admin("POST", "models/load", {"model": "other", "path": "other"})
        assert server.ask("other").status_code == 200
        text = server.get("metrics").text
        assert 'vllm:request_success_total{model_name="other",engine="0",finished_reason="length"} 1.0' in text
    finally:
        server.stop()


def test_a_scrape_of_one_model_is_small(client: openai.OpenAI, server: Running) -> None:
    client.completions.create(model="fake", prompt=[72] * 20, max_tokens=10)
    for path in ("health", "readyz", "metrics", "ping", "livez", "v1/models"):
        with contextlib.suppress(urllib.error.HTTPError):
            urllib.request.urlopen(f"{server.url}/{path}", timeout=10).close()
    plain = httpx.get(f"{server.url}/metrics", headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert len(plain.content) < 56_000
    # Probes and scrapes are counted; how long they take fills no buckets.
    assert 'octavo_http_requests_total{path="/readyz",code="200"}' in plain.text
    assert 'octavo_http_request_duration_seconds_count{path="/v1/models"} 1.0' in plain.text
    assert 'duration_seconds_count{path="/readyz"}' not in plain.text
    packed = httpx.get(f"{server.url}/metrics", headers={"Accept-Encoding": "deflate, gzip;q=0.8"})
    assert packed.headers["content-encoding"] == "gzip"
    assert int(packed.headers["content-length"]) < 9_000
    assert packed.text.count("\n") == plain.text.count("\n")
    refused = httpx.get(f"{server.url}/metrics", headers={"Accept-Encoding": "gzip;q=0"})
    assert "content-encoding" not in refused.headers
