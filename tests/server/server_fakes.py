"""An engine without a model: answers a fixed text, a character a token, and remembers what became of each request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from octavo.engine.outputs import OutputDelta, TokenLogprobs
from octavo.errors import ContextLengthExceeded, EngineDead, InvalidRequest
from octavo.runner.interface import ModelInfo
from octavo.sampling_params import SamplingParams
from octavo.text.token_bytes import SPECIAL, TokenBytes

# Latin, accents, an emoji of four bytes, CJK: a character a token.
REPLY = "Hello, wörld! 🎉 数据 and more. "
MAX_MODEL_LEN = 256
VOCAB_SIZE = ord("🎉") + 1
# A prompt that holds this id breaks inside the engine.
BROKEN_TOKEN = 666


class FakeTokenizer:
    """A character a token; the id is its code point."""

    has_chat_template = True
    max_token_bytes = 4
    bos_token_id = 1
    vocabulary = TokenBytes([b"", b""], bytes([SPECIAL, SPECIAL]), False)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return ([1] if add_special_tokens else []) + [ord(character) for character in text]

    def apply_chat_template(self, messages: Sequence[Mapping[str, Any]], /, **arguments: Any) -> str:
        if arguments.get("refuse"):
            raise InvalidRequest("messages: the template refuses them", "messages")
        text = "".join(f"<{message['role']}>{message['content']}" for message in messages)
        return text + ("<assistant>" if arguments.get("add_generation_prompt", True) else "")

    special_tokens: dict[str, str] = {"bos_token": "\x01"}  # noqa: RUF012
    chat_template = "{{ messages }}"
    eos_token_ids = (0,)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return b"" if token_id < 2 else chr(token_id).encode("utf-8", "replace")


class FakeEngine:
    """Stands in for `AsyncEngine`.

    Args:
        delay: seconds a token.
        reply: what it answers, and then stops; a text without end when None.
        stop_reason: of an answer that stops.
        constrains_output: it says that it holds its output to a schema.

    Attributes:
        prompts: token ids of every request, in order.
        params: their sampling parameters.
        running: requests that run now.
        aborted: requests that were closed before their end.
        dead: set it to end the engine.
        silent: its tokens have no text, as those of a model without a tokenizer.
    """

    def __init__(
        self,
        delay: float = 0.0,
        max_model_len: int = MAX_MODEL_LEN,
        *,
        reply: str | None = None,
        stop_reason: str | None = None,
        constrains_output: bool = False,
    ) -> None:
        self.reply = REPLY if reply is None else reply
        self.ends = reply is not None
        self.stop_reason = stop_reason
        self.constrains_output = constrains_output
        self.model = ModelInfo(
            name="fake",
            architecture="Fake",
            max_model_len=max_model_len,
            vocab_size=VOCAB_SIZE,
            num_blocks=65,
            block_size=16,
            max_num_seqs=256,
            dtype="float32",
            device="cpu",
            weights_bytes=0,
            kv_bytes=0,
        )
        self.tokenizer: FakeTokenizer | None = FakeTokenizer()
        self.delay = delay
        self.prompts: list[list[int]] = []
        self.params: list[SamplingParams] = []
        self.running = 0
        self.aborted = 0
        self.generated = 0
        self.dead = False
        self.silent = False
        self.closed = False

    def check_health(self) -> None:
        if self.dead:
            raise EngineDead("the engine process ended")

    async def close(self) -> None:
        self.closed = True

    async def stats(self) -> dict[str, int | float]:
        self.check_health()
        return STATS | {"running": self.running, "generation_tokens": self.generated}

    async def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
        sink: object = None,
        whole: bool = False,
    ) -> AsyncIterator[OutputDelta]:
        params = params or SamplingParams()
        assert not isinstance(prompt, str), "the server sends token ids"
        token_ids = list(prompt)
        self.check_health()
        if not token_ids:
            raise InvalidRequest("prompt: is empty", "prompt")
        if len(token_ids) >= self.model.max_model_len:
            raise ContextLengthExceeded(
                f"prompt: {len(token_ids)} tokens are more than the model's context of {self.model.max_model_len}",
                "prompt",
            )
        if BROKEN_TOKEN in token_ids:
            raise RuntimeError("a fault inside the engine, with a secret path")
        self.prompts.append(token_ids)
        self.params.append(params)
        self.running += 1
        complete = False
        try:
            count = min(params.max_tokens or 1 << 30, self.model.max_model_len - len(token_ids))
            stops = self.ends and len(self.reply) <= count
            count = len(self.reply) if stops else count
            for position in range(count):
                if self.delay:
                    await asyncio.sleep(self.delay)
                self.check_health()
                for index in range(params.n):
                    delta = self._delta(position, count, index, params, len(token_ids))
                    if stops and delta.finish_reason:
                        delta.finish_reason, delta.stop_reason = "stop", self.stop_reason
                    yield delta
            complete = True
        finally:
            self.running -= 1
            self.aborted += not complete

    def _delta(self, position: int, count: int, index: int, params: SamplingParams, cached: int) -> OutputDelta:
        character = self.reply[position % len(self.reply)]
        token_id = ord(character)
        self.generated += 1
        last = position == count - 1
        top = [(token_id, -0.5), (ord("x"), float("-inf"))][: params.logprobs or 0]
        return OutputDelta(
            index=index,
            text="" if self.silent else character,
            token_ids=[token_id],
            logprobs=None if params.logprobs is None else [TokenLogprobs(token_id, -0.5, top)],
            finish_reason="length" if last else None,
            num_cached_tokens=cached // 16 * 16,
        )


STATS: dict[str, int | float] = {
    "running": 0,
    "waiting": 2,
    "deferred": 1,
    "blocks_total": 64,
    "blocks_used": 16,
    "blocks_free": 48,
    "blocks_cached": 8,
    "prefix_query_tokens": 100,
    "prefix_hit_tokens": 40,
    "preemptions": 3,
    "evictions": 5,
    "allocations": 30,
    "frees": 14,
    "steps": 7,
    "host_plan_seconds": 0.5,
    "host_wait_seconds": 2.25,
    "slots_held": 256,
    "slots_unfilled": 64,
    "step_tokens": 300,
    "step_tokens_1": 2,
    "step_tokens_128": 1,
}


def answer(count: int) -> str:
    """The text of `count` tokens."""
    return "".join(REPLY[position % len(REPLY)] for position in range(count))
