"""The server's log: each line carries the ids of its request, and one access-log line sums up each request."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from octavo import log_format
from octavo.server.observability.request_telemetry import RequestTelemetry, current_request
from octavo.server.transport.http import Scope

__all__ = ["access_fields", "access_log", "configure_logging", "dropped_lines", "log_access", "request_fields"]

access_log = logging.getLogger("octavo.access")
"""Logger of the access log: one line for each request, at level info."""

_MAX_PATH = 256
_handler: list[log_format.LineHandler] = []


def configure_logging(format: str = "auto", level: str = "info", constant: Mapping[str, Any] | None = None) -> None:
    """Send all logging to standard error, also that of engines started later.

    Args:
        format: `json`, `console`, or `auto`: console on a terminal, else JSON.
        level: the lowest level that is logged.
        constant: fields of every line.

    Raises:
        ConfigError: unknown format or level.
    """
    _handler[:] = [log_format.configure(format, level, fields=request_fields, constant=constant)]
    log_format.child_settings(format, level)


def dropped_lines() -> int:
    """Number of lines dropped, as the reader of the log is too slow."""
    return sum(handler.dropped for handler in _handler)


def request_fields() -> Mapping[str, Any]:
    """Log fields of the request that the current task answers."""
    telemetry = current_request.get()
    if telemetry is None:
        return {}
    if telemetry.trace is None:
        return {"request_id": telemetry.request_id}
    return {
        "request_id": telemetry.request_id,
        "trace_id": telemetry.trace.trace_id,
        "span_id": telemetry.trace.span_id,
    }


def log_access(level: int, fields: dict[str, Any]) -> None:
    """Write an access-log line. This skips the search for the caller that `access_log.log` does."""
    record = logging.LogRecord(access_log.name, level, "", 0, "request", None, None)
    record.fields = fields
    access_log.handle(record)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def access_fields(telemetry: RequestTelemetry, scope: Scope, status: int) -> dict[str, Any]:
    """Fields of the access-log line of a request, besides its ids. Fields that are None are left out.

    It holds no prompt and no completion, unless the server is set to log prompts.
    """
    client = scope.get("client")
    fields: dict[str, Any] = {
        "method": scope["method"],
        "path": scope["path"][:_MAX_PATH],
        "status": status,
        "e2e_ms": _ms(time.monotonic() - telemetry.arrival),
        "client": client[0] if client else None,
        "key_id": telemetry.key_name,
        "error": telemetry.error_code,
        "model": telemetry.model,
    }
    record = telemetry.record
    if record is not None:
        fields |= {
            "model": record.name,
            "variant": record.variant,
            "prompt_tokens": record.prompt_tokens,
            "completion_tokens": record.completion_tokens,
            "cached_tokens": record.cached_tokens,
            "queue_ms": _ms(record.queue_time),
            "ttft_ms": _ms(record.time_to_first_token),
            "tpot_ms": _ms(record.time_per_output_token),
            "finish_reason": record.finish_reason,
        }
    if telemetry.disconnected:
        fields["disconnected"] = True
    if telemetry.prompt is not None:
        fields["body"] = telemetry.prompt
    return fields
