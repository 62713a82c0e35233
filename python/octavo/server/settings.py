"""The settings of one server, all of which have a safe default."""

from __future__ import annotations

import math

import msgspec

from octavo.errors import ConfigError

__all__ = ["ServerSettings"]


class ServerSettings(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """How a server answers.

    Attributes:
        max_body_bytes: of a request.
        sse_keep_alive_seconds: a stream that is silent for so long sends a comment; 0 for never.
    """

    max_body_bytes: int = 8 << 20
    sse_keep_alive_seconds: float = 15.0

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: naming the setting, its value and the remedy.
        """
        if not 0 <= self.sse_keep_alive_seconds < math.inf:
            raise ConfigError(
                f"sse_keep_alive_seconds: {self.sse_keep_alive_seconds} is not a number of seconds; use 15, or 0 to "
                "turn keep-alive comments off"
            )
