"""Host and origin checks, before authentication. `middleware` applies them to requests."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence

from octavo.errors import ConfigError
from octavo.server.settings import ServerSettings
from octavo.server.transport.tls import tls_context

__all__ = [
    "AUTHORITY",
    "allowed_hosts",
    "check_exposure",
    "check_origins",
    "check_settings",
    "is_address",
    "is_loopback",
]

AUTHORITY = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(?::[0-9]{1,5})?")
"""A Host header: name or address, and port."""


def is_loopback(address: str) -> bool:
    """Whether a numeric address can be reached from this machine only."""
    try:
        return ipaddress.ip_address(address.partition("%")[0]).is_loopback
    except ValueError:
        return False


def check_exposure(address: str, *, has_keys: bool, insecure: bool) -> None:
    """Refuse to listen on an address that other machines reach, unless requests need a key or `insecure` is set.

    Args:
        address: numeric, as bound.
        has_keys: requests need a key.
        insecure: the user wants to serve everyone.

    Raises:
        ConfigError: the message says how to proceed.
    """
    if has_keys or insecure or is_loopback(address):
        return
    raise ConfigError(
        f"host: {address} can be reached from other machines and no API key is set, so anyone could use the model; "
        "set keys (--api-key-file FILE, or OCTAVO_API_KEY in the environment), listen on 127.0.0.1, or pass --insecure"
    )


def allowed_hosts(given: Sequence[str], bound: str, *, has_keys: bool) -> tuple[str, ...]:
    """Names that a Host header may have, besides addresses and loopback names. `*` allows any.

    This stops DNS rebinding: a web page whose name resolves to this server could read its responses. If the server is
    open to other machines and needs keys, any name is allowed, as such a page has no key.

    Args:
        given: `--allowed-hosts`; empty for the default.
        bound: the host that the server listens on, as given.
        has_keys: requests need a key.

    Raises:
        ConfigError: an invalid name.
    """
    for name in given:
        if name != "*" and not AUTHORITY.fullmatch(name.removeprefix("*.")):
            raise ConfigError(
                f"allowed_hosts: {name!r} is not a host name; use for example llm.example.com, *.example.com or *"
            )
    if given:
        return tuple(name.lower().rstrip(".") for name in given)
    if has_keys and not (bound == "localhost" or is_loopback(bound)):
        return ("*",)
    own = {bound.lower(), socket.gethostname().lower()}
    return tuple(sorted(name for name in own if name and not name.startswith("*")))


def is_address(name: str) -> bool:
    """Whether a name is an address. Nobody resolves an address, so it cannot be rebound to this server."""
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True


def check_origins(settings: ServerSettings) -> None:
    """Refuse credentials for every origin.

    Raises:
        ConfigError.
    """
    if settings.allow_credentials and "*" in settings.allowed_origins:
        raise ConfigError("allow_credentials: with allowed_origins * any web page could use a user's login")


def check_settings(settings: ServerSettings, *, has_keys: bool) -> None:
    """Refuse settings that would only fail later, after a model was loaded.

    Args:
        settings: of the server. If a certificate is set, `tls_context` checks its files.
        has_keys: requests need a key.

    Raises:
        ConfigError.
    """
    allowed_hosts(settings.allowed_hosts, settings.host, has_keys=has_keys)
    check_origins(settings)
    if settings.ssl_certfile is None:
        tls_context(settings)
    if settings.otlp_traces_endpoint is not None:
        from octavo.server.observability.spans import traces_url

        traces_url(settings.otlp_traces_endpoint)
