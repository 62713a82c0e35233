"""Chunks of a streamed response as server-sent events."""

from __future__ import annotations

import time
from typing import Any

import msgspec

__all__ = ["ChunkWriter"]

_encode = msgspec.json.Encoder().encode


class ChunkWriter:
    """Frames the chunks of one response; the shared part is encoded once.

    Args:
        response_id: the response's `id`, the same in every chunk.
        kind: the chunks' `object`.
        model: served name.
        fingerprint: `system_fingerprint`, as in whole responses.
        null_usage: chunks without usage say `"usage": null`, as OpenAI's do where the last chunk brings it.
    """

    def __init__(self, response_id: str, kind: str, model: str, fingerprint: str, *, null_usage: bool = False) -> None:
        shared = _encode(
            {
                "id": response_id,
                "object": kind,
                "created": int(time.time()),
                "model": model,
                "system_fingerprint": fingerprint,
            }
        )
        self._head = b"data: " + shared[:-1] + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if null_usage else b"]}\n\n"

    def chunk(
        self,
        choices: list[dict[str, Any]],
        usage: Any = None,
        prompt_token_ids: list[int] | None = None,
    ) -> bytes:
        """Any chunk; what is None is left out."""
        inner = b",".join(_encode(choice) for choice in choices)
        tail = self._tail if usage is None else b'],"usage":%b}\n\n' % _encode(usage)
        if prompt_token_ids is not None:
            tail = tail[:-3] + b',"prompt_token_ids":%b}\n\n' % _encode(prompt_token_ids)
        return self._head + inner + tail

    def closing(self, usage: Any) -> bytes:
        """The end of the stream, after a chunk with the usage if there is one."""
        return (b"" if usage is None else self.chunk([], usage)) + b"data: [DONE]\n\n"

    def chat_text(self, choice: int, text: str) -> bytes:
        """A chunk of a chat that adds text and nothing else."""
        return b'%b{"index":%d,"delta":{"content":%b},"logprobs":null,"finish_reason":null}%b' % (
            self._head,
            choice,
            _encode(text),
            self._tail,
        )

    def completion_text(self, choice: int, text: str) -> bytes:
        """A chunk of a completion that adds text and nothing else."""
        return b'%b{"index":%d,"text":%b,"logprobs":null,"finish_reason":null,"stop_reason":null}%b' % (
            self._head,
            choice,
            _encode(text),
            self._tail,
        )
