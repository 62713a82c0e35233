"""TLS, with certificates made here."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from octavo.errors import ConfigError
from octavo.server.hosts import tls_context
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
    context = tls_context(certificate, key, None)
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


def test_files_that_cannot_be_used(tmp_path: Path, certificates: dict[str, tuple[str, str]]) -> None:
    certificate, key = certificates["server"]
    with pytest.raises(ConfigError, match="ssl_certfile: is missing"):
        tls_context(None, key, None)
    with pytest.raises(ConfigError, match=r"ssl_certfile: .* cannot be used"):
        tls_context(certificate, certificates["client"][1], None)
    with pytest.raises(ConfigError, match=r"ssl_certfile: .* cannot be used"):
        tls_context(str(tmp_path / "none"), None, None)
    with pytest.raises(ConfigError, match=r"ssl_ca_certs: .* cannot be used"):
        tls_context(certificate, key, str(tmp_path / "none"))
    # A key behind a password is refused, not asked for on a terminal.
    locked = tmp_path / "locked.key"
    command = ["openssl", "ec", "-in", key, "-aes256", "-passout", "pass:word", "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    with pytest.raises(ConfigError, match="cannot be used"):
        tls_context(certificate, str(locked), None)
    assert tls_context(certificate, str(locked), None, "word") is not None
