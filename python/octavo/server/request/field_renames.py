"""Errors with the field names of the client's API."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from octavo.errors import InvalidRequest

__all__ = ["renamed_errors"]


@contextmanager
def renamed_errors(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the fields in errors to those that the client sent.

    Args:
        names: the client's field by the field of our parameters.

    Raises:
        InvalidRequest: of the same class, with the field renamed, also at the start of the message.
    """
    try:
        yield
    except InvalidRequest as error:
        # The name of a list stands before the index of its element.
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
