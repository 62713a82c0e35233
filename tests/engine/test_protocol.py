"""Frames: any cut of the stream gives the same messages; what is no message is refused."""

from __future__ import annotations

import random
import struct

import msgspec
import octavo.errors
import pytest
from hypothesis import given
from hypothesis import strategies as st
from octavo.config import EngineConfig
from octavo.engine.protocol import (
    MAX_FRAME_BYTES,
    Abort,
    ErrorRecord,
    Fatal,
    FrameReader,
    FromClient,
    FromWorker,
    Load,
    Logprobs,
    ProtocolError,
    Request,
    StepOutputs,
    Submit,
    encode_frame,
)
from octavo.engine.requests import submissions

STEP = StepOutputs(b"12345678", b"1234", b"abcd", b"efgh", "héé".encode(), b"ijkl", b"mnop", b"qrst")


def test_every_message_survives_any_cut_of_the_stream() -> None:
    request = Request(7, b"\0" * 40, msgspec.Raw(msgspec.msgpack.encode({"n": 2})))
    sent = [
        Load(EngineConfig(model="demo", num_blocks=9)),
        Submit([request, request], batch=True, more=True),
        Abort([1, 2, 3]),
    ]
    stream = b"".join(encode_frame(message) for message in sent)
    rng = random.Random(0)
    for size in (1, 2, 3, 7, 1000):
        reader, got, at = FrameReader(FromClient), [], 0
        while at < len(stream):
            step = rng.randint(1, size)
            got += reader.feed(stream[at : at + step])
            at += step
        assert got == sent


def test_step_outputs_keep_their_bytes_after_the_reader_goes_on() -> None:
    reader = FrameReader(FromWorker)
    with_logprobs = msgspec.structs.replace(STEP, logprobs=Logprobs(b"1111", 1, b"2222", b"3333"))
    first, second = reader.feed(encode_frame(STEP) + encode_frame(with_logprobs))
    reader.feed(encode_frame(Fatal("x" * 1000)))
    assert first == STEP
    assert second == with_logprobs


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"hello",
        msgspec.msgpack.encode({"type": "no such message"}),
        msgspec.msgpack.encode({"type": "abort", "request_ids": ["one"]}),
        msgspec.msgpack.encode({"type": "load", "config": {"model": "demo", "block_size": 7}}),
        msgspec.msgpack.encode({"type": "load", "config": {"model": "demo", "unknown": 7}}),
        encode_frame(Fatal("a worker's message"))[4:],
        encode_frame(Abort([1]))[4:] + b"more",
    ],
)
def test_a_frame_that_is_no_message_is_refused(payload: bytes) -> None:
    reader = FrameReader(FromClient)
    assert reader.feed(encode_frame(Abort([5]))) == [Abort([5])]
    with pytest.raises(ProtocolError):
        reader.feed(struct.pack("<I", len(payload)) + payload)


def test_a_frame_over_the_cap_is_refused_before_it_is_read() -> None:
    with pytest.raises(ProtocolError, match="over the cap"):
        FrameReader(FromClient).feed(struct.pack("<I", MAX_FRAME_BYTES + 1))
    with pytest.raises(ProtocolError, match="over the cap"):
        encode_frame(Fatal("x" * (MAX_FRAME_BYTES + 1)))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_messages_or_refused_and_nothing_else(data: bytes) -> None:
    reader = FrameReader(FromClient)
    try:
        messages = reader.feed(data)
    except ProtocolError:
        return
    assert all(isinstance(message, FromClient) for message in messages)


def test_errors_cross_with_their_class_field_and_message() -> None:
    for name in octavo.errors.__all__:
        kind = getattr(octavo.errors, name)
        error = kind("what", "prompt") if issubclass(kind, octavo.errors.InvalidRequest) else kind("what")
        again = ErrorRecord.of(error).exception()
        assert type(again) is kind
        assert str(again) == "what"
        assert getattr(again, "field", None) == getattr(error, "field", None)


def test_an_unknown_error_class_stays_an_octavo_error() -> None:
    assert type(ErrorRecord("SystemExit", "what").exception()) is octavo.errors.OctavoError


def test_many_requests_become_messages_that_fit() -> None:
    big = [Request(i, b"\0" * 400_000, msgspec.Raw(b"\x80")) for i in range(400)]
    messages = list(submissions(big, batch=True))
    assert [request for message in messages for request in message.requests] == big
    assert all(len(encode_frame(message)) < MAX_FRAME_BYTES for message in messages)
    assert [message.more for message in messages] == [True] * (len(messages) - 1) + [False]
    assert list(submissions([])) == []
