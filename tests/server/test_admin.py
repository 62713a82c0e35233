"""The admin listener: its keys and its commands."""

from __future__ import annotations

import logging
import re
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from octavo.errors import ConfigError
from octavo.server.access.api_keys import KeyRing
from octavo.server.admin.routes import AdminKeys
from octavo.server.transport.listen import bind
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
def test_every_route_needs_the_key(server: Routed, method: str, path: str) -> None:
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


def test_a_used_admin_port_names_its_option() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"admin_port: {port} is in use on .*; choose another with --admin-port"):
            bind("127.0.0.1", port, prefix="admin_")
        with pytest.raises(ConfigError, match=f"^port: {port} is in use on .*; choose another with --port"):
            bind("127.0.0.1", port)


def test_a_servers_key_needs_the_scope() -> None:
    ring = KeyRing(arguments=["a-key-without-scope"])
    keys = AdminKeys(ADMIN_KEY, ring)
    own = keys.find([ADMIN_KEY.encode()])
    assert own is not None
    # Another name than that of the first key in OCTAVO_API_KEY, for the log.
    assert (own.name, own.scopes) == ("admin-1", {"admin"})
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
    with pytest.raises(ConfigError, match="admin_port: the admin listener needs a key; set OCTAVO_ADMIN_KEY"):
        AdminKeys(None, KeyRing())
    with pytest.raises(ConfigError, match="OCTAVO_ADMIN_KEY, key 1: the key is not 8 to 512"):
        AdminKeys("short", KeyRing(arguments=["some-long-key"]))
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
    assert "the model `m@v3` does not exist (did you mean `m@v" in wrong.json()["error"]["message"]
    assert "chat" in server.admin("GET", "aliases").json()["aliases"]


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("load", {}, 400, "model"),
        ("load", {"model": "nothing"}, 404, "`nothing` does not exist"),
        ("load", {"model": "nothing"}, 404, "add a path to load a new model"),
        ("load", {"model": 3}, 400, "model"),
        ("load", {"model": "x", "engine": {"max_num_seqs": 3}}, 400, "add its `path`"),
        ("load", {"model": "x", "path": "x", "engine": {"max_num_sqs": 3}}, 400, "max_num_sqs: there is no such"),
        ("load", {"model": "x", "path": "x", "engine": {"block_size": 7}}, 400, "block_size: 7"),
        ("load", {"model": "x", "path": "x", "engine": {"model": "y"}}, 400, "engine.model"),
        ("load", {"model": "x", "path": "x?fail=1"}, 422, "there is no 'x'"),
        ("load", {"model": "m@v1", "path": "other"}, 400, "has served another model"),
        ("load", {"model": "m@v1", "path": "m@v1", "engine": {"max_num_seqs": 3}}, 400, "is ready with other settings"),
        (
            "load",
            {"model": "x", "path": "x", "load_format": "dummy"},
            400,
            "load_format: this field does not exist; put set",
        ),
        ("load", {"model": "x", "paht": "x"}, 400, "paht: this field does not exist; did you mean `path`?"),
        (
            "unload",
            {"model": "m", "force": True},
            400,
            "force: this field does not exist; the fields are model",
        ),
        ("unload", {"model": "m", "timeout": -1}, 400, "timeout: -1"),
        ("unload", {"model": "m@v1", "remove": True}, 400, "`m` lead to `m@v1`"),
        ("swap", {"model": "m", "to": "m@v2", "path": "x?fail=1"}, 422, "there is no 'x'"),
        ("swap", {"model": "m", "to": "m@v9"}, 404, "`m@v9` does not exist"),
        ("swap", {"model": "m"}, 400, "to: missing"),
        ("swap", {"model": "m", "to": "slow", "pinned": True}, 400, "pinned: only a new model takes it"),
        ("swap", {"model": "m", "to": "m@v1", "path": "other"}, 400, "to: `m@v1` is already another model"),
        ("swap", {"model": "m", "to": "slow", "replace": "slow"}, 400, "replace: `m` has no model `slow`"),
        ("swap", [], 400, "object"),
    ],
)
def test_mistakes_change_nothing(server: Routed, path: str, body: Any, status: int, text: str) -> None:
    refused = server.admin("POST", f"models/{path}", body)
    assert (refused.status_code, refused.json()["error"]["type"]) == (status, "invalid_request_error")
    assert text in refused.json()["error"]["message"]
    assert server.ask("m").headers["x-model-version"] == "m@v1"
    assert server.registry.aliases == {"m": {"m@v1": 1}}
    assert states(server) == {"m@v1": "ready", "slow": "unloaded"}
    # Nobody can have it tried again by asking for it.
    attempts = len(server.engines.attempts)
    assert server.ask("x").status_code == 404
    assert len(server.engines.attempts) == attempts


def test_a_load_without_wait_shows_its_result_later(server: Routed) -> None:
    new = {"model": "new", "path": "x?load=0.2&fail=1", "wait": False}
    assert server.admin("POST", "models/load", new).json()["state"] == "loading"
    end = time.monotonic() + 10
    while (shown := server.admin("GET", "models/new").json())["state"] == "loading":
        assert time.monotonic() < end
        time.sleep(0.02)
    assert (shown["state"], shown["reason"]) == ("failed", "model: there is no 'x' in /secret")
    refused = server.ask("new")
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_unavailable")
    assert refused.headers["x-should-retry"] == "false"
    assert "could not be loaded" in refused.json()["error"]["message"]
    assert server.engines.attempts.count("x?load=0.2&fail=1") == 1
    assert server.admin("POST", "models/unload", {"model": "new", "remove": True, "wait": False}).status_code == 202
    assert states(server) == {"m@v1": "ready", "slow": "unloaded"}
    # One that fails at once is answered so, and leaves nothing.
    assert server.admin("POST", "models/load", {**new, "path": "x?fail=1"}).status_code == 422
    assert "new" not in states(server)


def test_a_swap_reports_kept_models_and_conflicts(server: Routed) -> None:
    server.admin("PUT", "aliases/stable", "m@v1")
    done = server.admin("POST", "models/swap", {"model": "m", "to": "m@v2", "path": "two"}).json()
    assert (done["to"], done["unloading"]) == ("m@v2", [])
    assert done["kept"] == [{"id": "m@v1", "aliases": ["stable"]}]
    with ThreadPoolExecutor(1) as pool:
        swap = pool.submit(server.admin, "POST", "models/swap", {"model": "m", "to": "slow"})
        while states(server)["slow"] != "loading":
            time.sleep(0.005)
        assert server.admin("PUT", "aliases/m", "m@v1").status_code == 200
        refused = swap.result()
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "conflict")
    assert server.ask("m").headers["x-model-version"] == "m@v1"


def test_shutdown_ends_loads_and_tells_waiting_commands(caplog: pytest.LogCaptureFixture) -> None:
    server = Routed("m@v1=m?delay=0.05", "~slow=slow?load=30")
    try:
        with ThreadPoolExecutor(4) as pool:
            answer = pool.submit(server.ask, "m", max_tokens=100)
            commands = [
                pool.submit(server.admin, "POST", "models/load", {"model": "slow"}),
                pool.submit(server.admin, "POST", "models/swap", {"model": "m", "to": "new", "path": "x?load=30"}),
            ]
            while states(server)["slow"] != "loading" or "new" not in states(server):
                time.sleep(0.005)
            server.state.draining = True
            late = server.admin("POST", "models/load", {"model": "slow"})
            assert (late.status_code, late.json()["error"]["code"]) == (503, "server_stopping")
            unload = pool.submit(server.admin, "POST", "models/unload", {"model": "m@v1"})
            while states(server)["m@v1"] != "draining":
                time.sleep(0.005)
            began = time.monotonic()
            server.loop.call_soon_threadsafe(server.state.refuse)
            for command in (*commands, unload):
                told = command.result()
                assert (told.status_code, told.json()["error"]["code"]) == (503, "server_stopping"), told.text
            assert time.monotonic() - began < 3
            # The answer that runs goes on.
            assert not answer.done()
            assert server.engines.loading == 0
            assert states(server) == {"m@v1": "draining", "slow": "unloaded"}
    finally:
        server.stop()


def test_unknown_paths_get_an_error_object(server: Routed) -> None:
    for method, path, status, code in (
        ("GET", "nothing", 404, "not_found"),
        ("POST", "models", 405, "method_not_allowed"),
        ("DELETE", "models/load", 405, "method_not_allowed"),
    ):
        refused = server.admin(method, path)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["type"]) == (status, code, "invalid_request_error")
        assert f"/admin/{path}" in error["message"]


def test_the_openapi_document_has_every_route(server: Routed) -> None:
    url = f"{server.admin_url}/openapi.json"
    assert httpx.get(url).status_code == 401
    described = httpx.get(url, headers={"Authorization": f"Bearer {ADMIN_KEY}"}).json()
    routes = {(method, path) for path, operations in described["paths"].items() for method in operations}
    assert {path for _, path in routes} == {
        "/admin/models", "/admin/models/load", "/admin/models/unload", "/admin/models/swap", "/admin/models/{id}",
        "/admin/aliases", "/admin/aliases/{name}", "/openapi.json",
    }  # fmt: skip
    assert {method for method, path in routes if path == "/admin/aliases/{name}"} == {"put", "delete"}
    load = described["paths"]["/admin/models/load"]["post"]
    assert load["summary"] == "Load a model"
    assert all(operation["summary"][0] != "/" for path in described["paths"].values() for operation in path.values())
    schema = load["requestBody"]["content"]["application/json"]["schema"]
    fields = described["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    assert set(fields["properties"]) == {"model", "path", "engine", "keep_alive", "pinned", "wait"}
    assert fields["required"] == ["model"]


def test_an_id_is_found_behind_an_alias_of_its_name(server: Routed) -> None:
    server.admin("POST", "models/load", {"model": "demo", "path": "one"})
    server.admin("POST", "models/swap", {"model": "demo", "path": "two", "wait": True})
    assert server.ask("demo").headers["x-model-version"] == "demo@2"
    # The one that it hides can be seen, loaded and removed; requests notice nothing.
    assert server.admin("GET", "models/demo").json()["id"] == "demo"
    assert server.admin("POST", "models/load", {"model": "demo"}).json()["id"] == "demo"
    assert server.admin("POST", "models/unload", {"model": "demo", "remove": True}).status_code == 200
    assert states(server) == {"m@v1": "ready", "slow": "unloaded", "demo@2": "ready"}
    assert server.ask("demo").headers["x-model-version"] == "demo@2"


def test_seconds_of_any_size(server: Routed) -> None:
    loaded = server.admin("POST", "models/load", {"model": "x", "path": "x", "keep_alive": 1e300})
    assert (loaded.status_code, loaded.json()["state"]) == (200, "ready"), loaded.text
    headers = {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Type": "application/json"}
    body = b'{"model":"x","keep_alive":1e999}'
    refused = httpx.post(f"{server.admin_url}/admin/models/load", content=body, headers=headers)
    assert refused.status_code == 400, refused.text


def test_the_log_names_models(server: Routed, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="octavo"):
        server.admin("POST", "models/load", {"model": "slow"})
        server.admin("POST", "models/swap", {"model": "m", "to": "slow", "wait": True})
        server.admin("POST", "models/load", {"model": "x", "path": "x?fail=1"})
        server.admin("PUT", "aliases/gpt", "slow")
        # A line is written when the answer is on its way.
        end = time.monotonic() + 5
        while sum(record.name == "octavo.access" for record in caplog.records) < 4 and time.monotonic() < end:
            time.sleep(0.01)
    assert re.search(r"the model slow is loaded \(0\.\d s\)", caplog.text)
    assert "the name m is switched from `m@v1` to `slow`" in caplog.text
    assert "the model m@v1 is unloaded" in caplog.text
    assert "the alias gpt leads to {'slow': 1}" in caplog.text
    lines = [record.fields for record in caplog.records if record.name == "octavo.access"]
    said = [(line["path"].rpartition("/")[2], line["status"], line["model"], line["error"]) for line in lines]
    assert said == [
        ("load", 200, "slow", None),
        ("swap", 200, "m", None),
        ("load", 422, "x", "model_error"),
        ("gpt", 200, None, None),
    ]


def test_bodies_of_web_pages_and_large_bodies_are_refused(server: Routed) -> None:
    headers = {"Authorization": f"Bearer {ADMIN_KEY}", "Content-Type": "text/plain"}
    refused = httpx.post(f"{server.admin_url}/admin/models/unload", content=b'{"model":"m"}', headers=headers)
    assert refused.status_code == 400
    headers["Content-Type"] = "application/json"
    large = httpx.post(f"{server.admin_url}/admin/models/unload", content=b" " * (2 << 20), headers=headers)
    assert large.status_code == 413
    assert server.engines.open == ["m@v1"]


@pytest.mark.parametrize("weight", ["1" + "0" * 400, "-1", "null", "true"])
def test_an_invalid_weight_is_refused(server: Routed, weight: str) -> None:
    refused = server.http.put(
        f"{server.admin_url}/admin/aliases/both",
        content=f'{{"m@v1": {weight}, "slow": 1}}',
        headers={"authorization": f"Bearer {ADMIN_KEY}", "content-type": "application/json"},
    )
    assert refused.status_code == 400
    assert "use 0 or more" in refused.json()["error"]["message"]
    assert len(refused.text) < 500


def test_a_client_that_leaves_amid_a_command_is_not_an_error(server: Routed, caplog: pytest.LogCaptureFixture) -> None:
    port = int(server.admin_url.rpartition(":")[2])
    head = f"host: localhost\r\nauthorization: Bearer {ADMIN_KEY}\r\ncontent-type: application/json\r\n"
    with caplog.at_level(logging.INFO):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(f"POST /admin/models/load HTTP/1.1\r\n{head}content-length: 100\r\n\r\n{{".encode())
        deadline = time.monotonic() + 10
        while not (told := [record for record in caplog.records if record.name == "octavo.access"]):
            assert time.monotonic() < deadline
            time.sleep(0.01)
    (record,) = told
    assert (record.fields["status"], record.fields["disconnected"]) == (499, True)  # type: ignore[attr-defined]
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
