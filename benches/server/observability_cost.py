"""What observing a request costs the API process: a chunk's counting, an access line, a scrape.

python benches/server/observability_cost.py
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable

from octavo.engine.outputs import OutputDelta
from octavo.log_format import ConsoleFormatter, JsonFormatter, LineHandler
from octavo.sampling_params import SamplingParams
from octavo.server.observability.logs import access_fields, request_fields
from octavo.server.observability.metrics import EngineReading, Metrics
from octavo.server.observability.request_context import RequestContext, current_request
from octavo.server.observability.request_record import RequestRecord
from octavo.server.observability.tracing import trace_of

CHUNKS = 200_000
STATS = dict.fromkeys(
    ("running", "waiting", "deferred", "blocks_total", "blocks_used", "blocks_free", "prefix_query_tokens",
     "prefix_hit_tokens"), 1,
)  # fmt: skip


def microseconds(work: Callable[[], object], count: int, rounds: int = 5) -> float:
    """The best mean of several rounds."""
    best = float("inf")
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(count):
            work()
        best = min(best, time.perf_counter() - began)
    return best / count * 1e6


def main() -> None:
    """Print one JSON object."""
    metrics = Metrics("bench")
    record = RequestRecord(metrics, "model", 100, 1)
    record.begin(SamplingParams(max_tokens=CHUNKS))
    delta = OutputDelta(index=0, text="x", token_ids=[1])

    def request() -> None:
        one = RequestRecord(metrics, "model", 100, 1, variant="v1")
        one.begin(SAMPLING)
        one.add(0, 0, delta)
        one.add(0, 0, LAST)
        one.finish()

    headers = [
        (b"host", b"localhost"),
        (b"traceparent", b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
    ]
    scope = {"headers": headers, "method": "POST", "path": "/v1/chat/completions", "client": ("127.0.0.1", 1)}
    context = RequestContext(scope)
    context.record = record
    current_request.set(context)
    logger = logging.getLogger("bench.access")
    logger.propagate = False
    logger.setLevel(logging.INFO)
    handler = LineHandler(os.open(os.devnull, os.O_WRONLY))
    logger.addHandler(handler)

    def line() -> None:
        fields = access_fields(context, scope, 200)
        logger.info("request", extra={"fields": fields})

    figures = {"chunk_us": microseconds(lambda: record.add(0, 0, delta), CHUNKS)}
    figures["request_record_us"] = microseconds(request, 20_000)
    figures["request_context_us"] = microseconds(lambda: RequestContext(scope), 20_000)
    figures["traceparent_us"] = microseconds(lambda: trace_of(headers), 20_000)
    handler.setFormatter(JsonFormatter(request_fields))
    figures["json_line_us"] = microseconds(line, 4000)
    handler.flush()
    handler.setFormatter(ConsoleFormatter(request_fields))
    figures["console_line_us"] = microseconds(line, 4000)
    handler.flush()
    reading = EngineReading("model", "0", STATS)
    figures["scrape_us"] = microseconds(lambda: metrics.expose([reading]), 50)
    print(json.dumps({name: round(value, 3) for name, value in figures.items()} | {"lines_dropped": handler.dropped}))


SAMPLING = SamplingParams(max_tokens=100)
LAST = OutputDelta(index=0, text="x", token_ids=[1], finish_reason="stop")

if __name__ == "__main__":
    main()
