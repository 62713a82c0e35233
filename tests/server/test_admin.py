"""The admin listener: its keys, and what it does to models while they serve."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from octavo.errors import ConfigError
from octavo.server.admin import AdminKeys
from octavo.server.auth import KeyRing
from routing_harness import ADMIN_KEY, Routed


@pytest.fixture
def server() -> Iterator[Routed]:
    running = Routed("m@v1", "~slow=slow?load=0.3")
    yield running
    running.stop()


def states(server: Routed) -> dict[str, str]:
    models = server.admin("GET", "models").json()["models"]
    return {model["id"]: model["state"] for model in models}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "models"),
        ("GET", "models/m@v1"),
        ("POST", "models/load"),
        ("POST", "models/unload"),
        ("POST", "models/swap"),
        ("GET", "aliases"),
        ("PUT", "aliases"),
        ("PUT", "aliases/x"),
        ("DELETE", "aliases/m"),
        ("GET", "nothing"),
    ],
)
def test_every_route_asks_for_the_key(server: Routed, method: str, path: str) -> None:
    for key in (None, "x", "wrong-key-of-this-server", ADMIN_KEY[:-1]):
        refused = server.admin(method, path, {"model": "m"}, key)
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "invalid_api_key"
        assert refused.headers["www-authenticate"] == "Bearer"
    assert server.registry.aliases == {"m": {"m@v1": 1}}


def test_admin_routes_are_on_their_own_listener_only(server: Routed) -> None:
    assert httpx.get(f"{server.url}/admin/models", headers={"X-Api-Key": ADMIN_KEY}).status_code == 404
    assert httpx.get(f"{server.admin_url}/v1/models", headers={"X-Api-Key": ADMIN_KEY}).status_code == 404
    rebound = httpx.get(f"{server.admin_url}/admin/models", headers={"Host": "evil.example", "X-Api-Key": "x" * 20})
    assert rebound.status_code in (400, 401, 403, 421)


def test_a_servers_key_needs_the_scope() -> None:
    ring = KeyRing(arguments=["a-key-without-scope"])
    keys = AdminKeys(ADMIN_KEY, ring)
    assert keys.find([ADMIN_KEY.encode()]).scopes == {"admin"}
    assert "admin" not in keys.find([b"a-key-without-scope"]).scopes
    server = Routed("a", keys=ring)
    try:
        assert server.admin("GET", "models", key="a-key-without-scope").status_code == 403
        assert server.admin("GET", "models").status_code == 200
        # And the admin's key opens nothing else.
        assert server.ask("a", {"Authorization": f"Bearer {ADMIN_KEY}"}).status_code == 401
    finally:
        server.stop()


def test_there_is_no_admin_listener_without_a_key() -> None:
    with pytest.raises(ConfigError, match="admin_port: there is no key for it; set OCTAVO_ADMIN_KEY"):
        AdminKeys(None, KeyRing())
    assert AdminKeys(None, KeyRing(arguments=["some-long-key"])).required
    assert AdminKeys(None, KeyRing(arguments=["some-long-key"])).find([b"another-long-key"]) is None


def test_load_and_unload(server: Routed) -> None:
    assert states(server) == {"m@v1": "ready", "slow": "unloaded"}
    begun = server.admin("POST", "models/load", {"model": "slow", "wait": False})
    assert begun.status_code == 202
    assert begun.json()["state"] == "loading"
    time.sleep(0.05)
    shown = server.admin("GET", "models/slow").json()
    assert shown["progress"] == {"stage": "weights", "done": 1, "total": 4, "share": 0.25}
    assert server.admin("POST", "models/load", {"model": "slow"}).json()["state"] == "ready"
    assert len(server.engines.attempts) == 2
    assert server.ask("slow").status_code == 200
    assert server.admin("POST", "models/unload", {"model": "slow"}).json()["state"] == "unloaded"
    assert server.engines.open == ["m@v1"]
    new = {"model": "new", "path": "new?bytes=5", "engine": {"max_num_seqs": 3, "kv_cache_memory": "1MiB"}}
    loaded = server.admin("POST", "models/load", {**new, "keep_alive": 60, "pinned": True}).json()
    assert (loaded["state"], loaded["weights_bytes"], loaded["pinned"]) == ("ready", 5, True)
    assert 59 < loaded["unload_in"] <= 60
    config = server.registry.find("new").config
    assert config is not None
    assert (config.max_num_seqs, config.kv_cache_memory) == (3, 1 << 20)
    assert server.admin("POST", "models/unload", {"model": "new", "remove": True}).status_code == 200
    assert "new" not in states(server)
    budget = server.admin("GET", "models").json()["budget"]
    assert budget == {"loaded": 1, "max_loaded_models": None, "bytes": 0, "model_memory": None}


def test_aliases(server: Routed) -> None:
    server.admin("POST", "models/load", {"model": "m@v2", "path": "m@v2"})
    put = server.admin("PUT", "aliases", {"chat": {"m@v1": 1, "m@v2": 3}, "gpt": "m@v2"})
    assert put.json() == {"aliases": {"chat": {"m@v1": 1, "m@v2": 3}, "gpt": {"m@v2": 1}}}
    assert server.admin("GET", "aliases").json() == put.json()
    assert server.ask("gpt").headers["x-model-version"] == "m@v2"
    assert server.ask("m").status_code == 404
    assert server.admin("PUT", "aliases/m", "m@v1").json()["aliases"]["m"] == {"m@v1": 1}
    assert server.admin("PUT", "aliases/org/m", {"m@v1": 2}).json()["aliases"]["org/m"] == {"m@v1": 2}
    assert "gpt" not in server.admin("DELETE", "aliases/gpt").json()["aliases"]
    assert server.admin("DELETE", "aliases/gpt").status_code == 404
    wrong = server.admin("PUT", "aliases", {"chat": "m@v3"})
    assert wrong.status_code == 400
    assert "there is no model `m@v3` (did you mean `m@v" in wrong.json()["error"]["message"]
    assert "chat" in server.admin("GET", "aliases").json()["aliases"]


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("load", {}, 400, "model"),
        ("load", {"model": "nothing"}, 404, "`nothing` does not exist"),
        ("load", {"model": 3}, 400, "model"),
        ("load", {"model": "x", "engine": {"max_num_seqs": 3}}, 400, "give its `path` too"),
        ("load", {"model": "x", "path": "x", "engine": {"max_num_sqs": 3}}, 400, "max_num_sqs: there is no such"),
        ("load", {"model": "x", "path": "x", "engine": {"block_size": 7}}, 400, "block_size: 7"),
        ("load", {"model": "x", "path": "x", "engine": {"model": "y"}}, 400, "engine.model"),
        ("load", {"model": "x", "path": "x?fail=1"}, 422, "there is no 'x'"),
        ("load", {"model": "m@v1", "path": "other"}, 400, "is ready with other settings"),
        ("unload", {"model": "m", "timeout": -1}, 400, "timeout: -1"),
        ("unload", {"model": "m@v1", "remove": True}, 400, "`m` lead to `m@v1`"),
        ("swap", {"model": "m", "to": "m@v2", "path": "x?fail=1"}, 422, "there is no 'x'"),
        ("swap", {"model": "m", "to": "m@v9"}, 404, "`m@v9` does not exist"),
        ("swap", {"model": "m", "to": "slow", "replace": "slow"}, 400, "replace: `m` has no model `slow`"),
        ("swap", [], 400, "object"),
    ],
)
def test_mistakes_change_nothing(server: Routed, path: str, body: Any, status: int, text: str) -> None:
    refused = server.admin("POST", f"models/{path}", body)
    assert (refused.status_code, refused.json()["error"]["type"]) == (status, "invalid_request_error")
    assert text in refused.json()["error"]["message"]
    assert server.ask("m").headers["x-model-version"] == "m@v1"
    assert server.registry.aliases["m"] == {"m@v1": 1}


def test_bodies_of_pages_and_of_any_size_are_refused(server: Routed) -> None:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Type": "text/plain"}
    refused = httpx.post(f"{server.admin_url}/admin/models/unload", content=b'{"model":"m"}', headers=headers)
    assert refused.status_code == 400
    headers["Content-Type"] = "application/json"
    large = httpx.post(f"{server.admin_url}/admin/models/unload", content=b" " * (2 << 20), headers=headers)
    assert large.status_code == 413
    assert server.engines.open == ["m@v1"]
