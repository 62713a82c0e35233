"""Whom the server lets ask, judged before any key: the Host header, cross-origin pages, and who can reach the port."""

from __future__ import annotations

import ipaddress
import re
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING

from octavo.errors import ConfigError
from octavo.server.access.refusal import refuse
from octavo.server.error_responses import HostNotAllowed, MalformedRequest
from octavo.server.settings import ServerSettings
from octavo.server.transport.http import Receive, Scope, Send

if TYPE_CHECKING:
    # Imported where it is used: a command takes its settings before it starts the engine, and is to be quick.
    from starlette.middleware import Middleware

__all__ = [
    "HostCheck",
    "allowed_hosts",
    "check_certificate",
    "check_exposure",
    "check_settings",
    "cross_origin",
    "is_loopback",
    "tls_context",
]

_AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach a numeric address."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def check_exposure(address: str, *, has_keys: bool, insecure: bool) -> None:
    """Refuse to listen where other machines can ask, unless a key guards or it is said that none is wanted.

    Args:
        address: numeric, as bound.
        has_keys: requests need a key.
        insecure: answer anyone.

    Raises:
        ConfigError: saying what to do.
    """
    if has_keys or insecure or is_loopback(address):
        return
    raise ConfigError(
        f"host: {address} can be reached from other machines, and no API key is set, so anyone could use the model; "
        "give keys (--api-key-file FILE, or OCTAVO_API_KEY in the environment), listen on 127.0.0.1, or say --insecure"
    )


def allowed_hosts(given: Sequence[str], bound: str, *, has_keys: bool) -> tuple[str, ...]:
    """The names a Host header may carry, besides addresses and loopback names; `*` allows any.

    A page whose name was made to resolve to this server could otherwise read answers as if they were its own. Where
    the server is meant for other machines and asks for keys, such a page has none, and any name is allowed.

    Args:
        given: `--allowed-hosts`; empty for the default.
        bound: the host that the server listens on, as it was given.
        has_keys: requests need a key.

    Raises:
        ConfigError: a name that is none.
    """
    for name in given:
        if name != "*" and not _AUTHORITY.fullmatch(name.removeprefix("*.")):
            raise ConfigError(
                f"allowed_hosts: {name!r} is no host name; give such as llm.example.com, *.example.com or *"
            )
    if given:
        return tuple(name.lower().rstrip(".") for name in given)
    if has_keys and not (bound == "localhost" or is_loopback(bound)):
        return ("*",)
    own = {bound.lower(), socket.gethostname().lower()}
    return tuple(sorted(name for name in own if name and not name.startswith("*")))


def _is_address(name: str) -> bool:
    # A name that is an address is resolved by nobody, so nobody can rebind it.
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


class HostCheck:
    """Refuses requests whose Host header names another server; ASGI.

    Args:
        app: what lies behind.
        allowed: from `allowed_hosts`.
    """

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]], allowed: Sequence[str]) -> None:
        self._app = app
        self._any = "*" in allowed
        self._names = frozenset(name for name in allowed if not name.startswith("*")) | {"localhost"}
        self._endings = (".localhost", *(name[1:] for name in allowed if name.startswith("*.")))
        # Clients say the same few names again and again.
        self._known: dict[bytes, bool] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "http":
            hosts = [value for name, value in scope["headers"] if name == b"host"]
            if len(hosts) > 1 or (not hosts and scope["http_version"] != "1.0"):
                await refuse(scope, send, MalformedRequest("The request must have one Host header."))
                return
            if hosts and not self._is_allowed(hosts[0]):
                shown = hosts[0][:100].decode("ascii", "replace")
                await refuse(
                    scope,
                    send,
                    HostNotAllowed(
                        f"The host {shown!a} is not served here; the server's --allowed-hosts names those that are"
                    ),
                )
                return
        await self._app(scope, receive, send)

    def _is_allowed(self, host: bytes) -> bool:
        known = self._known.get(host)
        if known is None:
            known = self._judge(host.decode("latin-1"))
            if len(self._known) < 1000 and len(host) < 300:
                self._known[host] = known
        return known

    def _judge(self, host: str) -> bool:
        found = _AUTHORITY.fullmatch(host)
        if not found:
            return False
        if self._any:
            return True
        name = found.group(1).lower().rstrip(".")
        return _is_address(name) or name in self._names or name.endswith(self._endings)


def cross_origin(
    origins: Sequence[str], methods: Sequence[str], headers: Sequence[str], *, credentials: bool
) -> list[Middleware]:
    """What answers pages of other origins: nothing unless origins are named.

    Raises:
        ConfigError: every origin together with credentials.
    """
    if not origins:
        return []
    if credentials and "*" in origins:
        raise ConfigError("allow_credentials: together with allowed_origins * would let any page use a user's login")
    from starlette.middleware import Middleware
    from starlette.middleware.cors import CORSMiddleware

    return [
        Middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=list(methods),
            allow_headers=list(headers),
            allow_credentials=credentials,
            expose_headers=["X-Request-Id", "Retry-After", "X-Model-Version"],
        )
    ]


def check_settings(settings: ServerSettings, *, has_keys: bool) -> None:
    """Refuse settings that would only fail once the server is made, after a model was loaded for nothing.

    Raises:
        ConfigError: whatever the machine; its files are left to `check_certificate`.
    """
    allowed_hosts(settings.allowed_hosts, settings.host, has_keys=has_keys)
    cross_origin(
        settings.allowed_origins,
        settings.allowed_methods,
        settings.allowed_headers,
        credentials=settings.allow_credentials,
    )
    if settings.ssl_certfile is None:
        check_certificate(settings)
    if settings.otlp_traces_endpoint is not None:
        from octavo.server.observability.spans import traces_url

        traces_url(settings.otlp_traces_endpoint)


def check_certificate(settings: ServerSettings) -> None:
    """Read the files of TLS, for the same reason.

    Raises:
        ConfigError: as `tls_context`.
    """
    tls_context(settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs, settings.ssl_keyfile_password)


def tls_context(
    certfile: str | None, keyfile: str | None, ca_certs: str | None, password: str | None = None
) -> ssl.SSLContext | None:
    """TLS of the listener, 1.2 or later; None without a certificate.

    Args:
        certfile: PEM, the chain.
        keyfile: PEM; None when the certificate's file holds it.
        ca_certs: PEM; clients must show a certificate signed by one of these.
        password: of the key.

    Raises:
        ConfigError: files that cannot be used, or a key without a certificate.
    """
    if certfile is None:
        if keyfile is not None or ca_certs is not None:
            raise ConfigError("ssl_certfile: is missing; --ssl-keyfile and --ssl-ca-certs need a certificate")
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        # An answer rather than a question on the terminal, which would hang a service.
        context.load_cert_chain(certfile, keyfile, password or (lambda: ""))
    except (OSError, ValueError) as error:
        raise ConfigError(f"ssl_certfile: {certfile} with key {keyfile or certfile} cannot be used ({error})") from None
    if ca_certs is not None:
        try:
            context.load_verify_locations(ca_certs)
        except (OSError, ValueError) as error:
            raise ConfigError(f"ssl_ca_certs: {ca_certs} cannot be used ({error})") from None
        context.verify_mode = ssl.CERT_REQUIRED
    return context
