"""The worker's end of the socket: it never blocks on a slow client."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from octavo.engine.connection import MAX_PENDING_BYTES, ClientGone, Connection
from octavo.engine.protocol import Abort, Fatal, FrameReader, FromWorker, ProtocolError, encode_frame


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, Connection]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, Connection(theirs)


def test_send_keeps_what_a_slow_client_does_not_take(ends: tuple[socket.socket, Connection]) -> None:
    ours, connection = ends
    sent, begun = 0, time.monotonic()
    while not connection.clogged:
        connection.send(Fatal(f"{sent} " + "x" * 100_000))
        sent += 1
    assert time.monotonic() - begun < 10
    assert MAX_PENDING_BYTES <= sent * 100_000 < 2 * MAX_PENDING_BYTES
    reader, got = FrameReader(FromWorker), []
    thread = threading.Thread(target=lambda: [connection.exchange(block=True) for _ in range(1)])
    thread.start()
    while len(got) < sent:
        got += reader.feed(ours.recv(1 << 20))
        if not thread.is_alive():
            connection.exchange(block=False)
    thread.join()
    assert [int(message.message.split()[0]) for message in got] == list(range(sent)), "nothing lost, in order"
    assert not connection.clogged


def test_exchange_without_block_returns_at_once(ends: tuple[socket.socket, Connection]) -> None:
    ours, connection = ends
    assert connection.exchange(block=False) == []
    ours.sendall(encode_frame(Abort([1])) + encode_frame(Abort([2]))[:5])
    assert connection.exchange(block=False) == [Abort([1])]
    ours.sendall(encode_frame(Abort([2]))[5:])
    assert connection.exchange(block=True) == [Abort([2])]


def test_a_closed_client_is_noticed_reading_and_writing(ends: tuple[socket.socket, Connection]) -> None:
    ours, connection = ends
    ours.close()
    with pytest.raises(ClientGone):
        connection.exchange(block=True)
    with pytest.raises(ClientGone):
        connection.send(Fatal("nobody hears this"))


def test_garbage_is_refused(ends: tuple[socket.socket, Connection]) -> None:
    ours, connection = ends
    ours.sendall(struct.pack("<I", 3) + b"abc")
    with pytest.raises(ProtocolError):
        connection.exchange(block=True)


def test_a_wake_up_ends_a_blocking_exchange() -> None:
    ours, theirs = socket.socketpair()
    wake, waker = socket.socketpair()
    with ours, theirs, wake, waker:
        connection = Connection(theirs, wake.fileno())
        timer = threading.Timer(0.05, waker.send, (b"x",))
        timer.start()
        assert connection.exchange(block=True) == []
        timer.join()
