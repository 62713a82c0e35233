"""Backends of `LLM`: the model in this process, or in a worker process behind a socket."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from octavo._core import cpu_info, cpu_set_num_threads
from octavo.config import EngineConfig
from octavo.engine.process import WORKER_COMMAND, WorkerProcess
from octavo.engine.protocol import (
    Abort,
    Accepted,
    ErrorRecord,
    Fatal,
    FrameReader,
    FromClient,
    FromWorker,
    Load,
    LoadFailed,
    Progress,
    ProtocolError,
    Ready,
    Rejected,
    Stats,
    StatsQuery,
    StepOutputs,
    encode_frame,
)
from octavo.engine.requests import CheckedRequest, submissions
from octavo.errors import EngineDead, OctavoError
from octavo.runner.interface import ModelInfo

if TYPE_CHECKING:
    from octavo.engine.constraints import Failure
    from octavo.engine.loop import EngineLoop
    from octavo.text.tokenizer import Tokenizer

__all__ = ["Backend", "LocalBackend", "WorkerBackend"]

_CHUNK = 1 << 18
_EPITAPH_WAIT_S = 0.5

ProgressCallback = Callable[[str, int, int], None]


class Backend(Protocol):
    """The engine behind an `LLM`.

    Attributes:
        model: what was loaded.
        tokenizer: the model's; None for a model without one.
    """

    model: ModelInfo
    tokenizer: Tokenizer | None

    def submit(self, requests: Sequence[CheckedRequest]) -> None:
        """Queue all requests or none.

        Raises:
            InvalidRequest: for the first invalid request; nothing is queued.
        """
        ...

    def step(self) -> StepOutputs | Rejected | None:
        """The outputs of the next step, or an accepted request that failed; None if a step has no output yet."""
        ...

    def abort(self, request_ids: Sequence[int]) -> None:
        """End requests and free their blocks."""
        ...

    def stats(self) -> dict[str, int | float]:
        """The core's gauges and counters."""
        ...

    def close(self) -> None:
        """Release all resources. Idempotent."""
        ...


class LocalBackend:
    """The loop in this process.

    Args:
        loop: ready to step.
        model: what was loaded.
        tokenizer: the model's.
        restore: puts settings of the process back that loading the model changed; called by `close`.
    """

    def __init__(
        self,
        loop: EngineLoop,
        model: ModelInfo,
        tokenizer: Tokenizer | None,
        restore: Callable[[], None] = lambda: None,
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self._loop = loop
        self._restore = restore
        self._failures: list[Failure] = []

    @classmethod
    def load(cls, config: EngineConfig, progress: ProgressCallback) -> LocalBackend:
        """Load the model.

        Raises:
            ModelError, ConfigError: the model cannot be served with these settings.
        """
        from octavo.engine.loop_builder import build_engine

        num_threads = cpu_info()["num_threads"]
        try:
            return cls(*build_engine(config, progress), lambda: cpu_set_num_threads(num_threads))
        except BaseException:
            cpu_set_num_threads(num_threads)
            raise

    def submit(self, requests: Sequence[CheckedRequest]) -> None:
        """Queue all requests or none."""
        self._loop.heartbeat.resume()
        now_us = time.monotonic_ns() // 1000
        compiled = self._loop.constraints.compile_all([request.constraint for request in requests])
        for count, (request, ready) in enumerate(zip(requests, compiled, strict=True)):
            try:
                self._loop.submit(request, now_us, ready)
            except OctavoError:
                self.abort([request.request_id for request in requests[:count]])
                raise

    def step(self) -> StepOutputs | Rejected | None:
        """Run one step, or return a failure of the previous one."""
        if self._failures:
            request_id, error = self._failures.pop()
            return Rejected(request_id, ErrorRecord.of(error))
        outputs = self._loop.step()
        self._failures = self._loop.take_failures()
        return outputs

    def abort(self, request_ids: Sequence[int]) -> None:
        """End requests; their steps in flight run to the end."""
        for request_id in request_ids:
            self._loop.abort(request_id)
        self._loop.drain()
        self._failures.clear()

    def stats(self) -> dict[str, int | float]:
        """The core's gauges and counters."""
        return self._loop.stats()

    def close(self) -> None:
        """Release the device's memory."""
        self._loop.close()
        # Only once: later changes belong to another engine.
        restore, self._restore = self._restore, lambda: None
        restore()


class WorkerBackend:
    """The loop in a worker process, over a blocking socket."""

    model: ModelInfo

    def __init__(self, command: Sequence[str] = WORKER_COMMAND) -> None:
        self.tokenizer: Tokenizer | None = None
        self._process = WorkerProcess(command)
        self._reader = FrameReader(FromWorker)
        self._messages: list[Any] = []
        self._queries = 0

    @classmethod
    def load(
        cls, config: EngineConfig, progress: ProgressCallback, command: Sequence[str] | None = None
    ) -> WorkerBackend:
        """Start the worker and wait for its model.

        Raises:
            ModelError, ConfigError: from the worker.
            EngineDead: it ended before it was ready.
        """
        backend = cls(WORKER_COMMAND if command is None else command)
        recommended: Mapping[str, float] = {}
        name = config.model
        try:
            if command is None:
                from octavo.engine.loop_builder import find_model, load_tokenizer

                source = find_model(config, progress)
                backend._send(Load(msgspec.structs.replace(config, model=str(source.path))))
                backend.tokenizer = load_tokenizer(config, source)
                recommended = source.sampling_defaults
                name = source.name if source.kind == "fake" else name
            else:
                backend._send(Load(config))
            backend.model = backend._await_ready(progress).known_as(name, recommended)
        except BaseException:
            backend.close()
            raise
        return backend

    def submit(self, requests: Sequence[CheckedRequest]) -> None:
        """Queue all requests or none."""
        if not requests:
            return
        for message in submissions([request.to_send() for request in requests], batch=True):
            self._send(message)
        ids = {request.request_id for request in requests}
        while True:
            reply = self._receive()
            if isinstance(reply, Accepted):
                return
            # Another may be the last of a request that was aborted.
            if isinstance(reply, Rejected) and reply.request_id in ids:
                raise reply.error.exception()

    def step(self) -> StepOutputs | Rejected | None:
        """The next step's outputs."""
        message = self._receive()
        return message if isinstance(message, StepOutputs | Rejected) else None

    def abort(self, request_ids: Sequence[int]) -> None:
        """End requests."""
        self._send(Abort(list(request_ids)))

    def stats(self) -> dict[str, int | float]:
        """The core's gauges and counters."""
        self._queries += 1
        self._send(StatsQuery(self._queries))
        while True:
            reply = self._receive()
            if isinstance(reply, Stats) and reply.query_id == self._queries:
                return reply.values

    def close(self) -> None:
        """End the worker."""
        self._process.socket.close()
        self._process.stop()

    def _await_ready(self, progress: ProgressCallback) -> ModelInfo:
        while True:
            message = self._receive()
            if isinstance(message, Progress):
                progress(message.stage, message.done, message.total)
            elif isinstance(message, LoadFailed):
                raise message.error.exception()
            elif isinstance(message, Ready):
                return message.info

    def _send(self, message: FromClient) -> None:
        try:
            self._process.socket.sendall(encode_frame(message))
        except OSError:
            # What it said last may still lie in the socket; `_receive` raises once that is read.
            while True:
                self._receive()

    def _receive(self) -> Any:
        """The next message; blocks."""
        while not self._messages:
            try:
                data = self._process.socket.recv(_CHUNK)
            except OSError:
                data = b""
            if not data:
                self._process.wait(_EPITAPH_WAIT_S)
                raise EngineDead(self._process.epitaph())
            try:
                self._messages = self._reader.feed(data)
            except ProtocolError as error:
                raise EngineDead(f"the engine process sent what is no message: {error}") from error
            self._messages.reverse()
        message = self._messages.pop()
        if isinstance(message, Fatal):
            self._process.wait(_EPITAPH_WAIT_S)
            raise EngineDead(f"{self._process.epitaph()}: {message.message}")
        return message
