"""API keys: access to every route, and the sources of keys."""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from octavo.errors import ConfigError
from octavo.server.access import api_keys as auth
from octavo.server.access.api_keys import ApiKey, KeyRing, parse_keys
from octavo.server.app import create_app
from octavo.server.state import ServerState
from server_harness import Running
from starlette.routing import Mount, Route

ALICE, BOB = "alice-secret-1", "bob-secret-22"
OPEN = {"/health", "/livez", "/readyz", "/ping"}


def routes() -> list[tuple[str, str]]:
    """Every method and path of the application."""
    application: Any = create_app(ServerState())
    while not hasattr(application, "routes"):
        application = application.app
    found: list[tuple[str, str]] = []
    for route in application.routes:
        assert isinstance(route, Route), f"{route} needs a test of its own"
        assert not isinstance(route, Mount)
        path = re.sub(r"\{[^}]*\}", "fake", route.path)
        found += [(method, path) for method in sorted(route.methods or {"GET", "POST"})]
    return found


ROUTES = routes()


def ask(
    server: Running, method: str, path: str, headers: dict[str, str] | None = None, body: bytes | None = b"{}"
) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request(method, path, body, {"Content-Type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
    finally:
        connection.close()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def guarded(start: Callable[..., Running]) -> Running:
    return start(keys=KeyRing(environment=f"{ALICE}, {BOB}"))


def test_there_are_routes_to_protect() -> None:
    paths = {path for _, path in ROUTES}
    assert {"/v1/chat/completions", "/v1/models", "/v1/models/fake", "/metrics", "/health"} <= paths


def test_every_route_but_health_needs_a_key(guarded: Running) -> None:
    wrong = [
        {},
        bearer("wrong-secret-1"),
        bearer(ALICE[:-1]),
        bearer(ALICE + "x"),
        bearer(""),
        {"Authorization": ALICE},
        {"Authorization": f"Basic {ALICE}"},
        {"X-Api-Key": "wrong-secret-1"},
    ]
    for method, path in ROUTES:
        for headers in wrong if path == "/v1/chat/completions" else wrong[:2]:
            status, answered, body = ask(guarded, method, path, headers)
            if path in OPEN:
                assert status != 401, (method, path)
                continue
            assert status == 401, (method, path, headers)
            assert answered["www-authenticate"] == "Bearer"
            assert answered["x-request-id"]
            if method != "HEAD":
                error = json.loads(body)["error"]
                assert (error["type"], error["code"], error["param"]) == (
                    "authentication_error",
                    "invalid_api_key",
                    None,
                )
    assert guarded.engine.prompts == []


@pytest.mark.parametrize(
    "path",
    [
        "/", "/nothing", "/health/", "/health/x", "//health", "/Health", "/v1/../health", "/health%2f..%2fv1%2fmodels",
        "/health;/v1/models", "/v1/models/health", "/metrics", "/livez/../metrics", "/docs", "/openapi.json",
    ],
)  # fmt: skip
def test_unknown_paths_need_a_key(guarded: Running, path: str) -> None:
    for method in ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE"):
        assert ask(guarded, method, path)[0] == 401, method


def test_health_needs_no_key(guarded: Running) -> None:
    assert ask(guarded, "GET", "/health", body=None)[0] == 200
    # A wrong one does no harm there.
    assert ask(guarded, "GET", "/health", bearer("wrong-secret-1"), body=None)[0] == 200


@pytest.mark.parametrize("key", [ALICE, BOB])
@pytest.mark.parametrize("header", ["Authorization: Bearer ", "authorization: bearer ", "X-Api-Key: ", "x-api-key: "])
def test_either_key_in_either_header(guarded: Running, key: str, header: str) -> None:
    name, prefix = header.split(": ")
    assert ask(guarded, "GET", "/v1/models", {name: prefix + key}, None)[0] == 200


def test_the_openai_package(guarded: Running) -> None:
    with openai.OpenAI(base_url=f"{guarded.url}/v1", api_key=BOB, max_retries=0) as client:
        assert client.models.list().data
    wrong = openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong-secret-1", max_retries=0)
    with wrong as client, pytest.raises(openai.AuthenticationError) as caught:
        client.models.list()
    assert caught.value.code == "invalid_api_key"


def test_without_keys_no_key_is_needed(server: Running) -> None:
    assert ask(server, "GET", "/v1/models", body=None)[0] == 200
    assert ask(server, "GET", "/v1/models", bearer("anything-at-all"), None)[0] == 200


def test_scopes(start: Callable[..., Running], tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        f"scraper {ALICE} scopes=metrics\nadmin {BOB} scopes=admin\nboth both-secret-3 scopes=inference,admin\n"
    )
    file.chmod(0o600)
    server = start(keys=KeyRing(file))
    assert ask(server, "GET", "/metrics", bearer(ALICE), None)[0] == 200
    status, _, body = ask(server, "GET", "/v1/models", bearer(ALICE), None)
    assert (status, json.loads(body)["error"]["code"]) == (403, "insufficient_scope")
    assert ask(server, "GET", "/v1/models", bearer(BOB), None)[0] == 403
    assert ask(server, "GET", "/v1/models", bearer("both-secret-3"), None)[0] == 200


def test_public_metrics(start: Callable[..., Running]) -> None:
    server = start(keys=KeyRing(arguments=[ALICE]), metrics_public=True)
    assert ask(server, "GET", "/metrics", body=None)[0] == 200
    assert ask(server, "GET", "/v1/models", body=None)[0] == 401


def test_a_refused_body_is_not_read_to_its_end(guarded: Running) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", guarded.port, timeout=10)
    connection.putrequest("POST", "/v1/completions")
    connection.putheader("Content-Length", str(1 << 40))
    connection.endheaders(b"x" * 1000)
    answer = connection.getresponse()
    assert answer.status == 401
    assert connection.sock is not None
    with pytest.raises(ConnectionError):
        connection.sock.sendall(b"x" * (1 << 28))
    connection.close()


def test_a_root_path_needs_keys_too(start: Callable[..., Running]) -> None:
    server = start(keys=KeyRing(arguments=[ALICE]), root_path="/llm")
    assert ask(server, "GET", "/health", body=None)[0] == 200
    assert ask(server, "GET", "/v1/models", body=None)[0] == 401
    assert ask(server, "GET", "/v1/models", bearer(ALICE), None)[0] == 200


# ---------------------------------------------------------------- comparison


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = KeyRing(environment=",".join(f"secret-number-{number}" for number in range(20)))
    compared: list[tuple[bytes, bytes]] = []

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return hmac.compare_digest(left, right)

    class Spy:
        compare_digest = staticmethod(compare)

    monkeypatch.setattr(auth, "hmac", Spy)
    # The first, the last and none take the same comparisons, of digests and never of the keys.
    for key in (b"secret-number-0", b"secret-number-19", b"secret-number-x"):
        compared.clear()
        keys.find([key])
        assert [left for left, _ in compared] == [hashlib.sha256(key).digest()] * 20


def test_keys_are_not_kept() -> None:
    keys = KeyRing(environment=ALICE, arguments=[BOB])
    assert ALICE not in repr(keys) + repr(vars(keys))
    assert BOB not in repr(keys) + repr(vars(keys))


# ---------------------------------------------------------------- reading keys


def test_a_key_file() -> None:
    digest = hashlib.sha256(b"hashed-secret").hexdigest()
    alice, carol = parse_keys(
        f"# team A\nalice {ALICE} tenant=a priority=high max_concurrency=3\n\n"
        f"  carol\tsha256:{digest}  scopes=admin,metrics \n",
        "keys",
    )
    assert alice.digest == hashlib.sha256(ALICE.encode()).digest()
    assert (alice.identity.name, alice.identity.tenant, alice.identity.max_concurrency) == ("alice", "a", 3)
    assert (alice.identity.priority, alice.identity.best_priority) == ("high", "high")
    assert alice.identity.scopes == {"inference"}
    assert carol.digest == bytes.fromhex(digest)
    assert (carol.identity.tenant, carol.identity.priority) == ("carol", "normal")
    assert carol.identity.scopes == {"admin", "metrics"}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("alice", "line 1: the key is missing"),
        ("# x\nalice short", "line 2: the key is not 8 to 512"),
        ("al/ice secret-enough", "line 1: the name"),
        ("alice sha256:12", "64 hex digits"),
        ("alice secret-enough priority=urgent", "option 1 is unknown or has an invalid value"),
        ("alice secret-enough max_concurrency=0", "option 1 is unknown or has an invalid value"),
        ("alice secret-enough max_concurrency=-1", "option 1 is unknown or has an invalid value"),
        ("alice secret-enough scopes=", "option 1 is unknown or has an invalid value"),
        ("alice secret-enough scopes=all", "option 1 is unknown or has an invalid value"),
        ("alice secret-enough tenant=a tenant=b", "given twice"),
        ("alice secret-enough other-secret", "not `OPTION=VALUE`"),
        ("alice secret-enough\nalice other-secret", "a name is given twice (see 'alice')"),
        ("alice secret-enough\nbob secret-enough", "a key is given twice (see 'bob')"),
        ("\n".join(f"k{number} secret-{number:06}" for number in range(1001)), "1001 keys are too many"),
    ],
)
def test_an_invalid_line_is_named_but_not_shown(text: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_keys(text, "keys")
    assert said in str(caught.value)
    assert "secret-enough" not in str(caught.value)
    assert "other-secret" not in str(caught.value)


def test_a_file_without_keys(tmp_path: Path) -> None:
    for make, said in (
        (lambda: KeyRing(tmp_path / "none"), "cannot be read"),
        (lambda: KeyRing(tmp_path), "cannot be read"),
        (lambda: KeyRing(written(tmp_path / "empty", "# nothing\n")), "no key was found"),
        (lambda: KeyRing(written(tmp_path / "long", "#" * (1 << 20) + "\n")), "is longer"),
        (lambda: KeyRing(environment="short"), "OCTAVO_API_KEY, key 1"),
        (lambda: KeyRing(environment=" , "), "OCTAVO_API_KEY: no key was found"),
        (lambda: KeyRing(environment=ALICE, arguments=[ALICE]), "a key is given twice"),
    ):
        with pytest.raises(ConfigError, match=said):
            make()


def written(file: Path, text: str) -> Path:
    file.write_text(text)
    file.chmod(0o600)
    return file


def test_a_world_readable_file_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = written(tmp_path / "keys", f"alice {ALICE}\n")
    KeyRing(file)
    assert not caplog.records
    file.chmod(0o644)
    KeyRing(file)
    assert "chmod 600" in caplog.text


# ---------------------------------------------------------------- reading them again


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("text", ["", "# none\n"])
@pytest.mark.parametrize("environment", [None, "env-secret-1"])
def test_a_file_that_is_emptied_revokes_the_last_key(
    start: Callable[..., Running], tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str, environment: str | None
) -> None:
    file = written(tmp_path / "keys", f"alice {ALICE}\n")
    server = start(keys=KeyRing(file, environment=environment))

    def status(headers: dict[str, str]) -> int:
        return ask(server, "GET", "/v1/models", headers, None)[0]

    assert status(bearer(ALICE)) == 200
    written(file, text)
    wait_for(lambda: status(bearer(ALICE)) == 401)
    # Nobody gets in, and certainly not everybody.
    assert status({}) == status(bearer("")) == status(bearer(BOB)) == 401
    assert status(bearer("env-secret-1")) == (200 if environment else 401)
    (line,) = [record for record in caplog.records if "is empty now" in record.getMessage()]
    assert line.levelname == "ERROR"
    assert ("all requests are refused" in line.getMessage()) == (environment is None)
    written(file, f"bob {BOB}\n")
    wait_for(lambda: status(bearer(BOB)) == 200)
    assert status(bearer(ALICE)) == 401


def test_a_file_that_is_rewritten_revokes_no_key(tmp_path: Path) -> None:
    """`generate > keys` empties the file before there is anything to write to it."""
    file = written(tmp_path / "keys", f"alice {ALICE}\n")
    ring = KeyRing(file)
    written(file, "")
    assert not ring.reload()
    assert ring.find([ALICE.encode()])
    written(file, f"bob {BOB}\n")
    assert ring.reload()
    assert not ring.find([ALICE.encode()])
    assert ring.find([BOB.encode()])
    # And once more: each emptiness is looked at twice.
    written(file, "")
    assert not ring.reload()
    assert ring.reload()
    assert not ring.reload()
    assert ring.required
    assert not ring.find([BOB.encode(), b""])


def test_another_process_starts_while_the_file_is_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    file = written(tmp_path / "keys", "")
    ring = KeyRing(file, follows=True)
    assert ring.required
    assert not ring.find([b""])
    written(file, f"bob {BOB}\n")
    assert ring.reload()
    assert ring.find([BOB.encode()])
    # The first process says it.
    assert not caplog.records


def test_an_unreadable_file_is_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was replaced and only then made readable has not changed since."""
    file = written(tmp_path / "keys", f"alice {ALICE}\n")
    ring = KeyRing(file)
    written(file, f"bob {BOB}\n")
    with monkeypatch.context() as patch:

        def refuse(_ring: KeyRing) -> list[ApiKey]:
            raise ConfigError("api_key_file: cannot be read")

        patch.setattr(KeyRing, "_read", refuse)
        assert not ring.reload()
        assert ring.find([ALICE.encode()]) is not None
    assert ring.reload()
    assert ring.find([ALICE.encode()]) is None
    assert ring.find([BOB.encode()]) is not None
    assert not ring.reload()


def test_the_file_is_read_again_when_it_changes(
    start: Callable[..., Running], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = KeyRing.watch
    monkeypatch.setattr(KeyRing, "watch", lambda self: original(self, 0.02))
    file = written(tmp_path / "keys", f"alice {ALICE}\n")
    server = start(keys=KeyRing(file, environment="env-secret-1"))

    def opens(key: str) -> bool:
        return ask(server, "GET", "/v1/models", bearer(key), None)[0] == 200

    assert (opens(ALICE), opens(BOB), opens("env-secret-1")) == (True, False, True)
    # Replaced, as editors and secret mounts do.
    written(tmp_path / "new", f"bob {BOB}\n").replace(file)
    wait_for(lambda: opens(BOB))
    assert (opens(ALICE), opens("env-secret-1")) == (False, True)

    # A broken file and none at all leave the keys as they are.
    for break_file in (lambda: written(file, "bob"), file.unlink):
        caplog.clear()
        break_file()
        wait_for(lambda: "the API keys are unchanged" in caplog.text)
        assert (opens(ALICE), opens(BOB)) == (False, True)
        assert BOB not in caplog.text
    written(file, f"alice {ALICE}\n")
    wait_for(lambda: opens(ALICE))
    assert not opens(BOB)


def test_concurrent_reloads_do_not_restore_removed_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("one the-first-key\n")
    file.chmod(0o600)
    ring = KeyRing(file)
    file.write_text("two the-second-key\n")
    read, released, has_read = KeyRing._read, threading.Event(), threading.Event()

    def slow(self: KeyRing) -> Any:
        found = read(self)
        if not has_read.is_set():
            has_read.set()
            released.wait(20)
        return found

    monkeypatch.setattr(KeyRing, "_read", slow)
    first = threading.Thread(target=ring.reload)
    first.start()
    assert has_read.wait(20)
    file.write_text("three the-third-key\n")
    second = threading.Thread(target=ring.reload)
    second.start()
    second.join(0.2)
    released.set()
    for thread in (first, second):
        thread.join(20)
    assert ring.find([b"the-second-key"]) is None
    identity = ring.find([b"the-third-key"])
    assert identity is not None
    assert identity.name == "three"
