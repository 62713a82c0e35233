"""Two real engine processes behind one weighted name, swapped while they serve."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
from octavo.config import EngineConfig
from octavo.server.models.engine_start import start_engine
from routing_harness import Routed
from tiny_checkpoint import write_tiny_llama

SMALL: dict[str, Any] = {
    "dtype": "float32",
    "device": "cpu",
    "num_threads": 1,
    "max_model_len": 128,
    "num_blocks": 512,
    "max_num_seqs": 64,
}
PROMPT = [5, 17, 42, 99, 3]
CLIENTS = 100


async def _ask(session: httpx.AsyncClient, url: str, model: str, count: int = 12) -> tuple[str, list[int]]:
    body = {
        "model": model,
        "prompt": PROMPT,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    got = await session.post(f"{url}/v1/completions", json=body)
    assert got.status_code == 200, got.text
    (choice,) = got.json()["choices"]
    assert choice["finish_reason"] == "length"
    return got.headers["x-model-version"], choice["token_ids"]


async def _load(server: Routed, over: threading.Event, outcomes: Counter[tuple[str, str, tuple[int, ...]]]) -> None:
    async def client(session: httpx.AsyncClient, number: int) -> None:
        names = ("m", "chat")
        while not over.is_set():
            number += 1
            name = names[number % 2]
            version, tokens = await _ask(session, server.url, name)
            outcomes[name, version, tuple(tokens)] += 1

    async with httpx.AsyncClient(timeout=30, limits=httpx.Limits(max_connections=CLIENTS)) as session:
        await asyncio.gather(*(client(session, number) for number in range(CLIENTS)))


def _blocks_used(server: Routed) -> list[str]:
    return re.findall(r"^octavo_kv_cache_blocks_used\{.*\} (\S+)$", server.get("metrics").text, re.MULTILINE)


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    return [write_tiny_llama(tmp_path / f"seed-{seed}", seed) for seed in (1, 2, 3)]


def test_real_engines_swapped_under_load(folders: list[Path]) -> None:
    server = Routed(start_engine=start_engine)
    registry = server.registry
    try:
        for number, folder in enumerate(folders[:2], 1):
            server.do(registry.load(f"m@v{number}", EngineConfig(model=str(folder), **SMALL)))
        registry.set_alias("chat", {"m@v1": 50, "m@v2": 50})
        outcomes: Counter[tuple[str, str, tuple[int, ...]]] = Counter()
        over = threading.Event()
        failures: list[BaseException] = []

        def load() -> None:
            try:
                asyncio.run(_load(server, over, outcomes))
            except BaseException as error:
                failures.append(error)

        def seen(name: str, version: str) -> None:
            end = time.monotonic() + 30
            while not any((name, version) == outcome[:2] for outcome in outcomes):
                assert not failures, failures
                assert time.monotonic() < end
                time.sleep(0.01)

        thread = threading.Thread(target=load)
        thread.start()
        try:
            for name, version in (("m", "m@v1"), ("chat", "m@v1"), ("chat", "m@v2")):
                seen(name, version)
            path = {"path": str(folders[2]), "engine": SMALL}
            swapped = server.admin("POST", "models/swap", {"model": "m", "to": "m@v3", "wait": True, **path})
            assert swapped.status_code == 200, swapped.text
            seen("m", "m@v3")
            replace = {"model": "chat", "to": "m@v3", "replace": "m@v1", "wait": True}
            assert server.admin("POST", "models/swap", replace).status_code == 200
            seen("chat", "m@v3")
            broken = {"model": "m", "to": "m@v4", "path": str(folders[0] / "nothing")}
            assert server.admin("POST", "models/swap", broken).status_code == 422
        finally:
            over.set()
            thread.join(60)
        assert not failures, failures
        # Every answer is one model's, whole: greedy answers are the same alone and among a hundred others.
        by_version: dict[str, set[tuple[int, ...]]] = {}
        for _, version, tokens in outcomes:
            by_version.setdefault(version, set()).add(tokens)
        assert {version: len(answers) for version, answers in by_version.items()} == {"m@v1": 1, "m@v2": 1, "m@v3": 1}
        assert len(set.union(*by_version.values())) == 3
        assert sum(outcomes.values()) > CLIENTS
        states = {model["id"]: model["state"] for model in server.admin("GET", "models").json()["models"]}
        assert states == {"m@v1": "unloaded", "m@v2": "ready", "m@v3": "ready"}
        end = time.monotonic() + 10
        while _blocks_used(server) != ["0.0", "0.0"]:
            assert time.monotonic() < end, _blocks_used(server)
            time.sleep(0.02)
        # The one that was swapped out comes back when it is asked for, and is the same.
        (expected,) = by_version["m@v1"]

        async def again() -> tuple[str, list[int]]:
            async with httpx.AsyncClient(timeout=30) as session:
                return await _ask(session, server.url, "m@v1")

        assert asyncio.run(again()) == ("m@v1", list(expected))
    finally:
        server.stop()
