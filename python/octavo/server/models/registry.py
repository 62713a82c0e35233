"""The models of one server: which there are, under which names, which are loaded, and how one takes another's place."""

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
from octavo.server.models.aliases import Alias
from octavo.server.models.catalog import quoted
from octavo.server.models.engine_start import start_engine as start_async_engine
from octavo.server.models.entry import ModelEntry, ModelState
from octavo.server.models.loads import Loads, StartEngine
from octavo.server.models.model_handle import ClosableEngine, ModelHandle, split_id
from octavo.server.settings import ServerSettings

__all__ = ["ModelRegistry", "StartEngine", "Swapped", "start_async_engine"]

logger = logging.getLogger("octavo.server")

_MAX_ENSURES = 3


class Swapped(msgspec.Struct, frozen=True):
    """What a swap has done.

    Attributes:
        entry: answers to the name now.
        unloading: ids of the models that nothing leads to any more.
        kept: ids of the replaced models that stay loaded, and the aliases that lead to each.
    """

    entry: ModelEntry
    unloading: tuple[str, ...]
    kept: dict[str, list[str]]


class ModelRegistry(Loads):
    """Models by name, and their engines.

    For one event loop: between a request's choice of a model and its lease nothing else runs, so a swap loses no
    request.

    Args:
        settings: the server's.
        start_engine: makes engines.
    """

    def __init__(self, settings: ServerSettings, start_engine: StartEngine = start_async_engine) -> None:
        super().__init__(settings, start_engine)
        # Swaps of one name come one after the other, and so do those that load: meanwhile both their models are there.
        self._swap_locks: dict[str, asyncio.Lock] = {}
        self._swap_users: Counter[str] = Counter()
        self._loading_swap = asyncio.Lock()
        self._swap_under_way: tuple[str, list[str]] | None = None

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

    def resolve(self, name: str | None) -> ModelHandle:
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
        return entry.handle(asked)

    async def acquire(
        self, name: str | None, key: Callable[[], str | None] | None = None, variant: str | None = None
    ) -> tuple[ModelHandle, Callable[[], None]]:
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
        if not entry.loads_on_request or (entry.state is ModelState.FAILED and entry.retry_in()):
            return False
        return self._settings.autoload

    # -------------------------------------------------------- loading and unloading

    async def start(self) -> None:
        """Load the models of the start, one after the other.

        Raises:
            OctavoError: of the first that cannot be loaded.
        """
        for id in self._at_start:
            try:
                await self.load(id)
            except OctavoError:
                # Whoever started the server says why, but knows nothing of ids.
                if len(self._at_start) > 1:
                    logger.error("the model %s could not be loaded", id)
                raise
        self.started = True

    async def load(self, name: str, config: EngineConfig | None = None, **options: Any) -> ModelEntry:
        """Load a model, or wait for the load that is under way; one that is ready stays as it is.

        Cancelling the caller does not end the load. Registered with `tentative`, a model whose load fails is known no
        more.

        Args:
            name: id or alias of a known model; the id of a new one with `config`.
            config: registers the model first.
            options: of `register`.

        Raises:
            ModelNotServed: not known.
            OctavoError: it cannot be loaded.
        """
        entry = self.find(name) if config is None else self.register(name, config, **options)
        try:
            await self._ensure(entry)
        finally:
            if entry.loading is None:
                self._come_to_nothing(entry)
        return entry

    async def unload(self, name: str, *, timeout: float | None = None, remove: bool = False) -> ModelEntry:
        """Let a model's running requests finish, then close its engine.

        Args:
            name: id, or alias of one model.
            timeout: seconds that running requests get from now on, also where the model drains already; the setting
                `model_drain_timeout` when None.
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
        await self._end_load(entry)
        await self._drain(entry, timeout)
        if remove:
            # Of a request that came before the model was forgotten and waited for the drain.
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
        """Let another model answer to a name: load it, warm it, flip the name, drain and close what it stood for.

        Until the new model is ready, and for ever should it fail, the old one serves. Old models that other aliases
        need stay loaded. Swapping back is a swap; while the old one still drains it is instant. Swaps of one name come
        after each other; a change of the alias comes at once, and a swap under way that it contradicts changes nothing.

        Args:
            name: alias or id.
            to: id of the new model, known or registered from `config`; the name with the next number as its version
                when None.
            config: of a new model's engine; should its load fail it is as if it had never been named.
            replace: the one model of an alias of several that is to be replaced; its weight goes over.
            wait: return only when the old engines are closed.
            options: of `register`.

        Raises:
            ModelNotServed: no such name, or `to` is not known and there is no `config`.
            ConfigError: `to` is known, and was registered from another model than `config`.
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
        before = self._pointer(name)
        version = self._entries.get(name)
        if version is not None and version.version:
            raise InvalidRequest(
                f"model: `{name}` is one version of a model, which stays what it is; swap a name that leads to it "
                f"({quoted(self.aliases_of(version)) or 'there is none'}), with `replace` where that has several",
                "model",
            )
        if to is None:
            to = self._next_version(split_id(name)[0])
        if config is None and to not in self._entries:
            raise self._unknown(to)
        after = _replaced(name, before, to, replace)
        if config is None:
            entry = self._entries[to]
        else:
            known = self._entries.get(to)
            if known is not None and known.served and known.config != config:
                raise ConfigError(
                    f"to: `{to}` is another model already; leave `path` out to swap to that one, or give this one "
                    f"another version, such as `{self._next_version(split_id(to)[0])}`"
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
            # Only where its load was never begun: else that has done so, or will.
            if entry.loading is None:
                self._come_to_nothing(entry)

    def _serves(self, entry: ModelEntry) -> bool:
        """Whether it answers now, or again: one that a swap lets drain is there until it is closed.

        Raises:
            EngineRestarting: it will in a moment, if all goes well; until then nothing is to be flipped to it.
        """
        if entry.revive():
            self._arm(entry, self._granted(entry))
        if entry.state is not ModelState.READY or entry.lost():
            return False
        if (trouble := entry.trouble()) is not None:
            raise trouble
        return True

    async def _ready(self, entry: ModelEntry, to: str) -> None:
        """Have a model loaded, and see that it still is when this is noticed."""
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
        """Let the name stand for the new model, and drain what nothing leads to any more."""
        try:
            now = self._pointer(name)
            after = _replaced(name, now, to, replace)
        except (ModelNotServed, InvalidRequest) as error:
            raise ModelConflict(f"model: `{name[:80]}` was changed while `{to}` was loaded: {error}") from None
        if replace is None and now != before:
            raise ModelConflict(
                f"model: `{name[:80]}` was given to {quoted(now)} while `{to}` was loaded, and stays so; `{to}` is "
                "loaded, and a swap to it is instant"
            )
        if after == {name: 1.0}:
            self._aliases.pop(name, None)
        else:
            self._aliases[name] = Alias(name, after)
        leaving = [self._entries[id] for id in now if id not in after]
        kept = {entry.id: names for entry in leaving if (names := self.aliases_of(entry))}
        # Another swap may have just loaded one of them, and be about to flip its name to it.
        coming = None if self._swap_under_way is None else self._swap_under_way[0]
        gone = [entry for entry in leaving if entry.id not in kept and entry.id != coming]
        for entry in gone:
            if entry.loading is not None:
                # Those that wait for it are answered by it yet.
                entry.loading.add_done_callback(functools.partial(self._leave, entry))
        drains = [drain for entry in gone if (drain := self._begin_drain(entry, None, revivable=True)) is not None]
        stays = "".join(f"; {id} stays loaded for {quoted(names)}" for id, names in kept.items())
        logger.info("%s leads from %s to %s%s", name, quoted(now), quoted(after), stays)
        unloading = tuple(entry.id for entry in gone if entry.engine is not None or entry.loading is not None)
        return Swapped(self._entries[to], unloading, kept), drains

    def _leave(self, entry: ModelEntry, load: asyncio.Task[None]) -> None:
        if not self.aliases_of(entry):
            self._begin_drain(entry, None, revivable=True)

    def _replaced_by(self, entry: ModelEntry) -> list[str]:
        to, leaving = self._swap_under_way or ("", [])
        return leaving if to == entry.id else []

    def _needed(self) -> set[str]:
        to, leaving = self._swap_under_way or ("", [])
        return {to, *leaving}

    # -------------------------------------------------------- the end

    def stop(self) -> None:
        """End all loads and begin no more; what is loaded serves on."""
        self._closed = True
        for timer in self._timers.values():
            timer.cancel()
        for entry in (*self._entries.values(), *self._removed):
            entry.end_load()

    async def close(self) -> None:
        """End all loads and close all engines."""
        self.stop()
        entries = [*self._entries.values(), *self._removed]
        await asyncio.gather(*(entry.loading for entry in entries if entry.loading is not None), return_exceptions=True)
        await asyncio.gather(*(self._drain(entry, 0.0) for entry in self.loaded))


def _replaced(name: str, weights: dict[str, float], to: str, replace: str | None) -> dict[str, float]:
    """What a name stands for when `to` has taken the place of all its models, or of one, whose weight goes over.

    Raises:
        InvalidRequest: `replace` is none of them.
    """
    if replace is None:
        return {to: 1.0}
    if replace not in weights:
        raise InvalidRequest(f"replace: `{name}` has no model `{replace[:80]}`; it has {quoted(weights)}", "replace")
    after: dict[str, float] = {}
    for id, weight in weights.items():
        heir = to if id == replace else id
        after[heir] = after.get(heir, 0.0) + weight
    return after
