"""The engine for asyncio programs: the model runs in a worker process, and its output arrives as streams."""

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
from octavo.engine.collect import Sink
from octavo.engine.engine_state import EngineState
from octavo.engine.open_requests import OpenRequest, OpenRequests
from octavo.engine.outputs import OutputDelta, RequestOutput
from octavo.engine.process import WORKER_COMMAND
from octavo.engine.protocol import Fatal, Load, LoadFailed, Progress, Ready, Rejected, Stats, StatsQuery, StepOutputs
from octavo.engine.requests import RequestMaker
from octavo.errors import EngineDead, InvalidRequest
from octavo.runner.interface import ModelInfo
from octavo.sampling_params import SamplingParams

if TYPE_CHECKING:
    from octavo.loading.resolve import ModelSource
    from octavo.text.tokenizer import Tokenizer

__all__ = ["AsyncEngine"]

_T = TypeVar("_T")
_MAX_TEXT_THREADS = 4


class AsyncEngine:
    """One model in a worker process, for one event loop.

    Callers wait while the worker does not keep up with reading requests. If this process stops reading, the worker
    buffers a few megabytes of outputs and then takes no step. The caller limits how many requests wait in the worker.

    Attributes:
        config: as given.
        model: what was loaded.
        tokenizer: the model's tokenizer and chat template; None for a model that has none.
        constrains_output: `SamplingParams.structured_outputs` is supported.
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
        self._open_requests = OpenRequests(lambda message: self._client.send(message))
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
            config: the settings; a model's name alone means the defaults.
            progress: called in the event loop with (stage, done, total) while the model is fetched and loaded; total is
                0 if unknown.
            worker_command: runs another worker program, with a model of its own and no tokenizer (tests).

        Raises:
            ModelError, ConfigError: from the worker (`ModelNotFound`, `CorruptFile`, `NotEnoughMemory`...).
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
        """Do what `start` does, on an engine that was constructed. Call it once; `state()` shows the progress."""
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
        # A restart uses the same files, even if the name means others by then.
        self._settings = msgspec.structs.replace(self.config, model=str(source.path))
        return source

    async def _load(self) -> None:
        """Find the model, and build the tokenizer while the worker loads it."""
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
        """The state of the engine."""
        name: Literal["loading", "ready", "dead"] = "loading" if not hasattr(self, "_requests") else "ready"
        if self._reason is not None:
            name = "dead"
        return EngineState(
            name=name, reason=self._reason, since=self._since, pid=self._client.pid, progress=self._stage
        )

    async def _in_thread(self, function: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

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
        """Generate, and yield the output as it arrives.

        The first `__anext__` submits the request. Closing the iterator, or cancelling the task that awaits it, aborts
        the request within a step. The last delta of each completion has its `finish_reason`. Output that arrives while
        the consumer is busy is merged into one delta a completion, so a slow consumer delays no other stream.

        Args:
            prompt: text, or token ids.
            params: sampling parameters; when None, 16 tokens by the model's recommended sampling.
            request_id: for `abort`; generated when None.
            add_special_tokens: let the tokenizer add its start token to a text; a rendered chat template has its own.
            sink: takes text as soon as it arrives, without waking a task, while the iterator is awaited and once a
                completion has begun. The iterator yields what the sink refuses, and each last token. It cannot be used
                with log probabilities.
            whole: yield the beginning and, at the end, the rest.

        Raises:
            InvalidRequest: empty prompt, a token id outside the vocabulary, a request id in use.
            ContextLengthExceeded, CapacityExceeded: the request can never fit.
            EngineDead: the worker process ended; the output is lost.
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
            self._open_requests.leave(stream)

    async def generate(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        add_special_tokens: bool = True,
    ) -> RequestOutput:
        """Generate, and return the whole output; see `stream`. Cancelling the task aborts the request."""
        stream = await self._open(prompt, params, request_id, add_special_tokens, whole=True)
        try:
            await stream.ready.wait()
        finally:
            self._open_requests.leave(stream)
        if stream.error is not None:
            raise stream.error
        return stream.output()

    async def chat(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None, **template_arguments: Any
    ) -> RequestOutput:
        """Generate a reply to a conversation, rendered with the model's chat template.

        Args:
            messages: OpenAI's `{"role": ..., "content": ...}`.
            params: sampling parameters; when None, up to the end of the context.
            template_arguments: for the template; `continue_final_message=True` continues the last message.
        """
        tokenizer = self._tokenizer()
        prompt = await self._in_thread(lambda: tokenizer.apply_chat_template(messages, **template_arguments))
        params = self._requests.defaults(max_tokens=None) if params is None else params
        params = msgspec.structs.replace(params, begins_text=not template_arguments.get("continue_final_message"))
        return await self.generate(prompt, params, add_special_tokens=False)

    async def tokenize(self, prompt: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, computed in a thread."""
        encode = self._tokenizer().encode
        return await self._in_thread(lambda: encode(prompt, add_special_tokens=add_special_tokens))

    def abort(self, request_id: str) -> bool:
        """End a request; its stream yields one last delta a completion, with `finish_reason` "abort".

        Returns:
            False if no such request runs.
        """
        stream = self._open_requests.find(request_id)
        if stream is None:
            return False
        self._open_requests.leave(stream)
        stream.finish_early("abort")
        stream.ready.set()
        return True

    async def stats(self) -> dict[str, int | float]:
        """Gauges and counters of the core and the engine, by name. Raises EngineDead once the worker has ended."""
        self.check_health()
        number = self._open_requests.new_number()
        query: asyncio.Future[dict[str, int | float]] = asyncio.get_running_loop().create_future()
        self._queries[number] = query
        self._client.send(StatsQuery(number))
        values = await query
        return {**values, "open_requests": len(self._open_requests)}

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
    ) -> OpenRequest:
        """Check a request and queue it for the worker."""
        self.check_health()
        text = prompt if isinstance(prompt, str) else None
        ids = await self.tokenize(prompt, add_special_tokens=add_special_tokens) if isinstance(prompt, str) else prompt
        params = self._requests.defaults() if params is None else params
        constraint = None
        if params.is_constrained:
            # It tokenizes words and compiles schemas.
            constraint = await self._in_thread(functools.partial(self._requests.constraint, params))
        await self._client.drain()
        self.check_health()
        number = self._open_requests.next_number
        name = f"request-{number}" if request_id is None else request_id
        if self._open_requests.find(name) is not None:
            raise InvalidRequest(f"request_id: {name!r} is in use; choose another or remove it", "request_id")
        request = self._requests.make(number, ids, params, constraint)
        stream = OpenRequest(name, text, list(ids), params, whole)
        self._open_requests.add(number, stream, request)
        return stream

    def _tokenizer(self) -> Tokenizer:
        if self.tokenizer is None:
            raise InvalidRequest("prompt: the model has no tokenizer; give token ids, or set a tokenizer", "prompt")
        return self.tokenizer

    def _receive(self, message: Any) -> None:
        if isinstance(message, StepOutputs):
            self._open_requests.apply(message, push=not self._client.behind)
        elif isinstance(message, Rejected):
            self._open_requests.reject(message)
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
        """Resolve the wait for the model, once."""
        if self._loaded.done():
            return
        if isinstance(outcome, ModelInfo):
            self._loaded.set_result(outcome.known_as(self._name, self._recommended))
        else:
            self._loaded.set_exception(outcome)
            # Nobody may be waiting for it.
            self._loaded.exception()

    def _die(self, reason: str) -> None:
        self._bury(self._with_last_words(reason))

    def _with_last_words(self, reason: str) -> str:
        return reason if self._fatal is None else f"{reason}: {self._fatal}"

    def _bury(self, reason: str) -> None:
        """Fail everything that waits; the first reason counts."""
        if self._reason is not None:
            return
        self._reason = reason
        self._since = time.time()
        self._settle(EngineDead(reason))
        self._fail_all(lambda: EngineDead(reason))

    def _fail_all(self, error: Callable[[], EngineDead]) -> None:
        """End all that runs."""
        self._open_requests.fail(error)
        queries, self._queries = self._queries, {}
        for query in queries.values():
            if not query.done():
                query.set_exception(error())

    async def __aenter__(self) -> AsyncEngine:
        """The engine itself; `close` at the end of the block."""
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Close the engine."""
        await self.close()
