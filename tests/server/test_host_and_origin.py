"""Host check, origin check, and exposure to other machines."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Callable
from typing import Any

import pytest
from octavo.errors import ConfigError
from octavo.server.access.api_keys import KeyRing
from octavo.server.access.hosts import allowed_hosts, check_exposure, check_settings
from octavo.server.settings import ServerSettings
from server_fakes import FakeEngine, answer
from server_harness import Running

KEY = "a-secret-key"
PAGE = "https://chat.example.com"


def status_of(server: Running, head: bytes) -> tuple[int, bytes]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as connection:
        connection.sendall(head + b"Connection: close\r\n\r\n")
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    return int(received.split()[1]), received.partition(b"\r\n\r\n")[2]


def get(server: Running, host: str, path: str = "/v1/models") -> int:
    return status_of(server, f"GET {path} HTTP/1.1\r\nHost: {host}\r\n".encode("latin-1"))[0]


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "LOCALHOST:8000", "localhost.", "sub.localhost", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:8000",
        "10.1.2.3:8000", "192.168.0.1", "[fe80::1]", socket.gethostname(),
    ],
)  # fmt: skip
def test_names_of_this_machine(start: Callable[..., Running], host: str) -> None:
    assert get(start(allowed_hosts=()), host) == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example.com", "evil.example.com:8000", "localhost.evil.com", "127.0.0.1.evil.com", "evillocalhost",
        "localhost@evil.com", "localhost, evil.com", "localhost:80:80", "localhost evil.com", "", "[::1", "a/b", "\xff",
        "127.1.evil", "xn--lcalhost-m1a", "0x7f.1.evil", "localhost:99999999",
    ],
)  # fmt: skip
def test_a_rebound_host_name_is_refused(start: Callable[..., Running], host: str) -> None:
    server = start(allowed_hosts=())
    for path in ("/v1/models", "/metrics", "/nothing", "/health"):
        assert get(server, host, path) in (400, 403), path
    status, body = status_of(server, b"POST /v1/completions HTTP/1.1\r\nHost: evil.com\r\nContent-Length: 0\r\n")
    assert (status, json.loads(body)["error"]["code"]) == (403, "host_not_allowed")
    assert "--allowed-hosts" in json.loads(body)["error"]["message"]


def test_exactly_one_host_header(start: Callable[..., Running]) -> None:
    server = start(allowed_hosts=())
    assert status_of(server, b"GET /v1/models HTTP/1.1\r\n")[0] in (400, 403)
    assert status_of(server, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n")[0] in (400, 403)
    assert status_of(server, b"GET /v1/models HTTP/1.0\r\n")[0] == 200


def test_named_hosts(start: Callable[..., Running]) -> None:
    server = start(allowed_hosts=("llm.example.com", "*.corp.example"))
    assert get(server, "llm.example.com:443") == 200
    assert get(server, "LLM.Example.Com") == 200
    assert get(server, "a.b.corp.example") == 200
    assert get(server, "corp.example") == 403
    assert get(server, "evilcorp.example") == 403
    assert get(server, "x.llm.example.com") == 403
    assert get(server, "127.0.0.1") == 200


def test_default_hosts_of_a_public_server() -> None:
    # Keys guard what a page of a rebound name would not have; without keys the names still count.
    assert allowed_hosts((), "0.0.0.0", has_keys=True) == ("*",)
    assert "*" not in allowed_hosts((), "0.0.0.0", has_keys=False)
    assert "*" not in allowed_hosts((), "127.0.0.1", has_keys=True)
    assert "*" not in allowed_hosts((), "localhost", has_keys=True)
    assert allowed_hosts(("A.example.",), "0.0.0.0", has_keys=True) == ("a.example",)
    with pytest.raises(ConfigError, match="allowed_hosts"):
        allowed_hosts(("http://x",), "127.0.0.1", has_keys=False)


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "10.0.0.1", "192.168.1.2", "fe80::1%eth0", "8.8.8.8"])
def test_a_public_address_needs_keys(address: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_exposure(address, has_keys=False, insecure=False)
    assert "--api-key-file" in str(caught.value)
    assert "--insecure" in str(caught.value)
    check_exposure(address, has_keys=True, insecure=False)
    check_exposure(address, has_keys=False, insecure=True)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.8.8", "::1"])
def test_a_loopback_address_needs_no_keys(address: str) -> None:
    check_exposure(address, has_keys=False, insecure=False)


# ---------------------------------------------------------------- other origins


def ask(server: Running, method: str, path: str, headers: dict[str, str], body: bytes | None = None) -> Any:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request(method, path, body, headers)
    found = connection.getresponse()
    found.text = found.read()  # type: ignore[attr-defined]
    connection.close()
    return found


PREFLIGHT = {
    "Origin": PAGE,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def test_other_origins_are_refused_by_default(server: Running) -> None:
    found = ask(server, "OPTIONS", "/v1/chat/completions", PREFLIGHT)
    assert found.status == 405
    assert not [name for name, _ in found.getheaders() if name.lower().startswith("access-control")]
    found = ask(server, "GET", "/v1/models", {"Origin": PAGE})
    assert found.getheader("access-control-allow-origin") is None


def test_a_named_origin(start: Callable[..., Running]) -> None:
    server = start(keys=KeyRing(arguments=[KEY]), allowed_origins=(PAGE,))
    # A browser sends no key with its question.
    found = ask(server, "OPTIONS", "/v1/chat/completions", PREFLIGHT)
    assert found.status == 200
    assert found.getheader("access-control-allow-origin") == PAGE
    assert "POST" in found.getheader("access-control-allow-methods")
    assert "authorization" in found.getheader("access-control-allow-headers").lower()
    assert found.getheader("access-control-allow-credentials") is None
    # What looks like one and is none does need it.
    assert ask(server, "OPTIONS", "/v1/chat/completions", {"Origin": PAGE}).status == 401
    assert ask(server, "OPTIONS", "/v1/chat/completions", PREFLIGHT | {"Origin": "https://evil.com"}).status == 400
    found = ask(server, "GET", "/v1/models", {"Origin": PAGE, "Authorization": f"Bearer {KEY}"})
    assert (found.status, found.getheader("access-control-allow-origin")) == (200, PAGE)
    # The page can read why it was refused.
    found = ask(server, "GET", "/v1/models", {"Origin": PAGE})
    assert (found.status, found.getheader("access-control-allow-origin")) == (401, PAGE)
    found = ask(server, "GET", "/v1/models", {"Origin": "https://evil.com", "Authorization": f"Bearer {KEY}"})
    assert found.getheader("access-control-allow-origin") is None


def test_a_stream_to_another_origin_is_not_buffered(start: Callable[..., Running]) -> None:
    server = start(FakeEngine(delay=0.05), allowed_origins=(PAGE,))
    body = json.dumps({"prompt": "Hi", "max_tokens": 40, "stream": True}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("POST", "/v1/completions", body, {"Origin": PAGE, "Content-Type": "application/json"})
    found = connection.getresponse()
    assert found.getheader("access-control-allow-origin") == PAGE
    first = found.readline()
    assert json.loads(first.removeprefix(b"data: "))["choices"][0]["text"] == answer(1)
    assert server.engine.generated < 20
    connection.close()


def test_origins_and_credentials() -> None:
    with pytest.raises(ConfigError, match="allow_credentials"):
        check_settings(ServerSettings(allowed_origins=("*",), allow_credentials=True), has_keys=False)
