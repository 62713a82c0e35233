"""What the routes that speak other servers' protocols share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from octavo.errors import InvalidRequest

__all__ = ["renamed_errors"]


@contextmanager
def renamed_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Let errors name the fields that the client sent.

    Args:
        names: the client's field by ours.

    Raises:
        InvalidRequest: of the same class, with the field and the message's beginning renamed.
    """
    try:
        yield
    except InvalidRequest as error:
        # An element of a list has the list's name before its index.
        field = error.field or ""
        name, bracket, index = field.partition("[")
        theirs = names.get(field)
        if theirs is None and name in names:
            theirs = names[name] + bracket + index
        if theirs is None:
            raise
        message = str(error)
        if message.startswith(f"{error.field}:"):
            message = theirs + message.removeprefix(str(error.field))
        raise type(error)(message, theirs) from None
