"""Protocol between client and engine worker: typed structs in msgpack, in length-prefixed frames.

A frame is a little-endian uint32, the payload's length, and the payload. Both ends cap the length, decode strictly and
treat anything malformed as the end of the connection: the socket is private to the two, so a bad frame is a fault in
one of them and not something to skip. What a *user* may get wrong (a request's values) is decoded a request at a time,
so that it ends that request alone.

    client                         worker
      Load(config)          ->
                            <-     Progress... then Ready(info) or LoadFailed
      Submit(requests)      ->
      Abort(request ids)    ->
                            <-     StepOutputs, one a step; Rejected
      StatsQuery            ->
                            <-     Stats
                            <-     Fatal, then the end
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

import octavo.errors
from octavo.config import EngineConfig
from octavo.errors import InvalidRequest, OctavoError
from octavo.runner.interface import ModelInfo

__all__ = [
    "MAX_FRAME_BYTES",
    "Abort",
    "Accepted",
    "Constraint",
    "ErrorRecord",
    "Fatal",
    "FrameReader",
    "FromClient",
    "FromWorker",
    "Load",
    "LoadFailed",
    "Logprobs",
    "Progress",
    "ProtocolError",
    "Ready",
    "Rejected",
    "Request",
    "Stats",
    "StatsQuery",
    "StepOutputs",
    "Submit",
    "encode_frame",
]

MAX_FRAME_BYTES = 1 << 26
_HEADER = struct.Struct("<I")
_ENCODER = msgspec.msgpack.Encoder()


class ProtocolError(Exception):
    """A frame that this protocol does not know; the connection is of no use any more."""


# ---------------------------------------------------------------- errors


class ErrorRecord(msgspec.Struct, array_like=True, frozen=True):
    """An exception as data: its class in `octavo.errors`, its message and the field at fault."""

    kind: str
    message: str
    field: str | None = None

    @classmethod
    def of(cls, error: OctavoError) -> ErrorRecord:
        """Write an exception down."""
        return cls(type(error).__name__, str(error), getattr(error, "field", None))

    def exception(self) -> OctavoError:
        """The exception again; a class this side does not know becomes a plain OctavoError."""
        known = self.kind in octavo.errors.__all__
        kind: type[OctavoError] = getattr(octavo.errors, self.kind) if known else OctavoError
        return kind(self.message, self.field) if issubclass(kind, InvalidRequest) else kind(self.message)


# ---------------------------------------------------------------- from the client


class Load(msgspec.Struct, tag="load", frozen=True):
    """The first message: what to load."""

    config: EngineConfig


class Constraint(msgspec.Struct, array_like=True, frozen=True):
    """Constraints on every output token of a request; None or empty for none.

    Attributes:
        grammar: kind and text, as `octavo._core.Vocabulary.compile` takes them.
        allowed_token_ids: the only tokens that may be drawn.
        bad_words: sequences of tokens that may not come out.
    """

    grammar: tuple[str, str] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[list[int]] = []


class Request(msgspec.Struct, array_like=True, frozen=True):
    """One request.

    Attributes:
        request_id: chosen by the client, never used twice.
        prompt: int32 token ids.
        params: an encoded `SamplingParams` with seed and max_tokens filled in, and without what `constraint` says;
            decoded a request at a time.
        constraint: what its answers are held to.
    """

    request_id: int
    prompt: bytes
    params: msgspec.Raw
    constraint: Constraint | None = None


class Submit(msgspec.Struct, tag="submit", frozen=True):
    """Requests to queue, in order.

    Attributes:
        requests: any number.
        batch: all or none: the engine answers `Accepted`, or one `Rejected` and forgets the whole batch.
        more: the batch goes on in the next message; the engine takes no step before it is whole.
    """

    requests: list[Request]
    batch: bool = False
    more: bool = False


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """Requests to end; unknown ids are ignored."""

    request_ids: list[int]


class StatsQuery(msgspec.Struct, tag="stats", frozen=True):
    """Asks for `Stats`."""

    query_id: int


FromClient = Load | Submit | Abort | StatsQuery

# ---------------------------------------------------------------- from the worker


class Progress(msgspec.Struct, tag="progress", frozen=True):
    """Progress of a stage of loading; total is 0 if unknown."""

    stage: str
    done: int
    total: int


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """The model is loaded."""

    info: ModelInfo


class LoadFailed(msgspec.Struct, tag="load_failed", frozen=True):
    """The model cannot be served; the worker ends."""

    error: ErrorRecord


class Logprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log probabilities of a step's events, as bytes.

    Attributes:
        chosen: float32[E].
        width: columns of the next two.
        top_ids: int32[E, width], likeliest first.
        top: float32[E, width].
    """

    chosen: bytes
    width: int
    top_ids: bytes
    top: bytes


class StepOutputs(msgspec.Struct, tag="step", frozen=True, omit_defaults=True):
    """One step's events, an event a sampled token; arrays as in `octavo._core.StepOutput`.

    Attributes:
        started: int64 ids of the requests that were scheduled for the first time.
        started_at: when, on this machine's `time.monotonic()`.
    """

    request_ids: bytes
    sample_indices: bytes
    token_ids: bytes
    text_ends: bytes
    text: bytes
    finish_reasons: bytes
    stop_reasons: bytes
    cached_tokens: bytes
    logprobs: Logprobs | None = None
    started: bytes = b""
    started_at: float = 0.0


class Accepted(msgspec.Struct, tag="accepted", frozen=True):
    """A batch is queued whole."""


class Rejected(msgspec.Struct, tag="rejected", frozen=True):
    """A request that was refused; the others go on."""

    request_id: int
    error: ErrorRecord


class Stats(msgspec.Struct, tag="stats_reply", frozen=True):
    """The core's gauges and counters."""

    query_id: int
    values: dict[str, int | float]


class Fatal(msgspec.Struct, tag="fatal", frozen=True):
    """The worker ends with its requests; why, in one line."""

    message: str


FromWorker = Progress | Ready | LoadFailed | StepOutputs | Accepted | Rejected | Stats | Fatal

# ---------------------------------------------------------------- frames


def encode_frame(message: FromClient | FromWorker) -> bytes:
    """One frame.

    Raises:
        ProtocolError: larger than the cap.
    """
    payload = _ENCODER.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a message of {len(payload)} bytes is over the cap of {MAX_FRAME_BYTES}")
    return _HEADER.pack(len(payload)) + payload


class FrameReader:
    """Cuts a byte stream into messages.

    Args:
        kind: `FromClient` or `FromWorker`: what this end accepts.
    """

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Any]:
        """Take bytes as they come; the messages they complete.

        Raises:
            ProtocolError: a frame over the cap, or one that does not decode.
        """
        buffer = self._buffer
        buffer += data
        messages: list[Any] = []
        at = 0
        while len(buffer) - at >= 4:
            (length,) = _HEADER.unpack_from(buffer, at)
            if length > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame of {length} bytes is over the cap of {MAX_FRAME_BYTES}")
            end = at + 4 + length
            if len(buffer) < end:
                break
            try:
                # The copy is what the message's own bytes refer to.
                messages.append(self._decoder.decode(bytes(memoryview(buffer)[at + 4 : end])))
            except msgspec.DecodeError as error:
                raise ProtocolError(f"a frame of {length} bytes does not decode: {error}") from error
            at = end
        del buffer[:at]
        return messages
