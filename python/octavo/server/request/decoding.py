"""Decode request bodies to structs, with errors that name the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import Meta

from octavo.errors import InvalidRequest

__all__ = ["REFUSED", "RequestBody", "convert", "decode", "doc", "shorten", "unsupported"]

_FLOAT_FOR_INT = "got `float`"
_EXACT_FLOAT = float(1 << 53)


def doc(text: str) -> Meta:
    """The description of a field in `/openapi.json`, as a part of its `Annotated` type."""
    return Meta(description=text)


REFUSED = doc("Not supported. Requests that use it are refused.")


class RequestBody(msgspec.Struct, kw_only=True):
    """The body of a request."""

    def check(self) -> None:
        """Refuse what contradicts itself or is not supported.

        Raises:
            InvalidRequest: naming the field.
        """


Body = TypeVar("Body", bound=RequestBody)

_PATH = re.compile(r" - at `\$\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]+)`")
_STEPS = re.compile(r"\.?([^.\[\]]+)|\[(\d+)\]")
_SHOWN_BODY_BYTES = 1 << 16
_SHOWN = 1000


def decode(kind: type[Body], body: bytes) -> Body:
    """Parse and check a request body.

    Raises:
        InvalidRequest: not JSON, not an object, a field of the wrong type or value; `field` names it.
    """
    try:
        request = _decode(kind, body)
    except msgspec.ValidationError as error:
        raise _wrong_type(error, body) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}") from None
    except RecursionError:
        raise InvalidRequest("The body is nested too deeply") from None
    request.check()
    return request


def _decode(kind: type[Body], body: bytes) -> Body:
    """Decode a body; a whole number written as a float (`5.0`) is an integer, as in JavaScript."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        if _FLOAT_FOR_INT not in str(error):
            raise
    return msgspec.convert(_with_integers(msgspec.json.decode(body)), kind)


def _with_integers(value: Any) -> Any:
    """The value with every float that is a whole number as an integer; float fields take those too."""
    if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT_FLOAT:
        return int(value)
    if isinstance(value, list):
        return [_with_integers(item) for item in value]
    if isinstance(value, dict):
        return {key: _with_integers(item) for key, item in value.items()}
    return value


def convert(kind: type[Body], fields: Mapping[str, Any]) -> Body:
    """Convert fields that are parsed already to a checked request.

    Raises:
        InvalidRequest: a field of the wrong type or value; `field` names it.
    """
    try:
        request = msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(error, fields) from None
    request.check()
    return request


def _wrong_type(error: msgspec.ValidationError, given: bytes | Mapping[str, Any]) -> InvalidRequest:
    message = str(error)
    found = _PATH.search(message)
    field = found.group(1) if found and found.group(1) else None
    reason = _PATH.sub("", message)
    missing = _MISSING.search(reason)
    if missing:
        name = missing.group(1)
        where = f"{field}.{name}" if field else name
        return InvalidRequest(f"{where}: required field is missing", where)
    if field is None:
        return InvalidRequest(reason)
    shown = _value(given, field)
    reason = reason if shown is None else f"{shown} is invalid: {reason[:1].lower()}{reason[1:]}"
    return InvalidRequest(f"{field}: {reason}", field)


def _value(given: bytes | Mapping[str, Any], path: str) -> str | None:
    """The value at a path of the body, shortened; None if it is unknown."""
    if isinstance(given, bytes) and len(given) > _SHOWN_BODY_BYTES:
        return None
    try:
        value: Any = msgspec.json.decode(given) if isinstance(given, bytes) else given
        for name, index in _STEPS.findall(path):
            value = value[int(index)] if index else value[name]
        return shorten(value)
    except (msgspec.DecodeError, RecursionError, LookupError, TypeError):
        return None


def shorten(value: object) -> str:
    """A value for an error message."""
    if isinstance(value, str | bytes):
        value = value[:_SHOWN]
    elif isinstance(value, dict | list | tuple) and len(value) > _SHOWN:
        # Its text may have megabytes.
        return f"{type(value).__name__} of {len(value)}"
    shown = ascii(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."


def unsupported(field: str, value: object, reason: str) -> InvalidRequest:
    """The error for a field that would change the output and is not supported."""
    return InvalidRequest(f"{field}: {shorten(value)} is not supported: {reason}; remove the field", field)
