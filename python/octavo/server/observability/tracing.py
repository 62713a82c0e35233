"""W3C trace context: the trace that a request belongs to. It needs no OpenTelemetry; `spans` exports spans."""

from __future__ import annotations

import random
import re

__all__ = ["Trace", "parse_tracestate", "trace_of"]

_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NO_TRACE = b"0" * 32
_NO_SPAN = b"0" * 16
_MAX_TRACESTATE = 512
_MAX_MEMBERS = 32
_KEY = r"[a-z0-9][a-z0-9_\-*/]{0,240}(?:@[a-z][a-z0-9_\-*/]{0,13})?"
_MEMBER = re.compile(rf"({_KEY})=([\x20-\x2b\x2d-\x3c\x3e-\x7e]{{0,255}}[\x21-\x2b\x2d-\x3c\x3e-\x7e])")
# Ids must be unique, not secret.
_random = random.Random()  # noqa: S311


class Trace:
    """A trace and this server's span in it.

    Args:
        trace_id: 32 hex digits; None for a new trace.
        parent_id: 16 hex digits, the caller's span; None if the trace begins here.
        sampled: whether the caller records it.
        tracestate: from the caller, checked; empty for none.

    Attributes:
        span_id: 16 hex digits, this server's span.
    """

    __slots__ = ("parent_id", "sampled", "span_id", "trace_id", "tracestate")

    def __init__(
        self,
        trace_id: str | None = None,
        parent_id: str | None = None,
        sampled: bool = True,
        tracestate: str = "",
    ) -> None:
        self.trace_id = trace_id or f"{_random.getrandbits(128) | 1:032x}"
        self.span_id = f"{_random.getrandbits(64) | 1:016x}"
        self.parent_id = parent_id
        self.sampled = sampled
        self.tracestate = tracestate

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        """Response headers: `X-Trace-Id` and `traceresponse`."""
        response = f"00-{self.trace_id}-{self.span_id}-{'01' if self.sampled else '00'}"
        return [(b"x-trace-id", self.trace_id.encode()), (b"traceresponse", response.encode())]


def trace_of(headers: list[tuple[bytes, bytes]]) -> Trace | None:
    """The trace in a request's headers; None if it is missing or, as the standard asks, invalid."""
    parents = [value for name, value in headers if name == b"traceparent"]
    if len(parents) != 1:
        return None
    match = _TRACEPARENT.fullmatch(parents[0].strip(b" \t"))
    if match is None:
        return None
    version, trace_id, parent_id, flags, rest = match.groups()
    if version == b"ff" or trace_id == _NO_TRACE or parent_id == _NO_SPAN or (version == b"00" and rest):
        return None
    state = b",".join(value for name, value in headers if name == b"tracestate")
    return Trace(trace_id.decode(), parent_id.decode(), bool(int(flags, 16) & 1), parse_tracestate(state))


def parse_tracestate(state: bytes) -> str:
    """A `tracestate` header, normalized; empty if it is invalid, as the trace goes on without it."""
    if len(state) > _MAX_TRACESTATE:
        return ""
    members = [member.strip(" \t") for member in state.decode("latin-1").split(",")]
    members = [member for member in members if member]
    matches = [_MEMBER.fullmatch(member) for member in members]
    keys = {match.group(1) for match in matches if match}
    if len(members) > _MAX_MEMBERS or not all(matches) or len(keys) != len(members):
        return ""
    return ",".join(members)
