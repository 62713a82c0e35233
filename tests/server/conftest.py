from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest
from octavo.server.access.api_keys import KeyRing
from octavo.server.settings import ServerSettings
from octavo.server.state import ServerState
from server_fakes import FakeEngine
from server_harness import Running

# Else it waits for a host that tests do not reach.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    """Starts servers; stopped at the test's end."""
    running: list[Running] = []

    def make(engine: FakeEngine | None = None, *, keys: KeyRing | None = None, **settings: Any) -> Running:
        own = ServerSettings(**{"allowed_hosts": ("x",), **settings})
        running.append(Running(engine or FakeEngine(), ServerState(own, keys=keys)))
        return running[-1]

    yield make
    for server in running:
        server.stop()


@pytest.fixture
def server(start: Callable[..., Running]) -> Running:
    return start()


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with server.client() as client:
        yield client
