"""Limit on the bytes of all request bodies that the server holds at once."""

from __future__ import annotations

from octavo.server.error_responses import QueueFull

__all__ = ["BodyBudget", "BodyShare"]


class BodyBudget:
    """Bytes of all request bodies that a server may hold at once.

    Args:
        limit: bytes.

    Attributes:
        held: bytes held now.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0

    def share(self) -> BodyShare:
        """The share of one request, empty at first."""
        return BodyShare(self)


class BodyShare:
    """Bytes that one request holds of a `BodyBudget`."""

    __slots__ = ("_budget", "_held")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._held = 0

    def take(self, size: int) -> None:
        """Hold more bytes.

        Raises:
            QueueFull: the budget is used up.
        """
        budget = self._budget
        if budget.held + size > budget.limit:
            raise QueueFull(
                f"The server is busy: it holds {budget.held} bytes of request bodies (max_bodies_bytes "
                f"{budget.limit}); try again later",
                1.0,
            )
        budget.held += size
        self._held += size

    def release(self) -> None:
        """Give all bytes back."""
        self._budget.held -= self._held
        self._held = 0
