"""Starts an engine for the server. It imports little, as the first engine starts before the server is imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.engine.supervisor import SupervisedEngine

__all__ = ["Progress", "start_engine"]

Progress = Callable[[str, int, int], None]


async def start_engine(config: EngineConfig, progress: Progress) -> SupervisedEngine:
    """Start an engine in its own worker process.

    Raises:
        OctavoError: it cannot be started.
    """
    from octavo.engine.supervisor import SupervisedEngine

    return await SupervisedEngine.start(config, progress=progress)
