"""Priority classes of requests: high, normal and low."""

from __future__ import annotations

import re

from octavo.errors import InvalidRequest
from octavo.server.access.identity import PRIORITIES, Identity
from octavo.server.transport.http import Scope, header

__all__ = ["engine_priority", "priority_class", "request_priority"]

_INTEGER = re.compile(r"-?[0-9]{1,19}")
_HEADERS = (b"x-priority", b"x-vllm-priority")


def request_priority(scope: Scope, identity: Identity, asked: int) -> str:
    """The priority class of a request: that of its headers, else of its body, else of its API key.

    Args:
        scope: ASGI's.
        identity: who sends the request.
        asked: `priority` of the body; 0 if the body has none.

    Raises:
        InvalidRequest: a header holds neither a class nor a whole number.
    """
    for name in _HEADERS:
        given = header(scope, name)
        if given is not None:
            return priority_class(identity, given, name.decode().title())
    return priority_class(identity, asked or None, "priority")


def priority_class(identity: Identity, asked: str | int | None, field: str) -> str:
    """The class that an identity gets when it asks for one.

    Args:
        identity: a class above its `best_priority` becomes that.
        asked: a class, or a number as vLLM's clients send it: below 0 is `high`, above 0 is `low`. None for the class
            of the key.
        field: named in the message.

    Raises:
        InvalidRequest: `asked` is neither a class nor a whole number.
    """
    if asked is None:
        return identity.priority
    if isinstance(asked, str):
        word = asked.strip().lower()
        if word in PRIORITIES:
            return max(word, identity.best_priority, key=PRIORITIES.index)
        if not _INTEGER.fullmatch(word):
            raise InvalidRequest(f"{field}: {word[:40]!a} is neither {', '.join(PRIORITIES)} nor a whole number", field)
        asked = int(word)
    wanted = "high" if asked < 0 else "low" if asked > 0 else "normal"
    return max(wanted, identity.best_priority, key=PRIORITIES.index)


def engine_priority(level: str, asked: int) -> int:
    """The number for an engine with the `priority` policy: the one asked for, kept within the class `level`."""
    if level == "high":
        return min(asked, -1)
    return max(asked, 1) if level == "low" else 0
