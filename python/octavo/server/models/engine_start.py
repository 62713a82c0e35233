"""How the server starts an engine; imports little, for the first one starts before the server is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.engine.supervisor import SupervisedEngine

__all__ = ["Progress", "start_engine"]

Progress = Callable[[str, int, int], None]


async def start_engine(config: EngineConfig, progress: Progress) -> SupervisedEngine:
    """An engine in a worker process of its own.

    Raises:
        OctavoError: it cannot be started.
    """
    from octavo.engine.supervisor import SupervisedEngine

    return await SupervisedEngine.start(config, progress=progress)
