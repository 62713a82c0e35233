"""What all exchanges of one server share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

from octavo._core import __version__
from octavo.errors import ModelNotServed
from octavo.server.errors import EngineLoading, ServerStopping
from octavo.server.http import Receive, wait_gone
from octavo.server.metrics import Metrics
from octavo.server.served import Engine, ServedModel
from octavo.server.settings import ServerSettings
from octavo.server.spans import Spans

__all__ = ["ServerState"]


class ServerState:
    """Models, metrics and what is running.

    Attributes:
        settings: as given.
        metrics: of this server.
        spans: where requests' spans go; None without a collector.
    """

    def __init__(self, settings: ServerSettings | None = None) -> None:
        self.settings = settings or ServerSettings()
        self.metrics = Metrics(
            __version__, prefix=self.settings.metrics_prefix, old_names=self.settings.metrics_old_names
        )
        endpoint = self.settings.otlp_traces_endpoint
        self.spans = None if endpoint is None else Spans(endpoint)
        self._models: list[ServedModel] = []
        self._by_name: dict[str, ServedModel] = {}
        self._running: set[asyncio.Future[None]] = set()
        self._stopping = False

    def add(self, engine: Engine, names: Sequence[str] = ()) -> ServedModel:
        """Serve an engine under `names`, or its model's own name."""
        served = ServedModel(engine, names)
        self._models.append(served)
        for name in served.names:
            self._by_name[name] = served
        return served

    @property
    def models(self) -> list[ServedModel]:
        """What is served, in the order it came."""
        return list(self._models)

    def resolve(self, name: str | None) -> ServedModel:
        """The model a request names; the first one when it names none.

        Raises:
            EngineLoading: nothing is served yet.
            ModelNotServed: no model of that name.
            EngineDead: its engine has ended.
        """
        self.check_ready()
        served = self._models[0] if name is None else self._by_name.get(name)
        if served is None:
            served_names = ", ".join(f"`{known}`" for known in self._by_name)
            raise ModelNotServed(
                f"The model `{str(name)[:200]}` does not exist; this server has {served_names}.", "model"
            )
        served.engine.check_health()
        return served

    def check_ready(self) -> None:
        """Raise what keeps the whole server from answering.

        Raises:
            ServerStopping, EngineLoading.
        """
        if self._stopping:
            raise ServerStopping("The server is shutting down.")
        if not self._models:
            raise EngineLoading("The model is still loading; try again in a moment.")

    @property
    def num_running(self) -> int:
        """Exchanges that are being answered."""
        return len(self._running)

    @property
    def stopping(self) -> bool:
        """Whether `abort_all` was called."""
        return self._stopping

    def abort_all(self) -> None:
        """End every running exchange with an error; new ones are refused."""
        self._stopping = True
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
        try:
            await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
            stayed = task.done()
        finally:
            self._running.discard(task)
            if not task.done():
                task.cancel()
            gone.cancel()
            await asyncio.gather(task, gone, return_exceptions=True)
        return stayed
