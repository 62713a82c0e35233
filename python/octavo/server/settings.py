"""The settings of one server, all of which have a safe default."""

from __future__ import annotations

import msgspec

__all__ = ["ServerSettings"]


class ServerSettings(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How a server answers.

    Attributes:
        max_body_bytes: of a request.
    """

    max_body_bytes: int = 8 << 20
