"""One model of the registry: its settings, its state, its engine and the requests that wait for it."""

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

__all__ = ["EntrySnapshot", "LoadProgress", "ModelState", "RegistryEntry"]

# Pause between two loads that requests ask for, after a failed load. It doubles after each failure.
_RETRY_S = 30.0
_MAX_RETRY_S = 960.0


class ModelState(str, Enum):
    """State of a model.

    A draining model takes no new requests. Its engine is closed when the last running request is over.
    """

    UNLOADED = "unloaded"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"


class LoadProgress(msgspec.Struct):
    """Progress of a load.

    Attributes:
        stage: `waiting` for other loads, a stage that the engine reports (`weights`...), or `warm`.
        done, total: of the stage; total is 0 if it is unknown.
    """

    stage: str = "waiting"
    done: int = 0
    total: int = 0

    @property
    def share(self) -> float:
        """Progress of the stage, 0 to 1; 0 if it is unknown."""
        return min(self.done / self.total, 1.0) if self.total > 0 else 0.0


class EntrySnapshot(msgspec.Struct, frozen=True):
    """Fields of a `RegistryEntry` before it was registered again."""

    config: EngineConfig | None
    keep_alive: float | None
    pinned: bool
    info: Any
    state: ModelState
    reason: str | None


class RegistryEntry:
    """A model that can be loaded, with its state and its engine.

    Attributes:
        id: `name@version` or `name`, unique in the registry.
        config: of its engine; None for an engine that was adopted while running and cannot be loaded again.
        state: see `ModelState`.
        progress: of the running load.
        reason: why the last load failed.
        engine: while ready or draining.
        leases: requests that use the engine now.
        last_used: when the last lease began or ended, on the monotonic clock.
        revivable: a load may cancel the drain, as no other model needs the memory.
        closing: the drain is over and the engine is being closed.
        ending: the running load was cancelled.
        removed: the registry has removed it; it is never loaded again.
        served: it was ready at least once. From then on its id always means this model.
        loads_on_request: a request may load it. A model that was added at run time is loaded by its command first.
        claims: running swaps that will serve it.
        undo: undoes its registration if its first load fails.
        created: Unix time of its registration.
        loaded_at: Unix time at which the engine was ready; None without an engine.
        load_seconds: duration of the last load.
        keep_alive: idle seconds after which it is unloaded; None for the server's setting, negative for never.
        pinned: never unloaded to free memory.
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
        # At most one load and one drain run; other callers wait for them.
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
        """The part of the id after the `@`."""
        return split_id(self.id)[1]

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for the load."""
        return len(self._waiters)

    @property
    def busy(self) -> bool:
        """Whether requests use it or wait for it."""
        return bool(self.leases or self._waiters)

    @property
    def bytes(self) -> int:
        """Bytes of weights and KV cache, as measured by the last load; 0 before the first load."""
        return 0 if self.info is None else int(self.info.weights_bytes + self.info.kv_bytes)

    def healthy(self) -> bool:
        """Whether it can answer a request now."""
        return self.trouble() is None

    def trouble(self) -> OctavoError | None:
        """The reason why it cannot answer; None if it can."""
        if self.state is not ModelState.READY or self.engine is None:
            return ModelUnavailable(f"The model `{self.id}` is {self.state.value}")
        try:
            self.engine.check_health()
        except OctavoError as error:
            return error
        return None

    def lost(self) -> bool:
        """Whether the engine of a ready model has ended and is not restarted."""
        if self.state is not ModelState.READY or self.healthy():
            return False
        # A supervised engine reports its state. Any other engine that has ended stays so.
        state: Any = getattr(self.engine, "state", None)
        return state is None or state().name == "dead"

    def snapshot(self) -> EntrySnapshot:
        """The fields that `restore` sets."""
        return EntrySnapshot(self.config, self.keep_alive, self.pinned, self.info, self.state, self.reason)

    def restore(self, before: EntrySnapshot) -> None:
        """Set the fields of a model that is not loaded back to a snapshot."""
        self.config, self.keep_alive, self.pinned = before.config, before.keep_alive, before.pinned
        self.info, self.state, self.reason = before.info, before.state, before.reason

    # -------------------------------------------------------- leases

    def lease(self, name: str) -> ModelHandle:
        """A handle of the model for one request, under the name that responses carry. Call `release` afterwards."""
        self.leases += 1
        self.last_used = time.monotonic()
        return self.handle(name)

    def release(self) -> None:
        """One request is over."""
        self.leases -= 1
        self.last_used = time.monotonic()
        assert self.leases >= 0, "a lease was released twice"
        if not self.leases:
            self._idle.set()

    def handle(self, name: str) -> ModelHandle:
        """A handle of the model under a name, not counted as in use."""
        handle = self._handles.get(name)
        if handle is None:
            assert self.engine is not None
            handle = self._handles[name] = ModelHandle(self.engine, (name,), version=self.id, created=self.created)
        return handle

    def grant(self, seconds: float) -> None:
        """Give running requests this many seconds from now, instead of what a running drain gave them."""
        self._drain_ends = time.monotonic() + seconds
        self._idle.set()

    async def drained(self) -> None:
        """Return once no request uses the engine, the drain was cancelled, or the granted time is over."""
        while self.leases and self.state is ModelState.DRAINING:
            left = self._drain_ends - time.monotonic()
            if left <= 0:
                return
            self._idle.clear()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._idle.wait(), left)

    async def wait(self, name: str, seconds: float) -> ModelHandle:
        """Wait for the running load and take a lease.

        Raises:
            EngineLoading: the load took longer than `seconds`.
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
            raise EngineLoading(f"The model `{self.id}` is still loading; try again in a moment")
        return future.result()

    # -------------------------------------------------------- changes of state

    def begin(self) -> None:
        """Begin to load, unless a drain has to end first."""
        if self.state is not ModelState.DRAINING:
            self.state = ModelState.LOADING
            self.reason = None
            self.progress = LoadProgress()

    def revive(self) -> bool:
        """Cancel a drain and serve again from its engine, unless it is too late.

        Returns:
            Whether it serves.
        """
        if self.state is not ModelState.DRAINING or self.closing or not self.revivable:
            return False
        self.state = ModelState.READY
        self.draining = None
        self._idle.set()
        return True

    def end_load(self) -> None:
        """Cancel the running load, once: its cleanup must not be disturbed."""
        if self.loading is not None and not self.ending:
            self.ending = True
            self.loading.cancel()

    def fail(self, reason: str) -> None:
        """The load has failed.

        Args:
            reason: for the operator of the server.
        """
        self._failed_at = time.monotonic()
        self._failures += 1
        self.take_down(ModelState.FAILED, reason)

    def retry_in(self) -> float | None:
        """Seconds until a request may load a failed model again; None if no request may."""
        if not self.loads_on_request:
            return None
        pause = min(_RETRY_S * (1 << min(self._failures - 1, 16)), _MAX_RETRY_S)
        return max(self._failed_at + pause - time.monotonic(), 0.0)

    def report(self, stage: str, done: int, total: int) -> None:
        """Set the progress that the engine reports."""
        self.progress = LoadProgress(stage, done, total)

    def put_up(self, engine: ClosableEngine, seconds: float = 0.0) -> None:
        """Serve from an engine that is ready, first the requests that wait."""
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
        # Lease now: the model could be unloaded before a waiter wakes up.
        for name, future in waiters:
            if not future.done():
                future.set_result(self.lease(name))

    def take_down(self, state: ModelState, reason: str | None = None) -> None:
        """The engine is closed or its load failed."""
        self.engine = None
        self.loaded_at = None
        self._handles.clear()
        self.state = state
        self.reason = reason
        self.closing = False

    def refuse_waiters(self, error: OctavoError) -> None:
        """Fail the requests that wait for a load."""
        waiters, self._waiters = self._waiters, []
        for _, future in waiters:
            if not future.done():
                future.set_exception(error)

    def describe(self, aliases: Sequence[str] = (), keep_alive: float | None = None) -> dict[str, Any]:
        """The model's state and figures as JSON.

        Args:
            aliases: names of the model.
            keep_alive: idle seconds until it is unloaded; None for never.
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
