"""From an exception to an HTTP status and OpenAI's error object, in one table."""

from __future__ import annotations

import logging
from typing import Any

from octavo.errors import (
    ContextLengthExceeded,
    EngineDead,
    InvalidRequest,
    ModelNotServed,
    OctavoError,
)

__all__ = ["BodyTooLarge", "EngineLoading", "ModelUnavailable", "ServerStopping", "describe"]

logger = logging.getLogger("octavo.server")


class BodyTooLarge(InvalidRequest):
    """The request's body is longer than the server reads."""


class EngineLoading(OctavoError):
    """The model is still loading."""


class ModelUnavailable(OctavoError):
    """The model is known and cannot answer: it is not loaded, or its load failed."""


class ServerStopping(OctavoError):
    """The server is shutting down and ends what still runs."""


# The first class that matches decides: status, `type`, `code`, headers.
_RETRY = {"retry-after": "1"}
_NO_RETRY = {"x-should-retry": "false"}
_TABLE: tuple[tuple[type[BaseException], int, str, str | None, dict[str, str]], ...] = (
    (ContextLengthExceeded, 400, "invalid_request_error", "context_length_exceeded", {}),
    (ModelNotServed, 404, "invalid_request_error", "model_not_found", {}),
    (BodyTooLarge, 413, "invalid_request_error", "body_too_large", {"connection": "close"}),
    (InvalidRequest, 400, "invalid_request_error", "invalid_value", {}),
    (EngineLoading, 503, "service_unavailable_error", "model_loading", _RETRY),
    (ModelUnavailable, 503, "service_unavailable_error", "model_unavailable", {"retry-after": "5"}),
    (ServerStopping, 503, "service_unavailable_error", "server_stopping", {**_RETRY, "connection": "close"}),
    (EngineDead, 503, "service_unavailable_error", "engine_dead", _RETRY),
    (Exception, 500, "server_error", "internal_error", _NO_RETRY),
)


def describe(error: BaseException) -> tuple[int, dict[str, Any], dict[str, str]]:
    """What to answer when a request ends with `error`.

    Args:
        error: one of ours gives its own message; anything else is logged whole and answered without details.

    Returns:
        (status, {"error": {...}}, extra headers).
    """
    row = next((row for row in _TABLE if isinstance(error, row[0])), _TABLE[-1])
    _, status, label, code, headers = row
    if isinstance(error, OctavoError):
        message = str(error)
    else:
        logger.error("a request failed", exc_info=error)
        message = "The server failed to answer this request; its log says why."
    field = getattr(error, "field", None)
    return status, {"error": {"message": message, "type": label, "param": field, "code": code}}, dict(headers)
