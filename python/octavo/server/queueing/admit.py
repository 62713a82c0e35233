"""What a request may have of the engine: its caps, class, deadline and salt, from its fields, headers and key."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.errors import InvalidRequest
from octavo.sampling_params import SamplingParams
from octavo.server.queueing.admission_queue import Admission, class_of, engine_priority, salt_of
from octavo.server.request.limits import check_request

if TYPE_CHECKING:
    from octavo.server.models.model_handle import ServedModel
    from octavo.server.request.endpoint import Call

__all__ = ["admit", "deadline_of"]

_MAX_SECONDS = 7 * 86400.0


def admit(call: Call, served: ServedModel, prompts: Sequence[Sequence[int]], params: SamplingParams) -> Admission:
    """A request's way into the engine.

    Raises:
        InvalidRequest: it asks for too much, or a header cannot be read.
    """
    state, identity = call.state, call.identity
    settings = state.settings
    check_request(prompts, params, served.max_model_len, settings)
    level = _level(call, params)
    own = copy.copy(params)
    own.priority = engine_priority(level, params.priority)
    own.cache_salt = salt_of(identity, params.cache_salt, shared=settings.share_prefix_cache)
    return Admission(
        state.admission_queue(served),
        state.concurrency,
        identity,
        identity.max_concurrency if identity.max_concurrency is not None else settings.max_concurrency,
        level,
        prompts,
        own,
        served.max_model_len,
        deadline_of(call),
    )


def _level(call: Call, params: SamplingParams) -> str:
    for name in (b"x-priority", b"x-vllm-priority"):
        given = call.header(name)
        if given is not None:
            return class_of(call.identity, given, name.decode().title())
    return class_of(call.identity, params.priority or None, "priority")


def deadline_of(call: Call) -> float | None:
    """The earliest of what the request's body, its header and the server's setting give it, on the loop's clock.

    Raises:
        InvalidRequest: the header or the body names no time.
    """
    limits = [call.state.settings.request_timeout]
    if call.timeout is not None:
        limits.append(_seconds(call.timeout, "timeout"))
    given = call.header(b"x-request-timeout")
    if given is not None:
        try:
            limits.append(_seconds(float(given), "X-Request-Timeout"))
        except ValueError as error:
            if isinstance(error, InvalidRequest):
                raise
            raise InvalidRequest(
                f"X-Request-Timeout: {given[:40]!a} is no number of seconds", "X-Request-Timeout"
            ) from None
    known = [seconds for seconds in limits if seconds is not None]
    return call.context.arrival + min(known) if known else None


def _seconds(value: float, field: str) -> float:
    if not (math.isfinite(value) and 0 < value <= _MAX_SECONDS):
        raise InvalidRequest(f"{field}: {value:g} is not a number of seconds above 0 and up to {_MAX_SECONDS:g}", field)
    return value
