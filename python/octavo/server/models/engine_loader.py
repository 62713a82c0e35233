"""Loads and unloads the engines of models: one load at a time, idle unloading, eviction for other models."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.errors import ModelNotServed, NotEnoughMemory, OctavoError
from octavo.sampling_params import SamplingParams
from octavo.server.error_responses import ModelFailed, ModelUnavailable, ServerStopping
from octavo.server.models.engine_start import Progress
from octavo.server.models.model_handle import ClosableEngine
from octavo.server.models.model_names import ModelNames
from octavo.server.models.registry_entry import ModelState, RegistryEntry
from octavo.server.settings import ServerSettings

__all__ = ["EngineLoader", "StartEngine"]

logger = logging.getLogger("octavo.server")

StartEngine = Callable[[EngineConfig, Progress], Awaitable[ClosableEngine]]

_CLOSE_S = 30.0
_WARM_S = 120.0
_WARM_TOKENS = 4
_LEAST_CHECK_S, _MOST_CHECK_S = 0.05, 86400.0
_FILES = ("*.safetensors", "*.gguf", "*.bin")


class EngineLoader(ModelNames):
    """Named models that can be loaded and unloaded.

    Args:
        settings: the server's.
        start_engine: makes engines.

    Attributes:
        started: whether the models marked for the start are loaded.
    """

    def __init__(self, settings: ServerSettings, start_engine: StartEngine) -> None:
        super().__init__()
        self._settings = settings
        self._start_engine = start_engine
        self._timers: dict[str, asyncio.TimerHandle] = {}
        # One load at a time, as each measures the free memory.
        self._load_lock = asyncio.Lock()
        self._closed = False
        self.started = False

    # -------------------------------------------------------- for swaps

    def _replaced_by(self, entry: RegistryEntry) -> Sequence[str]:
        """Ids of the models that a running swap replaces with this one."""
        return ()

    def _needed(self) -> Collection[str]:
        """Ids of the models that take part in a running swap. They are evicted last."""
        return ()

    # -------------------------------------------------------- loading

    def _unavailable(self, entry: RegistryEntry) -> OctavoError:
        if self._closed:
            return ServerStopping(f"The model `{entry.id}` is not loaded, and the server is shutting down")
        if entry.state is ModelState.FAILED:
            seconds = entry.retry_in() if self._settings.autoload else None
            again = "" if seconds is None else f"; a request in {seconds:.0f} s or later loads it again"
            return ModelFailed(f"The model `{entry.id}` could not be loaded; see the server's log{again}", seconds)
        return ModelUnavailable(f"The model `{entry.id}` is {entry.state.value}; ask the operator to load it")

    async def _ensure(self, entry: RegistryEntry) -> None:
        """Load a model, unless it is ready.

        Raises:
            OctavoError: it cannot be loaded.
        """
        if entry.state is ModelState.READY:
            if not entry.lost() or entry.config is None:
                return
            await self._drain(entry, 0.0)
        limits = self._settings.max_loaded_models, self._settings.model_memory
        if (self._replaced_by(entry) or limits == (None, None)) and entry.revive():
            self._arm(entry, self._granted(entry))
            return
        if entry.config is None:
            raise self._unavailable(entry)
        load = self._begin_load(entry)
        await asyncio.wait((load,))
        if load.cancelled():
            if self._closed:
                raise ServerStopping(f"The server is shutting down; the load of `{entry.id}` was cancelled")
            raise ModelUnavailable(f"The model `{entry.id}` was unloaded before its load was complete")
        load.result()

    def _begin_load(self, entry: RegistryEntry) -> asyncio.Task[None]:
        """The running load; a new one if there is none.

        Raises:
            ServerStopping: no model is loaded any more.
            ModelNotServed: the model was removed.
        """
        if entry.loading is None:
            if self._closed:
                raise ServerStopping(f"The server is shutting down; `{entry.id}` is not loaded")
            if entry.removed:
                raise ModelNotServed(f"The model `{entry.id}` was removed", "model")
            entry.begin()
            entry.revivable = entry.ending = False
            entry.loading = asyncio.get_running_loop().create_task(self._load(entry))
            entry.loading.add_done_callback(lambda task: self._load_over(entry, task))
        return entry.loading

    def _load_over(self, entry: RegistryEntry, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            # Mark the error as seen: it is raised to whoever waits, and logged in any case.
            task.exception()
        elif entry.loading is task:
            # It was cancelled before its first step, so it did not clean up.
            self._load_ended(entry)

    def _load_ended(self, entry: RegistryEntry) -> None:
        entry.loading = None
        # While a drain runs, the drain closes the engine.
        if entry.state is ModelState.LOADING:
            entry.take_down(ModelState.UNLOADED)
        entry.refuse_waiters(self._unavailable(entry))
        self._undo_registration(entry)

    def _undo_registration(self, entry: RegistryEntry) -> None:
        """Undo a tentative registration after a load that failed or never began."""
        undo, entry.undo = entry.undo, None
        if undo is not None:
            undo()
        if entry.removed and entry.engine is None:
            self._gone(entry)

    async def _load(self, entry: RegistryEntry) -> None:
        began = time.monotonic()
        engine: ClosableEngine | None = None
        try:
            if entry.draining is not None:
                await asyncio.wait((entry.draining,))
            entry.begin()
            assert entry.config is not None
            async with self._load_lock:
                await self._make_room(entry, await asyncio.to_thread(_estimate, entry))
                starting = self._start_engine(entry.config, entry.report)
                engine = await asyncio.wait_for(starting, self._settings.model_load_timeout)
                entry.info = engine.model
                await self._make_room(entry, entry.bytes)
                entry.report("warm", 0, 1)
                await asyncio.wait_for(_warm(engine), _WARM_S)
        except BaseException as error:
            if engine is not None:
                await _close(entry, engine)
            if isinstance(error, asyncio.CancelledError):
                self._load_ended(entry)
                raise
            raise self._load_failed(entry, error, time.monotonic() - began) from error
        entry.loading = None
        entry.put_up(engine, time.monotonic() - began)
        if self.started:
            logger.info("the model %s is loaded (%.1f s)", entry.id, entry.load_seconds)
        self._arm(entry, self._granted(entry))

    def _load_failed(self, entry: RegistryEntry, error: BaseException, seconds: float) -> BaseException:
        """Record a failed load. Returns the exception to raise."""
        entry.loading = None
        timed_out = isinstance(error, asyncio.TimeoutError)
        reason = f"it took more than {seconds:.0f} s" if timed_out else str(error)
        fault = None if isinstance(error, OctavoError) or timed_out else error
        # A failed load at the start ends the server, and the caller reports the error.
        if self.started or fault is not None:
            logger.error("the model %s could not be loaded: %s", entry.id, reason, exc_info=fault)
        entry.fail(reason or type(error).__name__)
        entry.refuse_waiters(self._unavailable(entry))
        self._undo_registration(entry)
        if isinstance(error, OctavoError):
            return error
        return ModelUnavailable(f"The model `{entry.id}` could not be loaded: {reason}")

    async def _end_load(self, entry: RegistryEntry) -> None:
        if entry.loading is not None:
            entry.end_load()
            await asyncio.wait((entry.loading,))

    # -------------------------------------------------------- draining

    def _begin_drain(
        self, entry: RegistryEntry, timeout: float | None, *, revivable: bool = False
    ) -> asyncio.Task[None] | None:
        """The running drain; a new one if the model is ready. None if it has no engine.

        Args:
            entry: the model.
            timeout: seconds that running requests get, also from a drain that runs already. None leaves a running drain
                as it is, and is the setting for a new one.
            revivable: a load may cancel the new drain.
        """
        if entry.state is ModelState.READY:
            entry.state = ModelState.DRAINING
            entry.revivable = revivable
            entry.grant(self._settings.model_drain_timeout if timeout is None else timeout)
            entry.draining = asyncio.get_running_loop().create_task(self._finish_drain(entry))
            entry.draining.add_done_callback(lambda task: task.cancelled() or task.exception())
        elif timeout is not None and entry.draining is not None:
            entry.grant(timeout)
        return entry.draining

    async def _drain(self, entry: RegistryEntry, timeout: float | None) -> None:
        drain = self._begin_drain(entry, timeout)
        if drain is not None:
            entry.revivable = False
            await asyncio.shield(drain)

    async def _finish_drain(self, entry: RegistryEntry) -> None:
        own = asyncio.current_task()
        await entry.drained()
        if entry.draining is not own:
            # The drain was cancelled. A newer one may be running, which closes the engine.
            return
        assert entry.engine is not None
        entry.closing = True
        if entry.leases:
            logger.warning("%d requests of %s are ended, as it is unloaded", entry.leases, entry.id)
        await _close(entry, entry.engine)
        entry.draining = None
        entry.take_down(ModelState.UNLOADED)
        if entry.removed and entry.loading is None:
            self._gone(entry)
        if not self._closed:
            logger.info("the model %s is unloaded", entry.id)

    # -------------------------------------------------------- idle models and eviction

    def keep_alive(self, entry: RegistryEntry) -> float | None:
        """Idle seconds after which a model is unloaded; None for never."""
        seconds = self._settings.idle_unload if entry.keep_alive is None else entry.keep_alive
        # An adopted engine cannot be loaded again.
        return None if entry.config is None or seconds is None or seconds < 0 else seconds

    def set_keep_alive(self, name: str, seconds: float | None) -> None:
        """Set the idle seconds of a model; None for the server's setting, negative for never.

        Raises:
            ModelNotServed, InvalidRequest: as `find`.
        """
        entry = self.find(name)
        entry.keep_alive = seconds
        self._arm(entry, self._granted(entry))

    def _granted(self, entry: RegistryEntry) -> float:
        return self.keep_alive(entry) or 0.0

    def _arm(self, entry: RegistryEntry, seconds: float) -> None:
        timer = self._timers.pop(entry.id, None)
        if timer is not None:
            timer.cancel()
        if self.keep_alive(entry) is not None and entry.state is ModelState.READY and not self._closed:
            loop = asyncio.get_running_loop()
            pause = min(max(seconds, _LEAST_CHECK_S), _MOST_CHECK_S)
            self._timers[entry.id] = loop.call_later(pause, self._check_idle, entry)

    def _check_idle(self, entry: RegistryEntry) -> None:
        granted = self.keep_alive(entry)
        if granted is None or entry.state is not ModelState.READY:
            return
        left = entry.last_used + granted - time.monotonic()
        if entry.busy or left > 0:
            self._arm(entry, granted if entry.busy else left)
        else:
            logger.info("%s was idle for %g s and is unloaded", entry.id, granted)
            self._begin_drain(entry, None)

    async def _make_room(self, entry: RegistryEntry, size: int) -> None:
        """Unload the least recently used models until this one fits.

        Models that a swap replaces with it stay, as they serve until it is ready. They do not count towards
        `max_loaded_models`, but their memory counts.

        Raises:
            NotEnoughMemory: no other model can be unloaded.
        """
        while True:
            leaving, needed = self._replaced_by(entry), self._needed()
            others = [other for other in self.loaded if other is not entry]
            most, budget = self._settings.max_loaded_models, self._settings.model_memory
            count = 1 + sum(other.id not in leaving for other in others)
            total = size + sum(other.bytes for other in others)
            if (most is None or count <= most) and (budget is None or total <= budget):
                return
            free = [
                other for other in others if not other.pinned and other.config is not None and other.id not in leaving
            ]
            if not free:
                raise NotEnoughMemory(
                    f"model_memory: `{entry.id}` takes {size:,} bytes and models that cannot be unloaded take "
                    f"{total - size:,}, of {budget:,}; raise it, or lower kv_cache_memory"
                    if budget is not None and total > budget
                    else f"max_loaded_models: {most} are loaded, and none can be unloaded for `{entry.id}`; raise it"
                )
            await self._drain(
                # Among idle or busy models alike, those that are already draining go first.
                min(
                    free,
                    key=lambda other: (
                        other.id in needed,
                        other.busy,
                        other.state is ModelState.READY,
                        other.last_used,
                    ),
                ),
                None,
            )


async def _warm(engine: ClosableEngine) -> None:
    """Generate a few tokens: an engine that does can answer requests."""
    prompt = engine.tokenizer.encode("Hello") if engine.tokenizer is not None else [0]
    stream: Any = engine.stream(list(prompt) or [0], SamplingParams(max_tokens=_WARM_TOKENS, temperature=0.0))
    async with aclosing(stream):
        async for _ in stream:
            pass


async def _close(entry: RegistryEntry, engine: ClosableEngine) -> None:
    try:
        await asyncio.wait_for(asyncio.shield(engine.close()), _CLOSE_S)
    except Exception as error:
        logger.error("closing the engine of %s failed", entry.id, exc_info=error)


def _estimate(entry: RegistryEntry) -> int:
    """Estimated bytes of a model: what it took before, else the size of its local files, else 0."""
    config = entry.config
    if entry.bytes or config is None:
        return entry.bytes
    path = Path(config.model)
    files = [path] if path.is_file() else [file for kind in _FILES for file in path.glob(kind)] if path.is_dir() else []
    return sum(file.stat().st_size for file in files) + (config.kv_cache_memory or 0)
