from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pytest
from server_process import ServerProcess


@pytest.fixture
def serve() -> Iterator[Callable[..., ServerProcess]]:
    """Starts server processes; ended at the test's end."""
    started: list[ServerProcess] = []

    def start(model: str = "fake", options: Sequence[str] = (), port: int = 0) -> ServerProcess:
        started.append(ServerProcess(model, options, port))
        return started[-1]

    yield start
    for server in started:
        server.kill()
