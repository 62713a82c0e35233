"""Error responses: the table from exceptions to HTTP statuses and OpenAI's error objects."""

from __future__ import annotations

import logging
import math
from typing import Any

from octavo.errors import (
    ContextLengthExceeded,
    EngineDead,
    EngineRestarting,
    InvalidRequest,
    ModelNotServed,
    OctavoError,
    Overloaded,
)

__all__ = [
    "BodyTooLarge",
    "ConcurrencyExceeded",
    "EngineLoading",
    "Forbidden",
    "HeadTooLarge",
    "HostNotAllowed",
    "MalformedRequest",
    "ModelConflict",
    "ModelFailed",
    "ModelUnavailable",
    "QueueFull",
    "QueueTimeout",
    "RequestTimeout",
    "ResponseNotFound",
    "ServerStopping",
    "Unauthorized",
    "UnsupportedMediaType",
    "UriTooLong",
    "describe",
]

logger = logging.getLogger("octavo.server")


class BodyTooLarge(InvalidRequest):
    """The request's body is longer than the limit."""


class UnsupportedMediaType(InvalidRequest):
    """The body's content type is not JSON."""


class MalformedRequest(InvalidRequest):
    """The request is not valid HTTP, or its end is ambiguous."""


class HeadTooLarge(InvalidRequest):
    """The request has too many headers, or too long ones."""


class UriTooLong(InvalidRequest):
    """The request's URL is longer than the limit."""


class RequestTimeout(InvalidRequest):
    """The request did not arrive in time."""


class EngineLoading(OctavoError):
    """The model is still loading."""


class ModelUnavailable(OctavoError):
    """The model exists but cannot answer: it is not loaded, or its load failed."""


class ModelFailed(ModelUnavailable):
    """The model's load failed.

    Attributes:
        retry_after: seconds until a request may load it again; None if no request may.
    """

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ModelConflict(OctavoError):
    """A later command about models contradicts this one."""


class ResponseNotFound(OctavoError):
    """There is no such response, as responses are not stored."""


class ServerStopping(OctavoError):
    """The server is shutting down."""


class Unauthorized(OctavoError):
    """The request has no valid API key."""


class Forbidden(OctavoError):
    """The API key does not have the necessary scope."""


class HostNotAllowed(OctavoError):
    """The Host header names a host that is not allowed."""


class _TryLater(OctavoError):
    """The request is refused for now.

    Attributes:
        retry_after: estimated seconds until a retry may succeed.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(_TryLater):
    """The maximum number of requests or tokens is waiting."""


class QueueTimeout(_TryLater):
    """The request's deadline passed in the queue."""


class ConcurrencyExceeded(_TryLater):
    """The API key runs its maximum number of requests."""


# Status, `type`, `code` and headers of each class. The first class that matches counts.
_RETRY = {"retry-after": "1"}
_NO_RETRY = {"x-should-retry": "false"}
_CLOSE = {"connection": "close"}
_TABLE: tuple[tuple[type[BaseException], int, str, str | None, dict[str, str]], ...] = (
    (ContextLengthExceeded, 400, "invalid_request_error", "context_length_exceeded", {}),
    (ModelNotServed, 404, "invalid_request_error", "model_not_found", {}),
    (ResponseNotFound, 404, "invalid_request_error", "response_not_found", {}),
    (BodyTooLarge, 413, "invalid_request_error", "body_too_large", {}),
    (UnsupportedMediaType, 415, "invalid_request_error", "unsupported_media_type", {}),
    (MalformedRequest, 400, "invalid_request_error", "malformed_request", _CLOSE),
    (RequestTimeout, 408, "invalid_request_error", "request_timeout", _CLOSE),
    (UriTooLong, 414, "invalid_request_error", "uri_too_long", _CLOSE),
    (HeadTooLarge, 431, "invalid_request_error", "head_too_large", _CLOSE),
    (InvalidRequest, 400, "invalid_request_error", "invalid_value", {}),
    (Unauthorized, 401, "authentication_error", "invalid_api_key", {"www-authenticate": "Bearer"}),
    (Forbidden, 403, "permission_error", "insufficient_scope", {}),
    (HostNotAllowed, 403, "permission_error", "host_not_allowed", {}),
    (ConcurrencyExceeded, 429, "rate_limit_error", "concurrency_exceeded", _RETRY),
    (QueueFull, 503, "service_unavailable_error", "queue_full", _RETRY),
    (QueueTimeout, 503, "service_unavailable_error", "queue_timeout", _RETRY),
    (Overloaded, 503, "service_unavailable_error", "overloaded", _RETRY),
    (EngineLoading, 503, "service_unavailable_error", "model_loading", _RETRY),
    (ModelConflict, 409, "invalid_request_error", "conflict", {}),
    (ModelFailed, 503, "service_unavailable_error", "model_unavailable", _NO_RETRY),
    (ModelUnavailable, 503, "service_unavailable_error", "model_unavailable", {"retry-after": "5"}),
    (ServerStopping, 503, "service_unavailable_error", "server_stopping", _RETRY | _CLOSE),
    (EngineRestarting, 503, "service_unavailable_error", "engine_restarting", _RETRY),
    (EngineDead, 503, "service_unavailable_error", "engine_dead", _RETRY),
    (Exception, 500, "server_error", "internal_error", _NO_RETRY),
)


def describe(error: BaseException) -> tuple[int, dict[str, Any], dict[str, str]]:
    """The response to a request that ends with `error`.

    Args:
        error: an `OctavoError` is shown with its message. Any other is logged and shown without details.

    Returns:
        (status, {"error": {...}}, extra headers).
    """
    row = next((row for row in _TABLE if isinstance(error, row[0])), _TABLE[-1])
    _, status, label, code, headers = row
    if isinstance(error, OctavoError):
        message = str(error)
    else:
        logger.error("a request failed", exc_info=error)
        message = "The server failed to answer this request; see its log"
    field = getattr(error, "field", None)
    headers = dict(headers)
    if isinstance(error, _TryLater | EngineRestarting | ModelFailed) and error.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after)))
    return status, {"error": {"message": message, "type": label, "param": field, "code": code}}, headers
