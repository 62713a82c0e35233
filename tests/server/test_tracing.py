"""W3C trace context without OpenTelemetry, and spans with it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import openai
import pytest
from octavo.errors import ConfigError
from octavo.server.observability.tracing import Trace, parse_tracestate, trace_of
from octavo.server.settings import ServerSettings
from octavo.server.state import ServerState
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from server_fakes import BROKEN_TOKEN, FakeEngine
from server_harness import Running

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT_ID = "00f067aa0ba902b7"
PARENT = f"00-{TRACE_ID}-{PARENT_ID}-01"


def parsed(*values: str, state: tuple[str, ...] = ()) -> Trace | None:
    headers = [(b"traceparent", value.encode()) for value in values]
    return trace_of(headers + [(b"tracestate", value.encode()) for value in state])


def test_a_traceparent() -> None:
    trace = parsed(PARENT, state=("a=1", "b=2"))
    assert trace is not None
    assert (trace.trace_id, trace.parent_id, trace.sampled, trace.tracestate) == (TRACE_ID, PARENT_ID, True, "a=1,b=2")
    assert re.fullmatch("[0-9a-f]{16}", trace.span_id)
    assert trace.span_id != PARENT_ID
    assert dict(trace.headers) == {
        b"x-trace-id": TRACE_ID.encode(),
        b"traceresponse": f"00-{TRACE_ID}-{trace.span_id}-01".encode(),
    }


def test_unsampled_and_later_versions() -> None:
    assert parsed(f"00-{TRACE_ID}-{PARENT_ID}-00").sampled is False
    assert parsed(f"00-{TRACE_ID}-{PARENT_ID}-03").sampled is True
    later = parsed(f"cc-{TRACE_ID}-{PARENT_ID}-01-what-the-future-brings")
    assert later is not None
    assert later.trace_id == TRACE_ID


@pytest.mark.parametrize(
    "value",
    [
        "",
        "00",
        PARENT + "-00",
        PARENT.upper(),
        f"ff-{TRACE_ID}-{PARENT_ID}-01",
        f"00-{'0' * 32}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{'0' * 16}-01",
        f"00-{TRACE_ID[:-1]}-{PARENT_ID}-01",
        f"00-{TRACE_ID}-{PARENT_ID}g-01",
        f"00-{TRACE_ID}-{PARENT_ID}-1",
        f"cc-{TRACE_ID}-{PARENT_ID}-01x",
        PARENT + "\n",
        f"00 {TRACE_ID} {PARENT_ID} 01",
    ],
)
def test_an_invalid_traceparent_is_ignored(value: str) -> None:
    assert parsed(value) is None


def test_two_traceparents_are_ignored() -> None:
    assert parsed(PARENT, PARENT) is None
    assert parsed() is None


@pytest.mark.parametrize(
    ("state", "kept"),
    [
        (b"", ""),
        (b"a=1", "a=1"),
        (b" a=1 , ,b=2", "a=1,b=2"),
        (b"tenant@vendor=x y", "tenant@vendor=x y"),
        (b"a=1,a=2", ""),
        (b"A=1", ""),
        (b"a", ""),
        (b"a=\x1b[31m", ""),
        (b"a=" + b"x" * 600, ""),
        (b",".join(b"k%d=1" % number for number in range(33)), ""),
    ],
)
def test_tracestate(state: bytes, kept: str) -> None:
    assert parse_tracestate(state) == kept
    trace = parsed(PARENT, state=(state.decode(),))
    assert trace is not None
    assert trace.tracestate == kept


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/nope"])
def test_responses_name_the_trace(server: Running, path: str) -> None:
    payload = {"prompt": [72], "max_tokens": 2}
    for headers, known in ((({"traceparent": PARENT}), True), ({"traceparent": "00-nonsense"}, False), ({}, False)):
        if path == "/v1/completions":
            answer = httpx.post(server.url + path, json=payload, headers=headers)
        else:
            answer = httpx.get(server.url + path, headers=headers)
        assert answer.headers.get("x-trace-id") == (TRACE_ID if known else None)
        assert ("traceresponse" in answer.headers) == known
        if known:
            assert re.fullmatch(f"00-{TRACE_ID}-(?!{PARENT_ID})[0-9a-f]{{16}}-01", answer.headers["traceresponse"])
        assert len(answer.headers.get_list("x-request-id")) == 1


# ------------------------------------------------------------ OpenTelemetry


class Collector:
    """Takes OTLP over HTTP on a port of its own.

    Attributes:
        spans: all received.
        resources: attributes of their resources.
    """

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces"
                assert self.headers["content-type"] == "application/x-protobuf"
                for group in ExportTraceServiceRequest.FromString(body).resource_spans:
                    collector.resources.append(attributes(group.resource.attributes))
                    for scope in group.scope_spans:
                        collector.spans += scope.spans
                self.send_response(200)
                self.end_headers()

            def log_message(self, *arguments: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def attributes(pairs: Any) -> dict[str, Any]:
    """OTLP's attributes as a dictionary."""

    def value(of: Any) -> Any:
        kind = of.WhichOneof("value")
        return [value(item) for item in of.array_value.values] if kind == "array_value" else getattr(of, kind)

    return {pair.key: value(pair.value) for pair in pairs}


@pytest.fixture
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture
def traced(start: Callable[..., Running], collector: Collector) -> Iterator[Running]:
    server = start(FakeEngine(delay=0.002), otlp_traces_endpoint=collector.url)
    yield server
    server.state.spans.close()


def test_spans(traced: Running, collector: Collector) -> None:
    with traced.client() as client:
        chat = client.chat.completions.with_raw_response.create(
            model="fake",
            messages=[{"role": "user", "content": "a secret prompt"}],
            max_tokens=7,
            temperature=0.5,
            top_p=0.75,
            n=2,
            extra_headers={"traceparent": PARENT, "tracestate": "a=1", "x-request-id": "mine"},
        )
        with pytest.raises(openai.InternalServerError):
            client.completions.create(model="fake", prompt=[BROKEN_TOKEN])
        client.completions.create(
            model="fake", prompt=[72], extra_headers={"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-00"}
        )
    httpx.get(traced.url + "/health")
    traced.state.spans.flush()
    answered, failed = collector.spans
    assert answered.name == "POST /v1/chat/completions"
    assert answered.kind == 2  # server
    assert answered.trace_id.hex() == TRACE_ID
    assert answered.parent_span_id.hex() == PARENT_ID
    assert answered.trace_state == "a=1"
    assert chat.headers["traceresponse"] == f"00-{TRACE_ID}-{answered.span_id.hex()}-01"
    found = attributes(answered.attributes)
    latencies = {name: found.pop(name) for name in list(found) if name.startswith("gen_ai.latency.")}
    assert found == {
        "http.request.method": "POST",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "gen_ai.system": "octavo",
        "gen_ai.request.id": "mine",
        "gen_ai.request.model": "fake",
        "gen_ai.response.model": "fake",
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.75,
        "gen_ai.response.finish_reasons": ["length", "length"],
        "gen_ai.usage.prompt_tokens": found["gen_ai.usage.input_tokens"],
        "gen_ai.usage.input_tokens": found["gen_ai.usage.prompt_tokens"],
        "gen_ai.usage.completion_tokens": 14,
        "gen_ai.usage.output_tokens": 14,
        "octavo.cached_tokens": found["octavo.cached_tokens"],
    } | {name: value for name, value in found.items() if name == "octavo.variant"}
    assert found["gen_ai.usage.prompt_tokens"] > 15
    assert latencies["gen_ai.latency.e2e"] >= latencies["gen_ai.latency.time_to_first_token"] > 0.001
    assert latencies["gen_ai.latency.time_in_model_decode"] > 0.01
    seconds = (answered.end_time_unix_nano - answered.start_time_unix_nano) / 1e9
    assert seconds == pytest.approx(latencies["gen_ai.latency.e2e"], abs=0.05)
    assert failed.parent_span_id == b""
    assert failed.status.code == 2  # error
    assert attributes(failed.attributes)["error.type"] == "internal_error"
    assert collector.resources[0]["service.name"] == "octavo"


def test_a_collector_that_is_down_delays_nothing(start: Callable[..., Running]) -> None:
    server = start(otlp_traces_endpoint="http://127.0.0.1:9/v1/traces")
    with server.client() as client:
        for _ in range(5):
            client.completions.create(model="fake", prompt=[72])
    began = time.monotonic()
    server.state.spans.close()
    assert time.monotonic() - began < 8


def test_the_endpoint_is_checked() -> None:
    for bad in ("localhost:4318", "grpc://localhost:4317", "http://"):
        with pytest.raises(ConfigError, match="otlp_traces_endpoint"):
            ServerState(ServerSettings(otlp_traces_endpoint=bad))


def test_without_opentelemetry() -> None:
    code = (
        "import sys\n"
        "sys.modules['opentelemetry'] = None\n"
        "from octavo.errors import ConfigError\n"
        "from octavo.server.settings import ServerSettings\n"
        "from octavo.server.state import ServerState\n"
        "ServerState()\n"
        "try:\n"
        "    ServerState(ServerSettings(otlp_traces_endpoint='http://localhost:4318'))\n"
        "except ConfigError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "octavo[otel]" in done.stdout
    code = "import sys, json, octavo.server.lifecycle; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not [name for name in json.loads(done.stdout) if name.startswith("opentelemetry")]
