"""`GET /metrics` for Prometheus."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from octavo.errors import OctavoError
from octavo.server.models.registry_entry import ModelState, RegistryEntry
from octavo.server.observability.logs import dropped_lines
from octavo.server.observability.metrics import EngineReading
from octavo.server.state import ServerState

__all__ = ["exposition", "routes"]

_STATS_TIMEOUT_S = 2.0
_NO_STATS: dict[str, int | float] = dict.fromkeys(
    ("waiting", "blocks_total", "blocks_used", "prefix_hit_tokens", "prefix_query_tokens"), 0
)
_TEXT_FORMAT = "text/plain; version=0.0.4; charset=utf-8"


async def exposition(state: ServerState, *, engines: bool = True) -> bytes:
    """The metrics of this process in Prometheus' text format.

    Args:
        state: of the server.
        engines: include the statistics of the engines. Without them the text can be added to another process's.
    """
    readings = await asyncio.gather(*(_read(state, entry, engines) for entry in state.registry.entries))
    state.metrics.log_lines_dropped.labels().set(dropped_lines())
    return state.metrics.expose(readings)


async def _read(state: ServerState, entry: RegistryEntry, engines: bool) -> EngineReading:
    reading = EngineReading(
        entry.name, state.metrics.engine_label(entry.name, entry.id), state=entry.state.value, variant=entry.id
    )
    if entry.engine is None:
        return reading
    reading.queue = state.admission_queue(entry.handle(entry.id)).stats()
    if not engines:
        reading.stats = _NO_STATS
        return reading
    if entry.loaded_at is not None:
        reading.load_seconds = entry.load_seconds
    model = entry.engine.model
    reading.info = {
        "version": entry.version or "",
        "root": str(model.name),
        "architecture": str(model.architecture),
        "dtype": str(model.dtype),
        "device": str(model.device),
        "max_model_len": str(model.max_model_len),
    }
    reading.cache_config = {
        "block_size": str(model.block_size),
        "num_gpu_blocks": str(model.num_blocks),
        "cache_dtype": str(model.dtype),
    }
    # A supervised engine reports its state; others do not.
    report: Any = getattr(entry.engine, "state", None)
    reported = report() if callable(report) else None
    if entry.state is ModelState.READY and reported is not None:
        reading.state = str(reported.name)
    elif entry.state is ModelState.READY and not entry.healthy():
        reading.state = "dead"
    reading.restarts = int(getattr(reported, "restarts", 0))
    try:
        reading.stats = await asyncio.wait_for(entry.engine.stats(), _STATS_TIMEOUT_S)
    except (OctavoError, asyncio.TimeoutError):
        reading.stats = None
    return reading


def _accepts_gzip(accepted: str) -> bool:
    for word in accepted.lower().split(","):
        coding, _, quality = word.partition(";")
        if coding.strip() == "gzip":
            return quality.replace(" ", "").rstrip("0.") != "q="
    return False


def routes(state: ServerState) -> list[BaseRoute]:
    """`/metrics`."""

    async def metrics(request: Request) -> Response:
        """`GET /metrics`, for Prometheus."""
        siblings = state.siblings
        text = await (exposition(state) if siblings is None else siblings.metrics())
        headers = {"vary": "accept-encoding"}
        # Every Prometheus accepts gzip, which takes a tenth of the bytes.
        if _accepts_gzip(request.headers.get("accept-encoding", "")):
            text = await asyncio.to_thread(gzip.compress, text, 1)
            headers["content-encoding"] = "gzip"
        return Response(text, 200, headers, _TEXT_FORMAT)

    return [Route("/metrics", metrics)]
