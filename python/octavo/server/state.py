"""State shared by all requests of one server."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Sequence
from weakref import WeakKeyDictionary

from octavo._core import __version__
from octavo.server.access.api_keys import KeyRing
from octavo.server.error_responses import EngineLoading, ServerStopping
from octavo.server.ipc import PeerProcesses
from octavo.server.models.grammar_check import GrammarCheck
from octavo.server.models.model_handle import ClosableEngine, Engine, ModelHandle
from octavo.server.models.registry import ModelRegistry, StartEngine, start_async_engine
from octavo.server.models.registry_entry import RegistryEntry
from octavo.server.observability.metrics import Metrics
from octavo.server.observability.spans import Spans
from octavo.server.queueing.admission import ConcurrencyLimit
from octavo.server.queueing.admission_queue import AdmissionQueue
from octavo.server.queueing.body_budget import BodyBudget
from octavo.server.queueing.compile_queue import CompileQueue
from octavo.server.settings import ServerSettings
from octavo.server.transport.http import Receive, wait_gone

__all__ = ["ServerState"]


class ServerState:
    """Models, metrics, queues and running requests.

    Args:
        settings: None for the defaults.
        start_engine: starts the registry's engines.
        keys: API keys; None if requests need no key.

    Attributes:
        settings: as given.
        keys: API keys.
        concurrency: number of running requests of each key.
        bodies: bytes of all request bodies.
        metrics: of this server.
        spans: exporter of trace spans; None without a collector.
        registry: the models.
        siblings: other processes of this server; None if there are none.
        draining: the shutdown has begun. Requests are accepted until `stopping`.
        stopped: set together with `stopping`.
        num_ended: requests that ended, completed or not, without those that came after `stopping`.
    """

    def __init__(
        self,
        settings: ServerSettings | None = None,
        start_engine: StartEngine = start_async_engine,
        keys: KeyRing | None = None,
    ) -> None:
        self.settings = settings or ServerSettings()
        self.keys = keys or KeyRing()
        self.concurrency = ConcurrencyLimit()
        self.bodies = BodyBudget(self.settings.max_bodies_bytes)
        self._queues: WeakKeyDictionary[Engine, AdmissionQueue] = WeakKeyDictionary()
        self._compile_queue = CompileQueue(self.settings.max_queue_requests)
        self._grammar_checks: WeakKeyDictionary[Engine, GrammarCheck] = WeakKeyDictionary()
        self.metrics = Metrics(
            __version__, prefix=self.settings.metrics_prefix, old_names=self.settings.metrics_old_names
        )
        endpoint = self.settings.otlp_traces_endpoint
        self.spans = None if endpoint is None else Spans(endpoint)
        self.registry = ModelRegistry(self.settings, start_engine)
        self.registry.on_removal = self._forget
        self.siblings: PeerProcesses | None = None
        self.draining = False
        self.stopped = asyncio.Event()
        self.num_ended = 0
        self._running: set[asyncio.Future[None]] = set()
        self._quiet = asyncio.Event()
        self._stopping = False
        self._aborting = False

    def _forget(self, entry: RegistryEntry) -> None:
        last = all(other.name != entry.name for other in self.registry.entries)
        self.metrics.forget(entry.name, self.metrics.engine_label(entry.name, entry.id), entry.id, last=last)

    def add(self, engine: ClosableEngine, names: Sequence[str] = ()) -> ModelHandle:
        """Serve a running engine under `names`, or under its model's own name."""
        entry = self.registry.adopt(engine, names)
        return entry.handle(entry.id)

    def admission_queue(self, model: ModelHandle) -> AdmissionQueue:
        """The queue in front of a model's engine."""
        queue = self._queues.get(model.engine)
        if queue is None:
            queue = self._queues[model.engine] = AdmissionQueue.of(model.engine, self.settings)
        return queue

    def grammar_check(self, model: ModelHandle) -> GrammarCheck:
        """The check of constraints for a model."""
        check = self._grammar_checks.get(model.engine)
        if check is None:
            check = self._grammar_checks[model.engine] = GrammarCheck(model.engine, self._compile_queue)
        return check

    @property
    def models(self) -> list[ModelHandle]:
        """The loaded models, each with its id and aliases, in the order of their registration."""
        registry = self.registry
        return [
            ModelHandle(entry.engine, (entry.id, *registry.aliases_of(entry)), version=entry.id, created=entry.created)
            for entry in registry.loaded
            if entry.engine is not None
        ]

    def resolve(self, name: str | None) -> ModelHandle:
        """The model of a name, to read its properties. `Call.route` returns a model to generate with.

        Raises:
            ServerStopping, EngineLoading, ModelUnavailable: the model cannot answer now.
            ModelNotServed: there is no such model.
            EngineDead: its engine has ended.
        """
        self.check_ready()
        return self.registry.resolve(name)

    def check_ready(self) -> None:
        """Check that the server accepts requests.

        Raises:
            ServerStopping, EngineLoading.
        """
        if self._stopping:
            raise ServerStopping("The server is shutting down")
        if not self.registry.started:
            raise EngineLoading("The model is still loading; try again in a moment")

    @property
    def num_running(self) -> int:
        """Number of running requests."""
        return len(self._running)

    @property
    def stopping(self) -> bool:
        """Whether new requests are refused."""
        return self._stopping

    @property
    def aborting(self) -> bool:
        """Whether `abort_all` was called."""
        return self._aborting

    def refuse(self) -> None:
        """Refuse new requests and cancel all loads. Running requests go on."""
        self.draining = self._stopping = True
        self.registry.stop()
        self.stopped.set()

    async def quiet(self) -> None:
        """Return once no request runs."""
        while self._running:
            self._quiet.clear()
            await self._quiet.wait()

    def abort_all(self) -> None:
        """End all running requests with an error, and refuse new ones."""
        self.refuse()
        self._aborting = True
        for task in list(self._running):
            task.cancel()

    async def run(self, work: Awaitable[None], receive: Receive) -> bool:
        """Run the work of a request until it is done or its client leaves.

        Returns:
            False if the client left and the work was cancelled.
        """
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(wait_gone(receive))
        self._running.add(task)
        # A callback counts the end before the client can react to it, for example with a signal.
        task.add_done_callback(functools.partial(self._ended, counts=not self._stopping))
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            stayed = task.done()
        finally:
            task.cancel()
            gone.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)
        return stayed

    def _ended(self, task: asyncio.Future[None], *, counts: bool) -> None:
        self._running.discard(task)
        self.num_ended += counts
        if not self._running:
            self._quiet.set()
