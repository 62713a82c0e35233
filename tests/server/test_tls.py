"""TLS with certificates made by openssl."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from octavo.errors import ConfigError
from octavo.server.settings import ServerSettings
from octavo.server.transport.tls import tls_context, watch_certificate
from server_harness import Running

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


def make_certificate(folder: Path, name: str) -> tuple[str, str]:
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
        "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1", "-out", str(certificate),
        "-keyout", str(key),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return str(certificate), str(key)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    folder = tmp_path_factory.mktemp("certificates")
    return {name: make_certificate(folder, name) for name in ("server", "client", "stranger")}


def read(server: Running, context: ssl.SSLContext, path: str = "/v1/models") -> bytes:
    with urllib.request.urlopen(f"https://127.0.0.1:{server.port}{path}", timeout=10, context=context) as found:
        body: bytes = found.read()
    return body


def test_https(start: Callable[..., Running], certificates: dict[str, tuple[str, str]]) -> None:
    certificate, key = certificates["server"]
    server = start(ssl_certfile=certificate, ssl_keyfile=key)
    trusting = ssl.create_default_context(cafile=certificate)
    assert json.loads(read(server, trusting))["data"]
    with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
        read(server, ssl.create_default_context())
    # A stream, through the connection's short way too.
    body = json.dumps({"prompt": "Hi", "max_tokens": 20, "stream": True}).encode()
    request = urllib.request.Request(
        f"https://127.0.0.1:{server.port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=10, context=trusting) as found:
        text = found.read().decode()
    assert text.count("data: ") == 21
    assert text.endswith("data: [DONE]\n\n")


def test_old_versions_are_refused(start: Callable[..., Running], certificates: dict[str, tuple[str, str]]) -> None:
    certificate, key = certificates["server"]
    context = tls_context(ServerSettings(ssl_certfile=certificate, ssl_keyfile=key))
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_2
    server = start(ssl_certfile=certificate, ssl_keyfile=key)
    # openssl speaks what Python's own client may have been built without.
    done = subprocess.run(
        ["openssl", "s_client", "-connect", f"127.0.0.1:{server.port}", "-tls1_1", "-cipher", "ALL@SECLEVEL=0"],
        input=b"", capture_output=True, timeout=20, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    done = subprocess.run(
        ["openssl", "s_client", "-connect", f"127.0.0.1:{server.port}", "-tls1_2"],
        input=b"", capture_output=True, timeout=20, check=False,
    )  # fmt: skip
    assert done.returncode == 0


def test_clients_with_certificates(start: Callable[..., Running], certificates: dict[str, tuple[str, str]]) -> None:
    certificate, key = certificates["server"]
    server = start(ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=certificates["client"][0])
    known = ssl.create_default_context(cafile=certificate)
    known.load_cert_chain(*certificates["client"])
    assert json.loads(read(server, known))["data"]
    for client in (None, "stranger"):
        other = ssl.create_default_context(cafile=certificate)
        if client is not None:
            other.load_cert_chain(*certificates[client])
        with pytest.raises(OSError):
            read(server, other)


def test_a_certificate_is_renewed_while_the_server_runs(
    certificates: dict[str, tuple[str, str]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    certificate, key = tmp_path / "live.pem", tmp_path / "live.key"
    shutil.copy(certificates["server"][0], certificate)
    shutil.copy(certificates["server"][1], key)
    settings = ServerSettings(ssl_certfile=str(certificate), ssl_keyfile=str(key))
    context = tls_context(settings)
    assert context is not None

    async def shown() -> str:
        """Which certificate a new connection gets."""
        server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=context)
        async with server:
            port = server.sockets[0].getsockname()[1]
            pem = await asyncio.to_thread(ssl.get_server_certificate, ("127.0.0.1", port))
        (name,) = (name for name, (file, _) in certificates.items() if pem.strip() == Path(file).read_text().strip())
        return name

    async def until(condition: Callable[[], bool]) -> None:
        for _ in range(500):
            if condition():
                return
            await asyncio.sleep(0.01)
        raise AssertionError("it does not come")

    async def main() -> None:
        watching = asyncio.ensure_future(watch_certificate([context], settings, 0.02))
        await asyncio.sleep(0.1)
        assert await shown() == "server"
        # Half of a pair: the old one stays, whole.
        shutil.copy(certificates["stranger"][0], certificate)
        await until(lambda: "the old certificate stays in use" in caplog.text)
        assert await shown() == "server"
        key.unlink()
        await asyncio.sleep(0.1)
        assert await shown() == "server"
        shutil.copy(certificates["stranger"][1], key)
        await until(lambda: "is in use" in caplog.text)
        assert await shown() == "stranger"
        assert not watching.done()
        watching.cancel()

    with caplog.at_level(logging.INFO, "octavo.server"):
        asyncio.run(main())


def test_files_that_cannot_be_used(tmp_path: Path, certificates: dict[str, tuple[str, str]]) -> None:
    certificate, key = certificates["server"]
    with pytest.raises(ConfigError, match="ssl_certfile: a certificate is missing"):
        tls_context(ServerSettings(ssl_keyfile=key))
    with pytest.raises(ConfigError, match=r"ssl_certfile: .* cannot be used"):
        tls_context(ServerSettings(ssl_certfile=certificate, ssl_keyfile=certificates["client"][1]))
    with pytest.raises(ConfigError, match=r"ssl_certfile: .* cannot be used"):
        tls_context(ServerSettings(ssl_certfile=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match=r"ssl_ca_certs: .* cannot be used"):
        tls_context(ServerSettings(ssl_certfile=certificate, ssl_keyfile=key, ssl_ca_certs=str(tmp_path / "none")))
    # A key behind a password is refused, not asked for on a terminal.
    locked = tmp_path / "locked.key"
    command = ["openssl", "ec", "-in", key, "-aes256", "-passout", "pass:word", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    with pytest.raises(ConfigError, match="cannot be used"):
        tls_context(ServerSettings(ssl_certfile=certificate, ssl_keyfile=str(locked)))
    assert (
        tls_context(ServerSettings(ssl_certfile=certificate, ssl_keyfile=str(locked), ssl_keyfile_password="word"))
        is not None
    )
