"""An engine whose worker process is restarted when it ends or hangs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from octavo.config import EngineConfig
from octavo.engine.async_engine import AsyncEngine
from octavo.engine.client import EngineClient
from octavo.engine.engine_state import EngineState
from octavo.engine.process import WORKER_COMMAND
from octavo.engine.protocol import Load
from octavo.engine.watchdog import RestartPolicy, Watchdog, look_at
from octavo.errors import EngineDead, EngineRestarting, OctavoError
from octavo.runner.interface import ModelInfo

__all__ = ["RestartPolicy", "SupervisedEngine"]

_LOG = logging.getLogger(__name__)
_END_WAIT_S = 10.0
# What requests and answers depend on; the number of blocks may follow the memory that is free.
_SAME = ("architecture", "vocab_size", "dtype", "device", "max_model_len", "block_size", "eos_token_ids")


class _Outage:
    """The time from a worker's end to the next one's readiness.

    Attributes:
        reason: how the last worker ended.
        since: Unix time.
        expected_end: when it may be over, by `time.monotonic`.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.since = time.time()
        self.expected_end = time.monotonic()

    @property
    def seconds_left(self) -> float:
        return max(self.expected_end - time.monotonic(), 0.0)

    def error(self) -> EngineRestarting:
        """The error for requests during the outage."""
        return EngineRestarting(f"{self.reason}; it is being restarted; retry the request", max(self.seconds_left, 1.0))


class SupervisedEngine(AsyncEngine):
    """An `AsyncEngine` that outlives its worker process.

    When the process dies, fails or hangs, every request that it had ends with `EngineRestarting`, and it is started
    again: at once the first time, then after ever longer pauses. Too many failures in a row end the engine for good,
    with the last reason kept. A first load that fails is not tried again: `start` raises.

    Requests that come in between wait for a while, then raise `EngineRestarting`; `check_health` raises it at once.

    Args:
        config: the model and the engine's settings.
        policy: what counts as hung, and how often to try; by the settings when None.

    Attributes:
        restarts: times the process was started again.
    """

    def __init__(self, config: EngineConfig, policy: RestartPolicy | None = None) -> None:
        super().__init__(config)
        self.restarts = 0
        self._policy = policy or RestartPolicy.of(config)
        self._outage: _Outage | None = None
        self._last_reason: str | None = None
        self._failures = 0
        self._serving = False
        self._ready_since = 0.0
        self._load_seconds = 0.0
        self._over = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    @classmethod
    async def start(
        cls,
        config: EngineConfig | str,
        *,
        progress: Callable[[str, int, int], None] | None = None,
        worker_command: Sequence[str] | None = None,
        policy: RestartPolicy | None = None,
    ) -> SupervisedEngine:
        """As `AsyncEngine.start`.

        Args:
            config: the model and the engine's settings.
            progress: told of every load, restarts' too.
            worker_command: another worker program.
            policy: as of the class.
        """
        self = cls(EngineConfig(model=config) if isinstance(config, str) else config, policy)
        await self.load(progress=progress, worker_command=worker_command)
        return self

    async def load(
        self,
        *,
        progress: Callable[[str, int, int], None] | None = None,
        worker_command: Sequence[str] | None = None,
    ) -> None:
        """Load the model for the first time. Call it once; `state()` shows the progress.

        Raises:
            ModelError, ConfigError, EngineDead: as `start`.
        """
        self._spawn(self._watch())
        began = time.monotonic()
        await super().load(progress=progress, worker_command=worker_command)
        # A restart must give what requests were checked against, or fail.
        self._settings = msgspec.structs.replace(self._settings, max_model_len=self.model.max_model_len)
        self._note_ready(began)

    def state(self) -> EngineState:
        """The state of the engine."""
        state = super().state()
        outage = self._outage
        if state.name != "dead" and outage is not None:
            state = msgspec.structs.replace(
                state, name="restarting", since=outage.since, retry_after=max(outage.seconds_left, 1.0)
            )
        reason = state.reason or (outage.reason if outage is not None else self._last_reason)
        return msgspec.structs.replace(state, reason=reason, restarts=self.restarts)

    async def invite(self) -> socket.socket:
        """A connection to the worker for a client in another process; waits during a restart.

        Raises:
            EngineRestarting, EngineDead: no worker can take it.
        """
        if self._outage is not None and self._reason is None:
            await self._wait_over(self._outage)
        self.check_health()
        process = self._client.process
        assert process is not None
        try:
            return process.invite()
        except EngineDead as error:
            # It has ended, and the news of it is on its way.
            raise EngineRestarting(str(error)) from None

    def check_health(self) -> None:
        """Raise unless the engine takes requests now.

        Raises:
            EngineRestarting: a restart is under way.
            EngineDead: the engine was given up, or closed.
        """
        super().check_health()
        if self._outage is not None:
            raise self._outage.error()

    async def close(self) -> None:
        """End the worker process and its watchdog. Idempotent."""
        self._bury("the engine was closed")
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await super().close()

    # -------------------------------------------------------- requests

    async def _open(self, *arguments: Any, **options: Any) -> Any:
        """Wait for a short restart, then open the request."""
        if self._outage is not None and self._reason is None:
            await self._wait_over(self._outage)
        return await super()._open(*arguments, **options)

    async def _wait_over(self, outage: _Outage) -> None:
        if outage.seconds_left <= self._policy.wait_s:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._over.wait(), self._policy.wait_s)
        self.check_health()

    # -------------------------------------------------------- the worker's end

    def _die(self, reason: str) -> None:
        """The worker has ended."""
        reason = self._with_last_words(reason)
        if self._reason is not None:
            return
        if not self._serving:
            # A load: whoever waits for it decides.
            self._settle(EngineDead(reason))
            return
        self._serving = False
        self._over.clear()
        if time.monotonic() - self._ready_since >= self._policy.stable_s:
            self._failures = 0
        self._outage = _Outage(reason)
        self._last_reason = reason
        self._plan_restart(reason)
        outage = self._outage
        self._fail_all(outage.error if outage is not None else lambda: EngineDead(reason))

    def _bury(self, reason: str) -> None:
        super()._bury(reason)
        self._over.set()

    def _plan_restart(self, reason: str) -> None:
        """Restart after a pause, or give up."""
        self._failures += 1
        if self._failures > self._policy.max_failures:
            self._outage = None
            self._tell(logging.ERROR, "the engine is given up: %s", reason)
            self._bury(f"the engine failed {self._failures} times in a row and was given up; the last time: {reason}")
            return
        delay = self._policy.delay(self._failures)
        assert self._outage is not None
        self._outage.reason = self._last_reason = reason
        self._outage.expected_end = time.monotonic() + delay + self._load_seconds
        self._tell(logging.ERROR, "%s; its requests ended, it is started again in %.1f s", reason, delay)
        self._spawn(self._restart(delay))

    async def _restart(self, delay: float) -> None:
        """Make one attempt to restart."""
        ended = await self._client.wait_ended(_END_WAIT_S)
        if not ended:
            _LOG.warning("the engine's old process %d does not end; a new one is started beside it", self._client.pid)
        await asyncio.sleep(delay)
        began = time.monotonic()
        client = self._reconnect()
        self.restarts += 1
        try:
            await self._connect(client)
            info = await self._loaded
        except (OctavoError, OSError) as error:
            client.condemn(str(error))
            if self._reason is None:
                self._plan_restart(f"the engine could not be started again: {error}")
            return
        changed = [name for name in _SAME if getattr(info, name) != getattr(self.model, name)]
        if changed:
            client.condemn("the model has changed")
            self._outage = None
            self._bury(_changed(self.model, info, changed))
            return
        self.model = info
        self._note_ready(began)
        self._tell(logging.WARNING, "the engine serves again, %.1f s after it was started", self._load_seconds)

    def _tell(self, level: int, message: str, *arguments: object) -> None:
        """Log a change of the engine's state."""
        _LOG.log(level, message, *arguments)

    async def _connect(self, client: EngineClient) -> None:
        """Start a worker for `client`, and have it load the model."""
        await client.start(WORKER_COMMAND if self._command is None else self._command)
        client.send(Load(self._settings))

    def _note_ready(self, began: float) -> None:
        self._ready_since = time.monotonic()
        self._load_seconds = self._ready_since - began
        self._serving = True
        self._outage = None
        self._mark_ready()
        self._over.set()

    # -------------------------------------------------------- the watch

    async def _watch(self) -> None:
        """Check the worker periodically while the engine lives."""
        watched, watchdog = None, Watchdog(self._policy)
        while True:
            await asyncio.sleep(self._policy.interval_s)
            client = self._client
            process = client.process
            if client is not watched:
                watched, watchdog = client, Watchdog(self._policy)
            if process is None or client.dead or not process.alive:
                continue
            verdict = watchdog.look(
                time.monotonic(),
                look_at(process.pid),
                process.heartbeat.phase,
                process.heartbeat.steps,
                computes=self._serving and self.model.device == "cpu",
            )
            if verdict is not None:
                client.condemn(verdict)

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _changed(before: ModelInfo, after: ModelInfo, names: list[str]) -> str:
    name = names[0]
    return (
        f"the model's files have changed since the server started: {name} was {getattr(before, name)!r} and is "
        f"{getattr(after, name)!r}; start the server anew to serve them"
    )
