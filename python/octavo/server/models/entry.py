"""One model of the registry: its settings, its state, the engine that runs it and who waits for that."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import msgspec

from octavo.config import EngineConfig
from octavo.errors import OctavoError
from octavo.server.error_responses import EngineLoading, ModelUnavailable
from octavo.server.models.model_handle import ClosableEngine, ModelHandle, split_id

__all__ = ["EntrySettings", "LoadProgress", "ModelEntry", "ModelState"]

# Between two loads that requests ask for, after one that failed; twice as long after each.
_RETRY_S = 30.0
_MAX_RETRY_S = 960.0


class ModelState(str, Enum):
    """Where a model stands.

    A draining model takes no new requests; its engine is closed when the last of those that run is over.
    """

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class LoadProgress(msgspec.Struct):
    """How far a load has come.

    Attributes:
        stage: `waiting` for other loads, what the engine says (`weights`...), `warm`.
        done, total: of the stage; total 0 where it is not known.
    """

    stage: str = "waiting"
    done: int = 0
    total: int = 0

    @property
    def share(self) -> float:
        """Of the stage, 0 to 1; 0 where it is not known."""
        return min(self.done / self.total, 1.0) if self.total > 0 else 0.0


class EntrySettings(msgspec.Struct, frozen=True):
    """What a model was before it was registered again; as of `ModelEntry`."""

    config: EngineConfig | None
    keep_alive: float | None
    pinned: bool
    info: Any
    state: ModelState
    reason: str | None


class ModelEntry:
    """A model that can be loaded, and what became of it.

    Attributes:
        id: `name@version` or `name`, unique in the registry.
        config: of its engine; None for an engine that was handed over running, which cannot be loaded again.
        state: see `ModelState`.
        progress: of the load under way.
        reason: why the last load failed.
        engine: while ready or draining.
        leases: exchanges that use the engine now.
        last_used: when the last lease began or ended, on the monotonic clock.
        revivable: a load may take a drain back: nobody waits for the room.
        closing: the drain has come to its end, the engine is being closed.
        ending: the load under way has been cancelled.
        removed: the registry knows it no more; nothing loads it again.
        served: it has answered, or could have: from then on its id stands for this model.
        loads_on_request: a request that names it may have it loaded; one that was given at run time and never loaded
            waits for whoever gave it.
        claims: swaps under way that are to put it up.
        undo: takes back what made it known, should its first load come to nothing.
        created: Unix time at which it was registered.
        loaded_at: Unix time at which the engine was ready; None while there is none.
        load_seconds: that the last load took.
        keep_alive: idle seconds after which it is unloaded; None: as the server's setting, negative: never.
        pinned: never unloaded to make room.
        info: the `ModelInfo` of the last load.
    """

    def __init__(
        self, id: str, config: EngineConfig | None, *, keep_alive: float | None = None, pinned: bool = False
    ) -> None:
        self.id = id
        self.config = config
        self.state = ModelState.UNLOADED
        self.progress = LoadProgress()
        self.reason: str | None = None
        self.engine: ClosableEngine | None = None
        self.leases = 0
        self.last_used = time.monotonic()
        self.created = int(time.time())
        self.loaded_at: float | None = None
        self.load_seconds = 0.0
        self._failed_at = 0.0
        self.keep_alive = keep_alive
        self.pinned = pinned
        self.info: Any = None
        # At most one of each runs; other callers wait for it.
        self.loading: asyncio.Task[None] | None = None
        self.draining: asyncio.Task[None] | None = None
        self.closing = False
        self.revivable = False
        self.ending = False
        self.removed = False
        self.served = False
        self.loads_on_request = True
        self.claims = 0
        self.undo: Callable[[], None] | None = None
        self._failures = 0
        self._drain_ends = 0.0
        self._waiters: list[tuple[str, asyncio.Future[ModelHandle]]] = []
        self._handles: dict[str, ModelHandle] = {}
        self._idle = asyncio.Event()

    @property
    def name(self) -> str:
        """The id without its version."""
        return split_id(self.id)[0]

    @property
    def version(self) -> str | None:
        """What follows the `@`."""
        return split_id(self.id)[1]

    @property
    def num_waiting(self) -> int:
        """Requests that wait for the load."""
        return len(self._waiters)

    @property
    def busy(self) -> bool:
        """Whether requests use it or wait for it."""
        return bool(self.leases or self._waiters)

    @property
    def bytes(self) -> int:
        """Memory of weights and KV cache, as the last load measured it; 0 before the first."""
        return 0 if self.info is None else int(self.info.weights_bytes + self.info.kv_bytes)

    def healthy(self) -> bool:
        """Whether it would answer a request now."""
        return self.trouble() is None

    def trouble(self) -> OctavoError | None:
        """What keeps a ready model from answering."""
        if self.state is not ModelState.READY or self.engine is None:
            return ModelUnavailable(f"The model `{self.id}` is {self.state.value}.")
        try:
            self.engine.check_health()
        except OctavoError as error:
            return error
        return None

    def lost(self) -> bool:
        """Whether the engine of a ready model has ended and nothing starts it again."""
        if self.state is not ModelState.READY or self.healthy():
            return False
        # A supervised engine says where it stands; any other that has ended stays so.
        state: Any = getattr(self.engine, "state", None)
        return state is None or state().name == "dead"

    def settings(self) -> EntrySettings:
        """What `restore` brings back."""
        return EntrySettings(self.config, self.keep_alive, self.pinned, self.info, self.state, self.reason)

    def restore(self, settings: EntrySettings) -> None:
        """Be again what it was, of a model that is not loaded."""
        self.config, self.keep_alive, self.pinned = settings.config, settings.keep_alive, settings.pinned
        self.info, self.state, self.reason = settings.info, settings.state, settings.reason

    # -------------------------------------------------------- leases

    def lease(self, name: str) -> ModelHandle:
        """The model under the name that answers are to carry, counted as in use; `release` it."""
        self.leases += 1
        self.last_used = time.monotonic()
        return self.handle(name)

    def release(self) -> None:
        """One exchange is over."""
        self.leases -= 1
        self.last_used = time.monotonic()
        assert self.leases >= 0, "a lease was given back twice"
        if not self.leases:
            self._idle.set()

    def handle(self, name: str) -> ModelHandle:
        """The model under a name, not counted as in use."""
        handle = self._handles.get(name)
        if handle is None:
            assert self.engine is not None
            handle = self._handles[name] = ModelHandle(self.engine, (name,), version=self.id, created=self.created)
        return handle

    def grant(self, seconds: float) -> None:
        """Running requests get so many seconds from now, whatever a drain under way gave them."""
        self._drain_ends = time.monotonic() + seconds
        self._idle.set()

    async def drained(self) -> None:
        """Return once no exchange uses the engine, the model is revived, or the time granted is over."""
        while self.leases and self.state is ModelState.DRAINING:
            left = self._drain_ends - time.monotonic()
            if left <= 0:
                return
            self._idle.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._idle.wait(), left)

    async def wait(self, name: str, seconds: float) -> ModelHandle:
        """A lease, as soon as the load that is under way has ended well.

        Raises:
            EngineLoading: not within `seconds`.
            OctavoError: the load failed.
        """
        future: asyncio.Future[ModelHandle] = asyncio.get_running_loop().create_future()
        waiter = (name, future)
        self._waiters.append(waiter)
        try:
            done, _ = await asyncio.wait((future,), timeout=seconds)
        except BaseException:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release()
            raise
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        if not done:
            raise EngineLoading(f"The model `{self.id}` is still loading; try again in a moment.")
        return future.result()

    # -------------------------------------------------------- changes of state

    def begin(self) -> None:
        """A load begins, unless it has to wait for a drain to end."""
        if self.state is not ModelState.DRAINING:
            self.state = ModelState.LOADING
            self.reason = None
            self.progress = LoadProgress()

    def revive(self) -> bool:
        """Serve again from an engine that drains, where that is not too late.

        Returns:
            whether it serves.
        """
        if self.state is not ModelState.DRAINING or self.closing or not self.revivable:
            return False
        self.state = ModelState.READY
        self.draining = None
        self._idle.set()
        return True

    def end_load(self) -> None:
        """End the load under way; once, for what it has begun must be cleaned up undisturbed."""
        if self.loading is not None and not self.ending:
            self.ending = True
            self.loading.cancel()

    def fail(self, reason: str) -> None:
        """The load has come to nothing.

        Args:
            reason: for people who run the server.
        """
        self._failed_at = time.monotonic()
        self._failures += 1
        self.take_down(ModelState.FAILED, reason)

    def retry_in(self) -> float | None:
        """Seconds until a request may have a model loaded again whose load failed; None: none may."""
        if not self.loads_on_request:
            return None
        pause = min(_RETRY_S * (1 << min(self._failures - 1, 16)), _MAX_RETRY_S)
        return max(self._failed_at + pause - time.monotonic(), 0.0)

    def report(self, stage: str, done: int, total: int) -> None:
        """Take an engine's word on its load."""
        self.progress = LoadProgress(stage, done, total)

    def put_up(self, engine: ClosableEngine, seconds: float = 0.0) -> None:
        """The engine is ready: serve from it, those that waited first."""
        self.engine = engine
        self.info = engine.model
        self.state = ModelState.READY
        self.reason = None
        self.undo = None
        self.served = self.loads_on_request = True
        self._failures = 0
        self.load_seconds = seconds
        self.loaded_at = time.time()
        self.last_used = time.monotonic()
        waiters, self._waiters = self._waiters, []
        # Leased here and now: a waiter that wakes up later must not find the model gone again.
        for name, future in waiters:
            if not future.done():
                future.set_result(self.lease(name))

    def take_down(self, state: ModelState, reason: str | None = None) -> None:
        """There is no engine any more."""
        self.engine = None
        self.loaded_at = None
        self._handles.clear()
        self.state = state
        self.reason = reason
        self.closing = False

    def refuse_waiters(self, error: OctavoError) -> None:
        """The load that requests wait for will not come."""
        waiters, self._waiters = self._waiters, []
        for _, future in waiters:
            if not future.done():
                future.set_exception(error)

    def describe(self, aliases: Sequence[str] = (), keep_alive: float | None = None) -> dict[str, Any]:
        """All of it for people and their tools.

        Args:
            aliases: names that lead here.
            keep_alive: idle seconds that it is granted; None: no end.
        """
        trouble = self.trouble() if self.state is ModelState.READY else None
        unload_in = None
        if self.state is ModelState.READY and keep_alive is not None and not self.leases:
            unload_in = max(round(self.last_used + keep_alive - time.monotonic(), 3), 0.0)
        return {
            "id": self.id,
            "state": self.state.value,
            "progress": (
                {**msgspec.structs.asdict(self.progress), "share": round(self.progress.share, 4)}
                if self.state is ModelState.LOADING
                else None
            ),
            "reason": str(trouble) if trouble is not None else self.reason,
            "model": None if self.config is None else self.config.model,
            "aliases": list(aliases),
            "running": self.leases,
            "waiting": self.num_waiting,
            "idle_seconds": round(time.monotonic() - self.last_used, 3) if not self.busy else 0.0,
            "keep_alive": keep_alive,
            "unload_in": unload_in,
            "pinned": self.pinned,
            "created": self.created,
            "loaded_at": self.loaded_at,
            "load_seconds": round(self.load_seconds, 3),
            "weights_bytes": None if self.info is None else int(self.info.weights_bytes),
            "kv_bytes": None if self.info is None else int(self.info.kv_bytes),
            "max_model_len": None if self.info is None else int(self.info.max_model_len),
        }
