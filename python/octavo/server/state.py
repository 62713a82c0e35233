"""What all exchanges of one server share."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Sequence
from weakref import WeakKeyDictionary

from octavo._core import __version__
from octavo.server.access.api_keys import KeyRing
from octavo.server.error_responses import EngineLoading, ServerStopping
from octavo.server.ipc import Siblings
from octavo.server.models.entry import ModelEntry
from octavo.server.models.grammar_check import GrammarCheck
from octavo.server.models.model_handle import ClosableEngine, Engine, ModelHandle
from octavo.server.models.registry import ModelRegistry, StartEngine, start_async_engine
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
    """Models, metrics and what is running.

    Args:
        settings: the defaults when None.
        start_engine: makes the registry's engines.
        keys: that requests must show; none are asked for when None.

    Attributes:
        settings: as given.
        keys: that requests must show.
        concurrency: what each key has under way.
        bodies: the bytes of requests' bodies.
        metrics: of this server.
        spans: where requests' spans go; None without a collector.
        registry: its models.
        siblings: other processes of this server; None where it is the only one.
        draining: the end has begun; requests are still taken until `stopping`.
        stopped: set with `stopping`.
        num_ended: exchanges that were answered, or broke off; not those that came when requests were refused.
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
        self.siblings: Siblings | None = None
        self.draining = False
        self.stopped = asyncio.Event()
        self.num_ended = 0
        self._running: set[asyncio.Future[None]] = set()
        self._quiet = asyncio.Event()
        self._stopping = False
        self._aborting = False

    def _forget(self, entry: ModelEntry) -> None:
        last = all(other.name != entry.name for other in self.registry.entries)
        self.metrics.forget(entry.name, self.metrics.engine_label(entry.name, entry.id), entry.id, last=last)

    def add(self, engine: ClosableEngine, names: Sequence[str] = ()) -> ModelHandle:
        """Serve an engine that runs already under `names`, or its model's own name."""
        entry = self.registry.adopt(engine, names)
        return entry.handle(entry.id)

    def admission_queue(self, served: ModelHandle) -> AdmissionQueue:
        """What waits in front of a model's engine."""
        queue = self._queues.get(served.engine)
        if queue is None:
            queue = self._queues[served.engine] = AdmissionQueue.of(served.engine, self.settings)
        return queue

    def grammar_check(self, served: ModelHandle) -> GrammarCheck:
        """What compiles the constraints that requests of a model bring."""
        check = self._grammar_checks.get(served.engine)
        if check is None:
            check = self._grammar_checks[served.engine] = GrammarCheck(served.engine, self._compile_queue)
        return check

    @property
    def models(self) -> list[ModelHandle]:
        """What is loaded, each with its id and all aliases that lead to it, in the order it came."""
        registry = self.registry
        return [
            ModelHandle(entry.engine, (entry.id, *registry.aliases_of(entry)), version=entry.id, created=entry.created)
            for entry in registry.loaded
            if entry.engine is not None
        ]

    def resolve(self, name: str | None) -> ModelHandle:
        """The model of a name, to read about it; `Call.route` gives one to use.

        Raises:
            ServerStopping, EngineLoading, ModelUnavailable: not now.
            ModelNotServed: no model of that name.
            EngineDead: its engine has ended.
        """
        self.check_ready()
        return self.registry.resolve(name)

    def check_ready(self) -> None:
        """Raise what keeps the whole server from answering.

        Raises:
            ServerStopping, EngineLoading.
        """
        if self._stopping:
            raise ServerStopping("The server is shutting down.")
        if not self.registry.started:
            raise EngineLoading("The model is still loading; try again in a moment.")

    @property
    def num_running(self) -> int:
        """Exchanges that are being answered."""
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
        """Refuse new requests from now on, and end what loads; requests that run go on."""
        self.draining = self._stopping = True
        self.registry.stop()
        self.stopped.set()

    async def quiet(self) -> None:
        """Return once nothing runs."""
        while self._running:
            self._quiet.clear()
            await self._quiet.wait()

    def abort_all(self) -> None:
        """End every running exchange with an error; new ones are refused."""
        self.refuse()
        self._aborting = True
        for task in list(self._running):
            task.cancel()

    async def run(self, work: Awaitable[None], receive: Receive) -> bool:
        """Run an exchange while its client is there.

        Returns:
            False when the client left first and the work was cancelled.
        """
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(wait_gone(receive))
        self._running.add(task)
        # Before whoever reads the answer's end can say anything: it is over when a signal comes then.
        task.add_done_callback(functools.partial(self._over, counts=not self._stopping))
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            stayed = task.done()
        finally:
            task.cancel()
            gone.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)
        return stayed

    def _over(self, task: asyncio.Future[None], *, counts: bool) -> None:
        self._running.discard(task)
        self.num_ended += counts
        if not self._running:
            self._quiet.set()
