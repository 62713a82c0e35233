"""Identity of a client: what an API key stands for."""

from __future__ import annotations

import hashlib

import msgspec

from octavo.server.transport.http import Scope

__all__ = ["ANONYMOUS", "IDENTITY", "PRIORITIES", "SCOPES", "Identity", "cache_salt", "identity_of"]

PRIORITIES = ("high", "normal", "low")
SCOPES = ("inference", "metrics", "admin")

IDENTITY = "octavo.identity"
"""Key of a request's identity in its ASGI scope."""


class Identity(msgspec.Struct, frozen=True, kw_only=True):
    """Who sends a request.

    Attributes:
        name: of the key.
        tenant: keys of one tenant share their turns in the queue; the key's name by default.
        priority: class of requests that ask for none.
        best_priority: the most urgent class that requests may ask for.
        scopes: what the key gives access to.
        max_concurrency: requests that may run or wait at once; None for the server's limit.
        anonymous: the server needs no key.
    """

    name: str
    tenant: str
    priority: str = "normal"
    best_priority: str = "normal"
    scopes: frozenset[str] = frozenset(("inference",))
    max_concurrency: int | None = None
    anonymous: bool = False


ANONYMOUS = Identity(
    name="anonymous", tenant="anonymous", best_priority="high", scopes=frozenset(SCOPES), anonymous=True
)


def identity_of(scope: Scope) -> Identity:
    """The identity of a request, as the API key check found it."""
    identity: Identity = scope.get(IDENTITY, ANONYMOUS)
    return identity


def cache_salt(identity: Identity, salt: str, *, shared: bool) -> str:
    """The salt of a request's cached prefixes. Keys do not share prefixes: timing would reveal what others have sent.

    Args:
        identity: who sends the request.
        salt: the request's own salt.
        shared: all keys share prefixes; the request's own salt still counts.
    """
    if shared or identity.anonymous:
        return salt
    return hashlib.blake2b(f"{identity.name}\0{salt}".encode(), digest_size=16).hexdigest()
