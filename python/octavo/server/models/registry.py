"""The model registry: gives models to requests, loads and unloads them, and swaps one for another."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from octavo.config import EngineConfig
from octavo.errors import ConfigError, InvalidRequest, ModelNotServed, OctavoError
from octavo.server.error_responses import EngineLoading, ModelConflict
from octavo.server.models.aliases import Alias, quoted, replaced_weights
from octavo.server.models.engine_loader import EngineLoader, StartEngine
from octavo.server.models.engine_start import start_engine as start_async_engine
from octavo.server.models.model_handle import ClosableEngine, ModelHandle, split_id
from octavo.server.models.registry_entry import ModelState, RegistryEntry
from octavo.server.settings import ServerSettings

__all__ = ["ModelRegistry", "StartEngine", "Swapped", "start_async_engine"]

logger = logging.getLogger("octavo.server")

_MAX_ENSURES = 3


class Swapped(msgspec.Struct, frozen=True):
    """Result of a swap.

    Attributes:
        entry: the model that the name leads to now.
        unloading: ids of the models without a name, which are unloaded.
        kept: ids of the replaced models that stay loaded, with the aliases that lead to each.
    """

    entry: RegistryEntry
    unloading: tuple[str, ...]
    kept: dict[str, list[str]]


class ModelRegistry(EngineLoader):
    """Models by name, and their engines.

    All of it runs in one event loop. Nothing runs between a request's choice of a model and its lease, so a swap loses
    no request.

    Args:
        settings: the server's.
        start_engine: makes engines.
    """

    def __init__(self, settings: ServerSettings, start_engine: StartEngine = start_async_engine) -> None:
        super().__init__(settings, start_engine)
        # Swaps of one name run one after the other. So do swaps that load, as both their models are in memory.
        self._swap_locks: dict[str, asyncio.Lock] = {}
        self._swap_users: Counter[str] = Counter()
        self._loading_swap = asyncio.Lock()
        self._swap_under_way: tuple[str, list[str]] | None = None

    def snapshot(self) -> list[dict[str, Any]]:
        """State and figures of all models as JSON."""
        return [self.describe(entry) for entry in self._entries.values()]

    def describe(self, entry: RegistryEntry) -> dict[str, Any]:
        """State and figures of one model as JSON."""
        return entry.describe(self.aliases_of(entry), self.keep_alive(entry))

    def progress(self) -> float:
        """Progress of the models that load at the start, all together, 0 to 1."""
        entries = [self._entries[id] for id in self._at_start if id in self._entries]
        if self.started or not entries:
            return float(self.started)
        done = {ModelState.READY: 1.0}
        shares = [
            entry.progress.share if entry.state is ModelState.LOADING else done.get(entry.state, 0.0)
            for entry in entries
        ]
        return round(sum(shares) / len(shares), 4)

    def adopt(self, engine: ClosableEngine, names: Sequence[str] = ()) -> RegistryEntry:
        """Serve an engine that is already running.

        Args:
            engine: closed with the registry.
            names: the model's id, then aliases. The engine's own name if empty.
        """
        id, *others = names or (str(engine.model.name),)
        entry = self._entries[id] = RegistryEntry(id, None)
        self._name(entry)
        for other in others:
            self._aliases[other] = Alias(other, {id: 1})
        entry.put_up(engine)
        self.started = True
        return entry

    # -------------------------------------------------------- requests

    def resolve(self, name: str | None) -> ModelHandle:
        """The model of a name, not counted as in use.

        Raises:
            ModelNotServed: there is no such name.
            EngineLoading, ModelUnavailable, EngineDead: it cannot answer now.
        """
        entry, asked = self.choose(name)
        trouble = entry.trouble()
        if entry.state is ModelState.LOADING:
            raise EngineLoading(f"The model `{entry.id}` is still loading; try again in a moment")
        if trouble is not None:
            raise trouble
        return entry.handle(asked)

    async def acquire(
        self, name: str | None, key: Callable[[], str | None] | None = None, variant: str | None = None
    ) -> tuple[ModelHandle, Callable[[], None]]:
        """A model for one request, in use until the returned function is called.

        A model that is not loaded is loaded if the settings allow it. The request waits up to `model_load_wait`
        seconds for it.

        Raises:
            ModelNotServed, InvalidRequest: as `choose`.
            EngineLoading: the model was not loaded in time.
            ModelUnavailable: the model is not loaded, and a request may not load it.
            EngineDead: its engine has ended.
        """
        entry, asked = self.choose(name, key, variant)
        if entry.state is ModelState.READY:
            # An engine that is being restarted accepts requests and lets them wait.
            if (trouble := entry.trouble()) is not None and entry.lost():
                raise trouble
            return entry.lease(asked), entry.release
        if entry.state is not ModelState.LOADING and not self._may_load(entry):
            raise self._unavailable(entry)
        self._begin_load(entry)
        wait = self._settings.model_load_wait
        if wait <= 0 or entry.num_waiting >= self._settings.max_load_waiters:
            raise EngineLoading(f"The model `{entry.id}` is still loading; try again in a moment")
        return await entry.wait(asked, wait), entry.release

    def _may_load(self, entry: RegistryEntry) -> bool:
        if entry.config is None or self._closed:
            return False
        if entry.loading is not None:
            return True
        if not entry.loads_on_request or (entry.state is ModelState.FAILED and entry.retry_in()):
            return False
        return self._settings.autoload

    # -------------------------------------------------------- loading and unloading

    async def start(self) -> None:
        """Load the models marked for the start, one after the other.

        Raises:
            OctavoError: the first error; the models after it are not loaded.
        """
        for id in self._at_start:
            try:
                await self.load(id)
            except OctavoError:
                # The caller reports the error, but does not know the id.
                if len(self._at_start) > 1:
                    logger.error("the model %s could not be loaded", id)
                raise
        self.started = True

    async def load(self, name: str, config: EngineConfig | None = None, **options: Any) -> RegistryEntry:
        """Load a model, or wait for its running load. A model that is ready stays as it is.

        A cancelled caller does not end the load. If the load of a `tentative` model fails, its registration is undone.

        Args:
            name: id or alias of a registered model; the id of a new one with `config`.
            config: register the model first.
            options: of `register`.

        Raises:
            ModelNotServed: there is no such model.
            OctavoError: it cannot be loaded.
        """
        entry = self.find(name) if config is None else self.register(name, config, **options)
        try:
            await self._ensure(entry)
        finally:
            if entry.loading is None:
                self._undo_registration(entry)
        return entry

    async def unload(self, name: str, *, timeout: float | None = None, remove: bool = False) -> RegistryEntry:
        """Let a model's running requests finish, then close its engine.

        Args:
            name: id, or alias of one model.
            timeout: seconds from now that running requests get, also if the model is already draining. None for the
                setting `model_drain_timeout`.
            remove: remove the model too.

        Raises:
            ModelNotServed: there is no such model.
            InvalidRequest: `remove` was asked for, but an alias leads to the model.
        """
        entry = self.find(name)
        users = self.aliases_of(entry)
        if remove and users:
            raise InvalidRequest(f"model: {quoted(users)} lead to `{entry.id}`; change these aliases first", "model")
        if remove:
            self._forget(entry)
        await self._end_load(entry)
        await self._drain(entry, timeout)
        if remove:
            # A request that came before the removal may have waited for the drain and loaded the model.
            await self._end_load(entry)
            await self._drain(entry, 0.0)
        if entry.state is ModelState.FAILED:
            entry.take_down(ModelState.UNLOADED)
        return entry

    async def swap(
        self,
        name: str,
        to: str | None = None,
        config: EngineConfig | None = None,
        *,
        replace: str | None = None,
        wait: bool = False,
        **options: Any,
    ) -> Swapped:
        """Let a name lead to another model: load and warm it, switch the name, then drain and close the old model.

        The old model serves until the new one is ready, and goes on if the load fails. Old models that other aliases
        lead to stay loaded. Swap again to go back; that is instant while the old model still drains. Swaps of one name
        run one after the other. A change of the alias takes effect at once, and a running swap that contradicts it
        changes nothing.

        Args:
            name: alias or id.
            to: id of the new model, registered or to be registered from `config`. None for the name with the next
                version number.
            config: of a new model's engine. If its load fails, its registration is undone.
            replace: the one model to replace of an alias of several; the new model gets its weight.
            wait: return only when the old engines are closed.
            options: of `register`.

        Raises:
            ModelNotServed: there is no such name, or no model `to` and no `config`.
            ConfigError: `to` is registered with another model than `config`.
            ModelConflict: the name or the model was changed or removed meanwhile.
            OctavoError: the new model cannot be loaded.
        """
        lock = self._swap_locks.setdefault(name, asyncio.Lock())
        self._swap_users[name] += 1
        try:
            async with lock:
                done, drains = await self._swap(name, to, config, replace, options)
        finally:
            self._swap_users[name] -= 1
            if not self._swap_users[name]:
                del self._swap_users[name], self._swap_locks[name]
        if wait:
            await asyncio.gather(*(asyncio.shield(drain) for drain in drains))
        return done

    async def _swap(
        self, name: str, to: str | None, config: EngineConfig | None, replace: str | None, options: dict[str, Any]
    ) -> tuple[Swapped, list[asyncio.Task[None]]]:
        before = self._weights(name)
        version = self._entries.get(name)
        if version is not None and version.version:
            raise InvalidRequest(
                f"model: `{name}` is one version of a model and cannot be swapped; swap an alias that leads to it "
                f"({quoted(self.aliases_of(version)) or 'there is none'}), with `replace` if it leads to several",
                "model",
            )
        if to is None:
            to = self._next_version(split_id(name)[0])
        if config is None and to not in self._entries:
            raise self._unknown(to)
        after = replaced_weights(name, before, to, replace)
        if config is None:
            entry = self._entries[to]
        else:
            known = self._entries.get(to)
            if known is not None and known.served and known.config != config:
                raise ConfigError(
                    f"to: `{to}` is already another model; omit `path` to swap to that one, or give this one another "
                    f"version, for example `{self._next_version(split_id(to)[0])}`"
                )
            entry = self.register(to, config, tentative=True, on_request=False, **options)
        if self._serves(entry):
            return self._flip(name, before, to, replace)
        entry.claims += 1
        try:
            async with self._loading_swap:
                self._swap_under_way = to, [id for id in before if id not in after]
                try:
                    await self._ready(entry, to)
                    return self._flip(name, before, to, replace)
                finally:
                    self._swap_under_way = None
        finally:
            entry.claims -= 1
            # The load does this itself unless it was never begun.
            if entry.loading is None:
                self._undo_registration(entry)

    def _serves(self, entry: RegistryEntry) -> bool:
        """Whether the model can serve now. A drain that a swap began is cancelled.

        Raises:
            EngineRestarting: its engine is being restarted, so no name may be switched to it yet.
        """
        if entry.revive():
            self._arm(entry, self._granted(entry))
        if entry.state is not ModelState.READY or entry.lost():
            return False
        if (trouble := entry.trouble()) is not None:
            raise trouble
        return True

    async def _ready(self, entry: RegistryEntry, to: str) -> None:
        """Load a model, and check that it is still loaded afterwards."""
        for _ in range(_MAX_ENSURES):
            if entry.removed:
                break
            await self._ensure(entry)
            if not entry.removed and self._serves(entry):
                return
        raise ModelConflict(f"to: the model `{to[:80]}` was unloaded or removed while the swap waited for it")

    def _flip(
        self, name: str, before: dict[str, float], to: str, replace: str | None
    ) -> tuple[Swapped, list[asyncio.Task[None]]]:
        """Switch the name to the new model, and drain the models without a name."""
        try:
            now = self._weights(name)
            after = replaced_weights(name, now, to, replace)
        except (ModelNotServed, InvalidRequest) as error:
            raise ModelConflict(f"model: `{name[:80]}` was changed while `{to}` was loaded: {error}") from None
        if replace is None and now != before:
            raise ModelConflict(
                f"model: `{name[:80]}` was set to {quoted(now)} while `{to}` was loaded, and stays so; `{to}` is "
                "loaded, so another swap to it is instant"
            )
        if after == {name: 1.0}:
            self._aliases.pop(name, None)
        else:
            self._aliases[name] = Alias(name, after)
        leaving = [self._entries[id] for id in now if id not in after]
        kept = {entry.id: names for entry in leaving if (names := self.aliases_of(entry))}
        # Another swap may be about to switch its name to one of them.
        coming = None if self._swap_under_way is None else self._swap_under_way[0]
        gone = [entry for entry in leaving if entry.id not in kept and entry.id != coming]
        for entry in gone:
            if entry.loading is not None:
                # The requests that wait for it are still answered.
                entry.loading.add_done_callback(functools.partial(self._leave, entry))
        drains = [drain for entry in gone if (drain := self._begin_drain(entry, None, revivable=True)) is not None]
        stays = "".join(f"; {id} stays loaded for {quoted(names)}" for id, names in kept.items())
        logger.info("the name %s is switched from %s to %s%s", name, quoted(now), quoted(after), stays)
        unloading = tuple(entry.id for entry in gone if entry.engine is not None or entry.loading is not None)
        return Swapped(self._entries[to], unloading, kept), drains

    def _leave(self, entry: RegistryEntry, load: asyncio.Task[None]) -> None:
        if not self.aliases_of(entry):
            self._begin_drain(entry, None, revivable=True)

    def _replaced_by(self, entry: RegistryEntry) -> list[str]:
        to, leaving = self._swap_under_way or ("", [])
        return leaving if to == entry.id else []

    def _needed(self) -> set[str]:
        to, leaving = self._swap_under_way or ("", [])
        return {to, *leaving}

    # -------------------------------------------------------- shutdown

    def stop(self) -> None:
        """Cancel all loads and begin no new ones. Loaded models go on serving."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        for entry in (*self._entries.values(), *self._removed):
            entry.end_load()

    async def close(self) -> None:
        """Cancel all loads and close all engines."""
        self.stop()
        entries = [*self._entries.values(), *self._removed]
        await asyncio.gather(*(entry.loading for entry in entries if entry.loading is not None), return_exceptions=True)
        await asyncio.gather(*(self._drain(entry, 0.0) for entry in self.loaded))
