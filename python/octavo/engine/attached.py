"""An engine whose worker belongs to another process, which hands out connections to it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from socket import socket

import msgspec

from octavo.config import EngineConfig
from octavo.engine.client import EngineClient
from octavo.engine.requests import RequestMaker
from octavo.engine.supervisor import RestartPolicy, SupervisedEngine
from octavo.errors import EngineDead, EngineRestarting

__all__ = ["AttachedEngine"]

_PAUSE_S = 0.3
_POLICY = RestartPolicy(first_delay_s=0.05, max_failures=1 << 30, max_delay_s=2.0)
_SEED_STEP = 0x5851F42D4C957F2D


class AttachedEngine(SupervisedEngine):
    """An engine whose worker belongs to another process, which watches and restarts it.

    Args:
        config: the settings that the worker was started with.
        connect: gives a connection to the worker once it is ready, again after each of its ends; raises
            EngineRestarting to be asked later, EngineDead when there is no more to come.
        number: of this client, so that no two draw the same seeds.
    """

    def __init__(self, config: EngineConfig, connect: Callable[[], Awaitable[socket]], number: int) -> None:
        super().__init__(config, _POLICY)
        self._ask = connect
        self._number = number

    async def load(
        self,
        *,
        progress: Callable[[str, int, int], None] | None = None,
        worker_command: Sequence[str] | None = None,
    ) -> None:
        """Read the tokenizer and join the worker.

        Args:
            progress: as of `AsyncEngine.load`.
            worker_command: the worker was started with it, and so has no tokenizer (tests).

        Raises:
            ModelError, EngineDead: as `AsyncEngine.load`.
        """
        began = time.monotonic()
        self._progress = progress
        try:
            if worker_command is None:
                await self._read_tokenizer()
            await self._connect(self._client)
            self.model = await self._loaded
        except BaseException:
            if not self._loaded.cancel() and not self._loaded.cancelled():
                self._loaded.exception()
            await self.close()
            raise
        seed = (self.config.seed + self._number * _SEED_STEP) & ((1 << 63) - 1)
        self._requests = RequestMaker(self.model, seed, self.tokenizer)
        self._settings = msgspec.structs.replace(self._settings, max_model_len=self.model.max_model_len)
        self._note_ready(began)

    def _tell(self, level: int, message: str, *arguments: object) -> None:
        """Nothing that anybody needs: the worker's owner logs what becomes of it, once."""
        super()._tell(logging.DEBUG, message, *arguments)

    async def _connect(self, client: EngineClient) -> None:
        while True:
            try:
                sock = await self._ask()
            except EngineRestarting:
                # Its owner decides for how long that goes on.
                await asyncio.sleep(_PAUSE_S)
            except EngineDead as error:
                self._bury(str(error))
                raise
            else:
                await client.attach(sock)
                return
