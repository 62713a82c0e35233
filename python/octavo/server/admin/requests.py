"""Request bodies of the admin listener. Unknown fields are refused."""

from __future__ import annotations

import difflib
import math
from typing import Annotated, Any, TypeVar

import msgspec

from octavo.config import EngineConfig
from octavo.errors import InvalidRequest
from octavo.server.config_file import engine_config, engine_fields
from octavo.server.request.decoding import RequestBody, decode, doc

__all__ = ["LoadBody", "SwapBody", "UnloadBody", "decode_command", "decode_json", "decode_object"]

Body = TypeVar("Body", bound=RequestBody)


class LoadBody(RequestBody, kw_only=True):
    """Body of `/admin/models/load`."""

    model: Annotated[str, doc("Id of a registered model, or of a new one with `path`.")]
    path: Annotated[str | None, doc("What to load, as in `octavo serve MODEL`.")] = None
    engine: Annotated[dict[str, Any] | None, doc("Settings of its engine.")] = None
    keep_alive: Annotated[float | None, doc("Idle seconds after which the model is unloaded; negative for never.")] = (
        None
    )
    pinned: Annotated[bool | None, doc("Never unload the model to free memory.")] = None
    wait: Annotated[bool | None, doc("Respond when the model is loaded; else at once, with 202.")] = None

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
    """Body of `/admin/models/unload`."""

    model: Annotated[str, doc("Id, or alias of one model.")]
    timeout: Annotated[
        float | None, doc("Seconds from now that running requests get, also if the model is being unloaded already.")
    ] = None
    remove: Annotated[bool | None, doc("Remove the model too.")] = None
    wait: Annotated[bool | None, doc("Respond when the engine is closed; else at once, with 202.")] = None

    def check(self) -> None:
        """Check the values."""
        if self.timeout is not None and not 0 <= self.timeout < math.inf:
            raise InvalidRequest(f"timeout: {self.timeout} is not a number of seconds; use 0 or more", "timeout")


class SwapBody(LoadBody, kw_only=True):
    """Body of `/admin/models/swap`."""

    to: Annotated[str | None, doc("Id of the new model. Default: the name with the next version number.")] = None
    replace: Annotated[str | None, doc("The model to replace, of an alias of several.")] = None

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
