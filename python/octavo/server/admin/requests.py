"""Request bodies of the admin listener. Unknown fields are refused."""

from __future__ import annotations

import difflib
import math
from typing import Any, TypeVar

import msgspec

from octavo.config import EngineConfig
from octavo.errors import InvalidRequest
from octavo.server.config_file import engine_config, engine_fields
from octavo.server.request.decoding import RequestBody, decode

__all__ = ["LoadBody", "SwapBody", "UnloadBody", "decode_command", "decode_json", "decode_object"]

Body = TypeVar("Body", bound=RequestBody)


class LoadBody(RequestBody, kw_only=True):
    """Body of `/admin/models/load`.

    Attributes:
        model: id of a registered model, or of a new one with `path`.
        path: what to load, as in `octavo serve MODEL`.
        engine: settings of its engine.
        keep_alive: idle seconds after which it is unloaded; negative for never.
        pinned: never unload it to free memory.
        wait: respond when it is loaded; else at once, with 202.
    """

    model: str
    path: str | None = None
    engine: dict[str, Any] | None = None
    keep_alive: float | None = None
    pinned: bool | None = None
    wait: bool | None = None

    def check(self) -> None:
        """Check the values."""
        if self.keep_alive is not None and not math.isfinite(self.keep_alive):
            raise InvalidRequest(
                f"keep_alive: {self.keep_alive} is not a number of seconds; use 0 or more, or -1 for never",
                "keep_alive",
            )

    def config(self) -> EngineConfig | None:
        """A new model's settings; None for a registered model.

        Raises:
            InvalidRequest, ConfigError: naming the setting.
        """
        if self.path is None:
            if self.engine:
                raise InvalidRequest("engine: only a new model takes settings; add its `path`", "engine")
            return None
        for name in ("model", "served_model_name"):
            if name in (self.engine or {}):
                raise InvalidRequest(f"engine.{name}: `path` and `model` set this; remove the field", "engine")
        return engine_config({**(self.engine or {}), "model": self.path})


class UnloadBody(RequestBody, kw_only=True):
    """Body of `/admin/models/unload`.

    Attributes:
        model: id, or alias of one model.
        timeout: seconds from now that running requests get, also if it is being unloaded already.
        remove: remove the model too.
        wait: respond when its engine is closed; else at once, with 202.
    """

    model: str
    timeout: float | None = None
    remove: bool | None = None
    wait: bool | None = None

    def check(self) -> None:
        """Check the values."""
        if self.timeout is not None and not 0 <= self.timeout < math.inf:
            raise InvalidRequest(f"timeout: {self.timeout} is not a number of seconds; use 0 or more", "timeout")


class SwapBody(LoadBody, kw_only=True):
    """Body of `/admin/models/swap`.

    Attributes:
        model: the alias or id that another model will answer.
        to: id of that model; the name with the next version number by default.
        replace: the model to replace of an alias of several.
        wait: respond when the old model's engine is closed; else when the new one serves.
    """

    to: str | None = None
    replace: str | None = None

    def check(self) -> None:
        """Check the values."""
        super().check()
        if self.path is None and self.to is None:
            raise InvalidRequest("to: missing; use a registered model, or add the `path` of a new one", "to")
        for field in ("keep_alive", "pinned"):
            if self.path is None and getattr(self, field) is not None:
                raise InvalidRequest(f"{field}: only a new model takes it; add its `path`, or remove the field", field)


def decode_json(body: bytes) -> Any:
    """Decode any JSON value.

    Raises:
        InvalidRequest: the body is not JSON.
    """
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}") from None


def decode_object(body: bytes) -> dict[str, Any]:
    """Decode a JSON object.

    Raises:
        InvalidRequest: the body is not a JSON object.
    """
    value = decode_json(body)
    if not isinstance(value, dict):
        raise InvalidRequest("The body is not a JSON object; send an object of fields")
    return value


def decode_command(kind: type[Body], body: bytes) -> Body:
    """Decode a command's body. Unlike a generation request, it must not have unknown fields.

    Raises:
        InvalidRequest: not JSON, or a field that is unknown or has a wrong type or value; `field` names it.
    """
    known = kind.__struct_fields__
    for field in decode_object(body):
        if field in known:
            continue
        if "engine" in known and field in engine_fields():
            hint = "put settings of the engine inside `engine`"
        else:
            close = difflib.get_close_matches(field, known, 1)
            hint = f"did you mean `{close[0]}`?" if close else f"the fields are {', '.join(known)}"
        raise InvalidRequest(f"{field[:80]}: this field does not exist; {hint}", field[:80])
    return decode(kind, body)
