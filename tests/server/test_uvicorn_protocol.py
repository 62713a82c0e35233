"""What `HttpProtocol` relies on in uvicorn's protocol class. A failure here means that a new uvicorn changed it."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import Mock

import uvicorn
from octavo.server.transport.http_protocol import HttpProtocol
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

# Methods that HttpProtocol extends, and fields that it reads or sets.
PROTOCOL_METHODS = {
    "connection_made", "connection_lost", "eof_received", "data_received", "pause_writing", "resume_writing",
    "shutdown", "on_response_complete", "timeout_keep_alive_handler", "on_message_begin", "on_url", "on_header",
    "on_headers_complete", "on_body", "on_message_complete",
}  # fmt: skip
PROTOCOL_FIELDS = {
    "app", "cycle", "expect_100_continue", "flow", "headers", "loop", "parser", "root_path", "scope",
    "timeout_keep_alive_task", "transport", "url",
}  # fmt: skip
CYCLE_FIELDS = {
    "chunked_encoding", "disconnected", "expected_content_length", "keep_alive", "message_event", "more_body",
    "response_complete", "scope",
}  # fmt: skip


async def application(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"a", "more_body": True})
    await send({"type": "http.response.body", "body": b"b"})


def test_uvicorn_has_what_the_protocol_relies_on() -> None:
    async def main() -> None:
        config = uvicorn.Config(application, loop="none", ws="none", lifespan="off", log_config=None)
        config.load()
        protocol = HttpProtocol(config, ServerState(), {})
        transport = Mock(spec=asyncio.Transport)
        transport.is_closing.return_value = False
        transport.get_extra_info.return_value = None
        protocol.connection_made(transport)
        protocol.data_received(b"GET /path?query HTTP/1.1\r\nHost: x\r\n\r\n")
        cycle = protocol.cycle

        lacking = {name for name in PROTOCOL_METHODS if not hasattr(HttpToolsProtocol, name)}
        lacking |= {name for name in PROTOCOL_FIELDS if not hasattr(protocol, name)}
        lacking |= {f"cycle.{name}" for name in CYCLE_FIELDS if not hasattr(cycle, name)}
        lacking |= {f"flow.{name}" for name in ("write_paused",) if not hasattr(protocol.flow, name)}
        assert not lacking, f"uvicorn {uvicorn.__version__} lacks {lacking}: adapt HttpProtocol"

        assert (cycle.more_body, cycle.chunked_encoding, cycle.response_complete) == (False, None, False)
        assert (cycle.scope["path"], cycle.scope["query_string"]) == ("/path", b"query")
        while not cycle.response_complete:
            await asyncio.sleep(0)
        assert cycle.chunked_encoding is True
        written = b"".join(call.args[0] for call in transport.write.call_args_list)
        assert written.startswith(b"HTTP/1.1 200 OK\r\n")
        assert written.endswith(b"\r\n\r\n1\r\na\r\n1\r\nb\r\n0\r\n\r\n")
        assert protocol.timeout_keep_alive_task is not None
        protocol.connection_lost(None)

    asyncio.run(main())
