"""The engine for asyncio programs: the model runs in a worker process, its answers arrive as streams."""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from octavo.config import EngineConfig
from octavo.engine.client import EngineClient
from octavo.engine.collect import RequestState, Sink, apply
from octavo.engine.engine_state import EngineState
from octavo.engine.outputs import OutputDelta, RequestOutput
from octavo.engine.process import WORKER_COMMAND
from octavo.engine.protocol import (
    Abort,
    Fatal,
    Load,
    LoadFailed,
    Progress,
    Ready,
    Rejected,
    Request,
    Stats,
    StatsQuery,
    StepOutputs,
)
from octavo.engine.requests import RequestMaker, submissions
from octavo.errors import EngineDead, InvalidRequest
from octavo.runner.interface import ModelInfo
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.loading.resolve import ModelSource
    from octavo.text.tokenizer import Tokenizer

__all__ = ["AsyncEngine"]

_T = TypeVar("_T")
_MAX_TEXT_THREADS = 4


class _Stream(RequestState):
    """A request and whoever waits for it.

    Attributes:
        ready: set when there is something to take, or (with `whole`) when all is there.
        whole: the consumer wants the request as a whole, so wake it once.
    """

    def __init__(
        self, name: str, prompt: str | None, prompt_token_ids: list[int], params: SamplingParams, whole: bool
    ) -> None:
        super().__init__(name, prompt, prompt_token_ids, params)
        self.ready = asyncio.Event()
        self.whole = whole

    def fail(self, error: Exception) -> None:
        """Raise an error in the consumer."""
        self.error = error
        self.ready.set()


class AsyncEngine:
    """One model in a worker process, for one event loop.

    How much is under way is bounded from both ends. A request is queued only while the worker keeps up with reading;
    callers wait meanwhile. Should this process stop reading (its event loop is blocked), the worker buffers a few
    megabytes of outputs, then takes no step until they are read. How many requests may wait in the worker's queue is
    the caller's to decide: each costs its prompt's tokens.

    Attributes:
        config: as given.
        model: what was loaded.
        tokenizer: the model's tokenizer and chat template; None for a model that has none.
        constrains_output: it holds answers to `SamplingParams.structured_outputs`.
    """

    constrains_output = True
    config: EngineConfig
    model: ModelInfo
    tokenizer: Tokenizer | None
    _requests: RequestMaker

    def __init__(self, config: EngineConfig) -> None:
        """Use `start`."""
        self.config = config
        self.tokenizer = None
        self._name = config.model
        self._client: EngineClient
        self._loaded: asyncio.Future[ModelInfo]
        self._command: Sequence[str] | None = None
        # As the worker is told them: with the model's files found.
        self._settings = config
        self._progress: Callable[[str, int, int], None] | None = None
        self._recommended: Mapping[str, float] = {}
        self._threads = ThreadPoolExecutor(min(_MAX_TEXT_THREADS, os.cpu_count() or 1), "octavo-text")
        self._streams: dict[int, _Stream] = {}
        self._ids: dict[str, int] = {}
        self._last_id = 0
        self._outbox: list[Request] = []
        self._aborts: list[int] = []
        self._queries: dict[int, asyncio.Future[dict[str, int | float]]] = {}
        self._fatal: str | None = None
        self._reason: str | None = None
        self._stage: tuple[str, int, int] | None = None
        self._since = time.time()
        self._reconnect()

    @classmethod
    async def start(
        cls,
        config: EngineConfig | str,
        *,
        progress: Callable[[str, int, int], None] | None = None,
        worker_command: Sequence[str] | None = None,
    ) -> AsyncEngine:
        """Start the worker process and wait until the model is ready.

        Args:
            config: the model and the engine's settings; a model's name alone stands for the usual ones.
            progress: called in the event loop with (stage, done, total) as the model is fetched and loaded; total is 0
                where it is not known.
            worker_command: runs another worker program, which brings a model of its own and no tokenizer (tests).

        Raises:
            ModelError, ConfigError: the worker's own refusal (`ModelNotFound`, `CorruptFile`, `NotEnoughMemory`...).
            EngineDead: the worker process ended before it was ready.
        """
        self = cls(EngineConfig(model=config) if isinstance(config, str) else config)
        await self.load(progress=progress, worker_command=worker_command)
        return self

    async def load(
        self,
        *,
        progress: Callable[[str, int, int], None] | None = None,
        worker_command: Sequence[str] | None = None,
    ) -> None:
        """What `start` does beside construction; `state()` says meanwhile how far it is. Once.

        Raises:
            ModelError, ConfigError, EngineDead: as `start`.
        """
        self._progress = progress
        self._command = worker_command
        try:
            await self._client.start(WORKER_COMMAND if worker_command is None else worker_command)
            if worker_command is None:
                await self._load()
            else:
                self._client.send(Load(self.config))
            self.model = await self._loaded
        except BaseException:
            self._client.kill()
            if not self._loaded.cancel() and not self._loaded.cancelled():
                self._loaded.exception()
            await self.close()
            raise
        self._requests = RequestMaker(self.model, self.config.seed, self.tokenizer)
        self._mark_ready()

    async def _find(self) -> ModelSource:
        """The model's files."""
        from octavo.engine.loop_builder import find_model

        loop = asyncio.get_running_loop()

        def progress(stage: str, done: int, total: int) -> None:
            loop.call_soon_threadsafe(self._note_progress, stage, done, total)

        source = await self._in_thread(lambda: find_model(self.config, progress))
        self._recommended = source.sampling_defaults
        if source.kind == "fake":
            self._name = source.name
        # A restart takes the same files, whatever the name stands for by then.
        self._settings = msgspec.structs.replace(self.config, model=str(source.path))
        return source

    async def _load(self) -> None:
        """Find the model, tell the worker, and build the tokenizer while it loads."""
        source = await self._find()
        self._client.send(Load(self._settings))
        await self._read_tokenizer(source)

    async def _read_tokenizer(self, source: ModelSource | None = None) -> None:
        from octavo.engine.loop_builder import load_tokenizer

        source = source or await self._find()
        self.tokenizer = await self._in_thread(lambda: load_tokenizer(self.config, source))

    def _note_progress(self, stage: str, done: int, total: int) -> None:
        self._stage = (stage, done, total)
        if self._progress is not None:
            self._progress(stage, done, total)

    def _mark_ready(self) -> None:
        self._stage = None
        self._since = time.time()

    def _reconnect(self) -> EngineClient:
        """A client for the next worker, in place of the last one's."""
        client = EngineClient(self._receive, lambda reason: self._die(reason) if client is self._client else None)
        self._client = client
        self._loaded = asyncio.get_running_loop().create_future()
        self._fatal = None
        return client

    def state(self) -> EngineState:
        """Where the engine stands."""
        name: Literal["loading", "ready", "dead"] = "loading" if not hasattr(self, "_requests") else "ready"
        if self._reason is not None:
            name = "dead"
        return EngineState(
            name=name, reason=self._reason, since=self._since, pid=self._client.pid, progress=self._stage
        )

    async def _in_thread(self, function: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    # -------------------------------------------------------- requests

    async def stream(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
        sink: Sink | None = None,
        whole: bool = False,
    ) -> AsyncIterator[OutputDelta]:
        """Answer a prompt, piece by piece.

        The request is submitted when the iterator is first advanced, so a refusal is raised by the first
        `__anext__`. Closing the iterator, or cancelling the task that awaits it, aborts the request: its blocks are
        free within a step. Every answer's last delta carries its `finish_reason`; the iterator ends after the last
        answer's.

        A consumer may be as slow as it likes: what arrives meanwhile is merged into one delta an answer, so memory is
        bounded by the answers themselves and no other stream waits.

        Args:
            prompt: text, or token ids.
            params: how to sample; when None, 16 tokens by the model's recommended sampling.
            request_id: for `abort`; made up when None.
            add_special_tokens: let the tokenizer add its start token to a text (a rendered chat template has its own).
            sink: once an answer has begun and while the iterator is waited for, tokens go here at once, in order, and
                wake nobody. What it refuses, and every answer's last token, the iterator yields. It sees text alone,
                so it is of no use with log probabilities.
            whole: yield the beginning at once and all the rest at the end, as few pieces.

        Raises:
            InvalidRequest: empty prompt, an id outside the vocabulary, a request id in use.
            ContextLengthExceeded, CapacityExceeded: can never fit.
            EngineDead: the worker process ended; the answer is lost.
        """
        stream = await self._open(prompt, params, request_id, add_special_tokens, whole=False)
        try:
            while True:
                await stream.ready.wait()
                stream.ready.clear()
                stream.sink = None
                for delta in stream.take():
                    yield delta
                if stream.error is not None:
                    raise stream.error
                if stream.ready.is_set():
                    continue
                if stream.num_unfinished == 0:
                    return
                stream.sink, stream.whole = sink, whole
        finally:
            self._leave(stream)

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
    ) -> RequestOutput:
        """Answer a prompt, whole; arguments and errors as for `stream`. Cancelling the task aborts the request."""
        stream = await self._open(prompt, params, request_id, add_special_tokens, whole=True)
        try:
            await stream.ready.wait()
        finally:
            self._leave(stream)
        if stream.error is not None:
            raise stream.error
        return stream.output()

    async def chat(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None, **template_arguments: Any
    ) -> RequestOutput:
        """Answer a conversation, through the model's chat template.

        Args:
            messages: OpenAI's `{"role": ..., "content": ...}`.
            params: how to sample; up to the context's end when None.
            template_arguments: passed to the template. With `continue_final_message=True` the model continues the
                last message.
        """
        tokenizer = self._tokenizer()
        prompt = await self._in_thread(lambda: tokenizer.apply_chat_template(messages, **template_arguments))
        params = self._requests.defaults(max_tokens=None) if params is None else params
        begins = not template_arguments.get("continue_final_message", False)
        params = msgspec.structs.replace(params, begins_text=begins)
        return await self.generate(prompt, params, add_special_tokens=False)

    async def tokenize(self, prompt: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, computed in a thread."""
        tokenizer = self._tokenizer()
        return await self._in_thread(lambda: tokenizer.encode(prompt, add_special_tokens=add_special_tokens))

    def abort(self, request_id: str) -> bool:
        """End a request early; its stream gives one last delta an answer with `finish_reason` "abort".

        Returns:
            False when no such request runs.
        """
        number = self._ids.get(request_id)
        if number is None:
            return False
        stream = self._streams[number]
        self._leave(stream)
        stream.finish_early("abort")
        stream.ready.set()
        return True

    async def stats(self) -> dict[str, int | float]:
        """The core's gauges and counters, by name, with the engine's own.

        Raises:
            EngineDead: the worker process ended.
        """
        self.check_health()
        self._last_id += 1
        query: asyncio.Future[dict[str, int | float]] = asyncio.get_running_loop().create_future()
        self._queries[self._last_id] = query
        self._client.send(StatsQuery(self._last_id))
        values = await query
        return {**values, "open_requests": len(self._streams)}

    def check_health(self) -> None:
        """Raise EngineDead once the worker process has ended."""
        if self._reason is not None:
            raise EngineDead(self._reason)

    async def close(self) -> None:
        """End the worker process; open streams raise EngineDead. Idempotent."""
        self._bury("the engine was closed")
        await self._client.close()
        self._threads.shutdown(wait=False)

    async def _open(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None,
        request_id: str | None,
        add_special_tokens: bool,
        *,
        whole: bool,
    ) -> _Stream:
        """Check a request and queue it for the worker."""
        self.check_health()
        text = prompt if isinstance(prompt, str) else None
        ids = await self.tokenize(prompt, add_special_tokens=add_special_tokens) if isinstance(prompt, str) else prompt
        params = self._requests.defaults() if params is None else params
        constraint = None
        if params.is_constrained:
            # Words are tokenized and schemas written out.
            constraint = await self._in_thread(functools.partial(self._requests.constraint, params))
        await self._client.drain()
        self.check_health()
        number = self._last_id + 1
        name = f"request-{number}" if request_id is None else request_id
        if name in self._ids:
            raise InvalidRequest(f"request_id: {name!r} is in use; choose another or leave it out", "request_id")
        request = self._requests.make(number, ids, params, constraint)
        self._last_id = number
        stream = _Stream(name, text, list(ids), params, whole)
        self._streams[number] = stream
        self._ids[name] = number
        self._queue(self._outbox, request)
        return stream

    def _leave(self, stream: _Stream) -> None:
        """Forget a request, and abort it if it still runs."""
        number = self._ids.get(stream.name)
        if number is not None and self._streams.get(number) is stream:
            self._forget(number, stream)
            self._queue(self._aborts, number)

    def _forget(self, number: int, stream: _Stream) -> None:
        del self._streams[number]
        del self._ids[stream.name]

    def _queue(self, queue: list[_T], item: _T) -> None:
        """Send with whatever else the event loop's round brings, as one message."""
        if not self._outbox and not self._aborts:
            asyncio.get_running_loop().call_soon(self._flush)
        queue.append(item)

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        aborts, self._aborts = self._aborts, []
        for message in submissions(outbox):
            self._client.send(message)
        if aborts:
            self._client.send(Abort(aborts))

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest(
                "prompt: the model has no tokenizer; give token ids, or name a tokenizer in the settings",
                "prompt",
            )
        return self.tokenizer

    # -------------------------------------------------------- from the worker

    def _receive(self, message: Any) -> None:
        if isinstance(message, StepOutputs):
            for number, stream in apply(message, self._streams, push=not self._client.behind):
                if stream.num_unfinished == 0:
                    self._forget(number, stream)
                    stream.ready.set()
                elif not stream.whole:
                    stream.ready.set()
        elif isinstance(message, Rejected):
            rejected = self._streams.get(message.request_id)
            if rejected is not None:
                self._forget(message.request_id, rejected)
                rejected.fail(message.error.exception())
        elif isinstance(message, Stats):
            query = self._queries.pop(message.query_id, None)
            if query is not None and not query.done():
                query.set_result(message.values)
        elif isinstance(message, Progress):
            self._note_progress(message.stage, message.done, message.total)
        elif isinstance(message, Ready):
            self._settle(message.info)
        elif isinstance(message, LoadFailed):
            self._settle(message.error.exception())
        elif isinstance(message, Fatal):
            self._fatal = message.message

    def _settle(self, outcome: ModelInfo | Exception) -> None:
        """End the wait for the model, once."""
        if self._loaded.done():
            return
        if isinstance(outcome, ModelInfo):
            self._loaded.set_result(outcome.known_as(self._name, self._recommended))
        else:
            self._loaded.set_exception(outcome)
            # Perhaps nobody waits for it.
            self._loaded.exception()

    def _die(self, reason: str) -> None:
        """The worker has ended."""
        self._bury(self._with_last_words(reason))

    def _with_last_words(self, reason: str) -> str:
        return reason if self._fatal is None else f"{reason}: {self._fatal}"

    def _bury(self, reason: str) -> None:
        """Tell everyone who waits that there is no more to come; the first reason counts."""
        if self._reason is not None:
            return
        self._reason = reason
        self._since = time.time()
        self._settle(EngineDead(reason))
        self._fail_all(lambda: EngineDead(reason))

    def _fail_all(self, error: Callable[[], EngineDead]) -> None:
        """End all that runs."""
        streams, self._streams = self._streams, {}
        self._ids.clear()
        self._outbox.clear()
        self._aborts.clear()
        for stream in streams.values():
            stream.fail(error())
        queries, self._queries = self._queries, {}
        for query in queries.values():
            if not query.done():
                query.set_exception(error())

    async def __aenter__(self) -> AsyncEngine:
        """The engine itself; `close` at the end of the block."""
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Close."""
        await self.close()
