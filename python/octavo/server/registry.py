"""The models of one server: which there are, under which names, which are loaded, and how one takes another's place."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

from octavo.config import EngineConfig
from octavo.errors import InvalidRequest, NotEnoughMemory, OctavoError
from octavo.sampling_params import SamplingParams
from octavo.server.aliases import Alias
from octavo.server.catalog import Catalog, quoted
from octavo.server.entry import ModelEntry, ModelState
from octavo.server.errors import EngineLoading, ModelUnavailable
from octavo.server.served import ClosableEngine, ServedModel, split_id
from octavo.server.settings import ServerSettings
from octavo.server.starting import Progress
from octavo.server.starting import start_engine as start_async_engine

__all__ = ["ModelRegistry", "StartEngine", "start_async_engine"]

logger = logging.getLogger("octavo.server")

StartEngine = Callable[[EngineConfig, Progress], Awaitable[ClosableEngine]]

_CLOSE_S = 30.0
_WARM_S = 120.0
_WARM_TOKENS = 4
_LEAST_CHECK_S = 0.05
_RETRY_S = 30.0
_FILES = ("*.safetensors", "*.gguf", "*.bin")


class ModelRegistry(Catalog):
    """Models by name, and their engines.

    For one event loop: between a request's choice of a model and its lease nothing else runs, so a swap loses no
    request.

    Args:
        settings: the server's.
        start_engine: makes engines.

    Attributes:
        started: whether the models of the start are loaded.
    """

    def __init__(self, settings: ServerSettings, start_engine: StartEngine = start_async_engine) -> None:
        super().__init__()
        self._settings = settings
        self._start_engine = start_engine
        self._timers: dict[str, asyncio.TimerHandle] = {}
        # One load at a time: each measures the memory that is free.
        self._load_lock = asyncio.Lock()
        self._swap_lock = asyncio.Lock()
        self._closed = False
        self.started = False

    def snapshot(self) -> list[dict[str, Any]]:
        """Every model's state, progress and figures, for people and their tools."""
        return [self.describe(entry) for entry in self._entries.values()]

    def describe(self, entry: ModelEntry) -> dict[str, Any]:
        """One model's state, progress and figures."""
        return entry.describe(self.aliases_of(entry), self.keep_alive(entry))

    def progress(self) -> float:
        """How far the models of the start are loaded, together, 0 to 1."""
        entries = [self._entries[id] for id in self._at_start if id in self._entries]
        if self.started or not entries:
            return float(self.started)
        done = {ModelState.READY: 1.0}
        shares = [
            entry.progress.share if entry.state is ModelState.LOADING else done.get(entry.state, 0.0)
            for entry in entries
        ]
        return round(sum(shares) / len(shares), 4)

    def adopt(self, engine: ClosableEngine, names: Sequence[str] = ()) -> ModelEntry:
        """Serve an engine that runs already.

        Args:
            engine: is closed with the registry.
            names: the first is the model's id, the others aliases; the engine's own name when empty.
        """
        id, *others = names or (str(engine.model.name),)
        entry = self._entries[id] = ModelEntry(id, None)
        self._name(entry)
        for other in others:
            self._aliases[other] = Alias(other, {id: 1})
        entry.put_up(engine)
        self.started = True
        return entry

    # -------------------------------------------------------- requests

    def resolve(self, name: str | None) -> ServedModel:
        """The model of a name, for reading about it; not counted as in use.

        Raises:
            ModelNotServed: no such name.
            EngineLoading, ModelUnavailable, EngineDead: it cannot answer now.
        """
        entry, asked = self.choose(name)
        trouble = entry.trouble()
        if entry.state is ModelState.LOADING:
            raise EngineLoading(f"The model `{entry.id}` is still loading; try again in a moment.")
        if trouble is not None:
            raise trouble
        return entry.view(asked)

    async def acquire(
        self, name: str | None, key: Callable[[], str | None] | None = None, variant: str | None = None
    ) -> tuple[ServedModel, Callable[[], None]]:
        """A model, counted as in use until the returned function is called.

        A model that is not loaded is loaded, where the settings allow it; the request waits for it, within
        `model_load_wait` seconds.

        Raises:
            ModelNotServed, InvalidRequest: as `choose`.
            EngineLoading: not loaded in time.
            ModelUnavailable: not loaded, and not to be loaded by a request.
            EngineDead: its engine has ended.
        """
        entry, asked = self.choose(name, key, variant)
        if entry.state is ModelState.READY:
            # One that is being started again takes requests, and lets them wait.
            if (trouble := entry.trouble()) is not None and entry.lost():
                raise trouble
            return entry.lease(asked), entry.release
        if entry.state is not ModelState.LOADING and not self._may_load(entry):
            raise self._unavailable(entry)
        self._begin_load(entry)
        wait = self._settings.model_load_wait
        if wait <= 0 or entry.num_waiting >= self._settings.max_load_waiters:
            raise EngineLoading(f"The model `{entry.id}` is still loading; try again in a moment.")
        return await entry.wait(asked, wait), entry.release

    def _may_load(self, entry: ModelEntry) -> bool:
        if entry.config is None or self._closed:
            return False
        if entry.loading is not None:
            return True
        if entry.state is ModelState.FAILED and time.monotonic() < entry.failed_at + _RETRY_S:
            return False
        return self._settings.autoload

    def _unavailable(self, entry: ModelEntry) -> ModelUnavailable:
        if entry.state is ModelState.FAILED:
            return ModelUnavailable(f"The model `{entry.id}` could not be loaded; the server's log says why.")
        return ModelUnavailable(f"The model `{entry.id}` is {entry.state.value}; ask for it to be loaded.")

    # -------------------------------------------------------- loading and unloading

    async def start(self) -> None:
        """Load the models of the start, one after the other.

        Raises:
            OctavoError: of the first that cannot be loaded.
        """
        for id in self._at_start:
            await self.load(id)
        self.started = True

    async def load(self, name: str, config: EngineConfig | None = None, **options: Any) -> ModelEntry:
        """Load a model, or wait for the load that is under way; one that is ready stays as it is.

        Cancelling the caller does not end the load.

        Args:
            name: id or alias of a known model; the id of a new one with `config`.
            config: registers the model first.
            options: of `register`.

        Raises:
            ModelNotServed: not known.
            OctavoError: it cannot be loaded.
        """
        entry = self.find(name) if config is None else self.register(name, config, **options)
        await self._ensure(entry)
        return entry

    async def _ensure(self, entry: ModelEntry, leaving: Collection[str] = ()) -> None:
        if entry.state is ModelState.READY:
            if not entry.lost() or entry.config is None:
                return
            await self._drain(entry, 0.0)
        limits = self._settings.max_loaded_models, self._settings.model_memory
        if (leaving or limits == (None, None)) and entry.revive():
            self._arm(entry, self._granted(entry))
            return
        if entry.config is None:
            raise self._unavailable(entry)
        load = self._begin_load(entry, leaving)
        await asyncio.wait((load,))
        if load.cancelled():
            raise ModelUnavailable(f"The model `{entry.id}` was unloaded before it was loaded.")
        load.result()

    def _begin_load(self, entry: ModelEntry, leaving: Collection[str] = ()) -> asyncio.Task[None]:
        if entry.loading is None:
            entry.begin()
            entry.revivable = entry.ending = False
            entry.loading = asyncio.get_running_loop().create_task(self._load(entry, leaving))
            entry.loading.add_done_callback(lambda task: self._load_over(entry, task))
        return entry.loading

    def _load_over(self, entry: ModelEntry, task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            # Whoever waits sees the error; when nobody does it is in the log.
            task.exception()
        elif entry.loading is task:
            # It was cancelled before its first step, and could clean up nothing.
            self._load_ended(entry)

    def _load_ended(self, entry: ModelEntry) -> None:
        entry.loading = None
        # Before a drain has ended it is the drain that takes the engine down.
        if entry.state is ModelState.LOADING:
            entry.take_down(ModelState.UNLOADED)
        entry.refuse_waiters(self._unavailable(entry))

    async def _load(self, entry: ModelEntry, leaving: Collection[str]) -> None:
        began = time.monotonic()
        engine: ClosableEngine | None = None
        try:
            if entry.draining is not None:
                await asyncio.wait((entry.draining,))
            entry.begin()
            assert entry.config is not None
            async with self._load_lock:
                await self._make_room(entry, leaving, await asyncio.to_thread(_estimate, entry))
                starting = self._start_engine(entry.config, entry.report)
                engine = await asyncio.wait_for(starting, self._settings.model_load_timeout)
                entry.info = engine.model
                await self._make_room(entry, leaving, entry.bytes)
                entry.report("warm", 0, 1)
                await asyncio.wait_for(_warm(engine), _WARM_S)
        except BaseException as error:
            if engine is not None:
                await _close(entry, engine)
            if isinstance(error, asyncio.CancelledError):
                self._load_ended(entry)
                raise
            entry.loading = None
            timed_out = isinstance(error, asyncio.TimeoutError)
            reason = f"it took more than {time.monotonic() - began:.0f} s" if timed_out else str(error)
            fault = None if isinstance(error, OctavoError) or timed_out else error
            # A load of the start ends the server, and whoever started it says why.
            if self.started or fault is not None:
                logger.error("the model %s could not be loaded: %s", entry.id, reason, exc_info=fault)
            entry.fail(reason or type(error).__name__)
            entry.refuse_waiters(self._unavailable(entry))
            if isinstance(error, OctavoError):
                raise
            raise ModelUnavailable(f"The model `{entry.id}` could not be loaded: {reason}") from error
        entry.loading = None
        entry.put_up(engine, time.monotonic() - began)
        self._arm(entry, self._granted(entry))

    async def unload(self, name: str, *, timeout: float | None = None, remove: bool = False) -> ModelEntry:
        """Let a model's running requests finish, then close its engine.

        Args:
            name: id, or alias of one model.
            timeout: seconds that running requests get; the setting `model_drain_timeout` when None.
            remove: forget the model too.

        Raises:
            ModelNotServed: not known.
            InvalidRequest: an alias stands for it, and `remove` was asked for.
        """
        entry = self.find(name)
        users = self.aliases_of(entry)
        if remove and users:
            raise InvalidRequest(f"model: {quoted(users)} lead to `{entry.id}`; change them first", "model")
        if remove:
            self._forget(entry)
        try:
            await self._end_load(entry)
            await self._drain(entry, timeout)
            if remove:
                # Of a request that came before the model was forgotten and waited for the drain.
                await self._end_load(entry)
                await self._drain(entry, 0.0)
        finally:
            if entry in self._removed and entry.engine is None:
                self._removed.remove(entry)
        if entry.state is ModelState.FAILED:
            entry.take_down(ModelState.UNLOADED)
        return entry

    def _forget(self, entry: ModelEntry) -> None:
        """From now on no request, alias or swap finds the model, though it may run a while yet."""
        self._entries.pop(entry.id, None)
        self._removed.append(entry)
        if entry.id in self._at_start:
            self._at_start.remove(entry.id)
        if self.default == entry.id:
            self.default = next(iter(self.names), None)

    async def _end_load(self, entry: ModelEntry) -> None:
        if entry.loading is not None:
            entry.end_load()
            await asyncio.wait((entry.loading,))

    async def swap(
        self,
        name: str,
        to: str | None = None,
        config: EngineConfig | None = None,
        *,
        replace: str | None = None,
        wait: bool = False,
        **options: Any,
    ) -> ModelEntry:
        """Let another model answer to a name: load it, warm it, flip the name, drain and close what it stood for.

        Until the new model is ready, and for ever should it fail, the old one serves. Old models that other aliases
        need stay loaded. Swapping back is a swap; while the old one still drains it is instant.

        Args:
            name: alias or id.
            to: id of the new model, known or registered from `config`; the name with the next number as its version
                when None.
            config: of a new model's engine.
            replace: the one model of an alias of several that is to be replaced; its weight goes over.
            wait: return only when the old engines are closed.
            options: of `register`.

        Raises:
            ModelNotServed: no such name, or `to` is not known and there is no `config`.
            OctavoError: the new model cannot be loaded.
        """
        async with self._swap_lock:
            before = self._pointer(name)
            if to is None:
                to = self._next_version(split_id(name)[0])
            if config is None and to not in self._entries:
                raise self._unknown(to)
            after = {to: 1.0}
            if replace is not None:
                if replace not in before:
                    raise InvalidRequest(
                        f"replace: `{name}` has no model `{replace[:80]}`; it has {quoted(before)}", "replace"
                    )
                after = {to if id == replace else id: weight for id, weight in before.items()}
            entry = self._entries[to] if config is None else self.register(to, config, **options)
            leaving = [id for id in before if id not in after]
            await self._ensure(entry, leaving)
            if self._entries.get(to) is not entry:
                raise InvalidRequest(f"to: the model `{to[:80]}` was removed while the swap waited for it", "to")
            if after == {name: 1.0}:
                self._aliases.pop(name, None)
            else:
                self._aliases[name] = Alias(name, after)
            used = {id for alias in self._aliases.values() for id in alias.weights}
            gone = [self._entries[id] for id in leaving if id not in used and id in self._entries]
            drains = [self._begin_drain(old, None, revivable=True) for old in gone]
        if wait:
            await asyncio.gather(*(asyncio.shield(drain) for drain in drains if drain is not None))
        return entry

    # -------------------------------------------------------- draining

    def _begin_drain(
        self, entry: ModelEntry, timeout: float | None, *, revivable: bool = False
    ) -> asyncio.Task[None] | None:
        if entry.state is ModelState.READY:
            entry.state = ModelState.DRAINING
            entry.revivable = revivable
            seconds = self._settings.model_drain_timeout if timeout is None else timeout
            entry.draining = asyncio.get_running_loop().create_task(self._finish_drain(entry, seconds))
            entry.draining.add_done_callback(lambda task: task.cancelled() or task.exception())
        return entry.draining

    async def _drain(self, entry: ModelEntry, timeout: float | None) -> None:
        drain = self._begin_drain(entry, timeout)
        if drain is not None:
            entry.revivable = False
            await asyncio.shield(drain)

    async def _finish_drain(self, entry: ModelEntry, timeout: float) -> None:
        own = asyncio.current_task()
        await entry.drained(timeout)
        if entry.draining is not own:
            # It was revived, and perhaps drains again by now: that is for another to finish.
            return
        assert entry.engine is not None
        entry.closing = True
        if entry.leases:
            logger.warning("%d requests of %s are ended: it is unloaded", entry.leases, entry.id)
        await _close(entry, entry.engine)
        entry.draining = None
        entry.take_down(ModelState.UNLOADED)

    # -------------------------------------------------------- idle models and room for others

    def keep_alive(self, entry: ModelEntry) -> float | None:
        """Idle seconds after which a model is unloaded; None: never."""
        seconds = self._settings.idle_unload if entry.keep_alive is None else entry.keep_alive
        # An engine that was handed over could not be loaded again.
        return None if entry.config is None or seconds is None or seconds < 0 else seconds

    def set_keep_alive(self, name: str, seconds: float | None) -> None:
        """Grant a model idle seconds from now on; None: the server's setting, negative: without end.

        Raises:
            ModelNotServed, InvalidRequest: as `find`.
        """
        entry = self.find(name)
        entry.keep_alive = seconds
        self._arm(entry, self._granted(entry))

    def _granted(self, entry: ModelEntry) -> float:
        return self.keep_alive(entry) or 0.0

    def _arm(self, entry: ModelEntry, seconds: float) -> None:
        timer = self._timers.pop(entry.id, None)
        if timer is not None:
            timer.cancel()
        if self.keep_alive(entry) is not None and entry.state is ModelState.READY and not self._closed:
            loop = asyncio.get_running_loop()
            self._timers[entry.id] = loop.call_later(max(seconds, _LEAST_CHECK_S), self._check_idle, entry)

    def _check_idle(self, entry: ModelEntry) -> None:
        granted = self.keep_alive(entry)
        if granted is None or entry.state is not ModelState.READY:
            return
        left = entry.last_used + granted - time.monotonic()
        if entry.busy or left > 0:
            self._arm(entry, granted if entry.busy else left)
        else:
            logger.info("%s was idle for %g s and is unloaded", entry.id, granted)
            self._begin_drain(entry, None)

    async def _make_room(self, entry: ModelEntry, leaving: Collection[str], size: int) -> None:
        """Unload what was used least recently until the model fits.

        Models that a swap replaces stay: the old one serves until the new one does. They do not count as loaded, but
        their memory counts.
        """
        while True:
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
                    f"model_memory: `{entry.id}` takes {size:,} bytes and models that cannot be unloaded "
                    f"{total - size:,}, of {budget:,}; raise it, or lower kv_cache_memory"
                    if budget is not None and total > budget
                    else f"max_loaded_models: {most} are loaded, and none can be unloaded for `{entry.id}`; raise it"
                )
            await self._drain(min(free, key=lambda other: (other.busy, other.last_used)), None)

    # -------------------------------------------------------- the end

    async def close(self) -> None:
        """End all loads and close all engines."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        entries = [*self._entries.values(), *self._removed]
        tasks = [entry.loading for entry in entries if entry.loading is not None]
        for entry in entries:
            entry.end_load()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(self._drain(entry, 0.0) for entry in self.loaded))


async def _warm(engine: ClosableEngine) -> None:
    """A short answer: what answers this can answer others."""
    prompt = engine.tokenizer.encode("Hello") if engine.tokenizer is not None else [0]
    stream: Any = engine.stream(list(prompt) or [0], SamplingParams(max_tokens=_WARM_TOKENS, temperature=0.0))
    async with aclosing(stream):
        async for _ in stream:
            pass


async def _close(entry: ModelEntry, engine: ClosableEngine) -> None:
    try:
        await asyncio.wait_for(asyncio.shield(engine.close()), _CLOSE_S)
    except Exception as error:
        logger.error("closing the engine of %s failed", entry.id, exc_info=error)


def _estimate(entry: ModelEntry) -> int:
    """Memory the model will take: what it took before, else its files' size where they are here; else 0."""
    config = entry.config
    if entry.bytes or config is None:
        return entry.bytes
    path = Path(config.model)
    files = [path] if path.is_file() else [file for kind in _FILES for file in path.glob(kind)] if path.is_dir() else []
    return sum(file.stat().st_size for file in files) + (config.kv_cache_memory or 0)
