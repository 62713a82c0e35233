"""The request bodies of the admin listener: what they may say, and nothing else."""

from __future__ import annotations

import difflib
import math
from typing import Any, TypeVar

import msgspec

from octavo.config import EngineConfig
from octavo.errors import InvalidRequest
from octavo.server.apis.openai.requests import RequestBody, decode
from octavo.server.config_file import engine_config, engine_fields

__all__ = ["LoadBody", "SwapBody", "UnloadBody", "decode_command", "decode_json", "decode_object"]

Body = TypeVar("Body", bound=RequestBody)


class LoadBody(RequestBody, kw_only=True):
    """Of `/admin/models/load`.

    Attributes:
        model: id of a known model, or of a new one with `path`.
        path: what to load, as `octavo serve MODEL`.
        engine: settings of its engine.
        keep_alive: idle seconds after which it is unloaded; negative: never.
        pinned: never unload it to make room.
        wait: answer when it is loaded; else at once, with 202.
    """

    model: str
    path: str | None = None
    engine: dict[str, Any] | None = None
    keep_alive: float | None = None
    pinned: bool | None = None
    wait: bool | None = None

    def check(self) -> None:
        """As `RequestBody.check`."""
        if self.keep_alive is not None and not math.isfinite(self.keep_alive):
            raise InvalidRequest(
                f"keep_alive: {self.keep_alive} is no number of seconds; give one from 0 up, or -1 for no end",
                "keep_alive",
            )

    def config(self) -> EngineConfig | None:
        """A new model's settings; None where a known one is meant.

        Raises:
            InvalidRequest, ConfigError: naming the setting.
        """
        if self.path is None:
            if self.engine:
                raise InvalidRequest("engine: settings are of a new model; give its `path` too", "engine")
            return None
        for name in ("model", "served_model_name"):
            if name in (self.engine or {}):
                raise InvalidRequest(f"engine.{name}: is given by `path` and `model`; leave it out", "engine")
        return engine_config({**(self.engine or {}), "model": self.path})


class UnloadBody(RequestBody, kw_only=True):
    """Of `/admin/models/unload`.

    Attributes:
        model: id, or alias of one model.
        timeout: seconds that running requests get from now on, also where it is being unloaded already.
        remove: forget the model too.
        wait: answer when its engine is closed; else at once, with 202.
    """

    model: str
    timeout: float | None = None
    remove: bool | None = None
    wait: bool | None = None

    def check(self) -> None:
        """As `RequestBody.check`."""
        if self.timeout is not None and not 0 <= self.timeout < math.inf:
            raise InvalidRequest(f"timeout: {self.timeout} is no number of seconds; give one from 0 up", "timeout")


class SwapBody(LoadBody, kw_only=True):
    """Of `/admin/models/swap`.

    Attributes:
        model: the name, alias or id, that is to be answered by another model.
        to: id of that one; the name with the next number as its version when left out.
        replace: of an alias of several models the one that is replaced.
        wait: answer when the old model's engine is closed; else when the new one serves.
    """

    to: str | None = None
    replace: str | None = None

    def check(self) -> None:
        """As `RequestBody.check`."""
        super().check()
        if self.path is None and self.to is None:
            raise InvalidRequest("to: is missing; name a known model, or give the `path` of a new one", "to")
        for field in ("keep_alive", "pinned"):
            if self.path is None and getattr(self, field) is not None:
                raise InvalidRequest(f"{field}: is of a new model; give its `path` too, or leave it out", field)


def decode_json(body: bytes) -> Any:
    """Any JSON value.

    Raises:
        InvalidRequest: it is none.
    """
    try:
        return msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}") from None


def decode_object(body: bytes) -> dict[str, Any]:
    """As `decode_json`, of an object.

    Raises:
        InvalidRequest: it is none.
    """
    value = decode_json(body)
    if not isinstance(value, dict):
        raise InvalidRequest("The body is no JSON object; send fields by name")
    return value


def decode_command(kind: type[Body], body: bytes) -> Body:
    """A command's body; other than a request for an answer it may hold nothing that is not known.

    Raises:
        InvalidRequest: not JSON, a field that there is not, or one of the wrong type or value; `field` names it.
    """
    known = kind.__struct_fields__
    for field in decode_object(body):
        if field in known:
            continue
        if "engine" in known and field in engine_fields():
            hint = "a setting of the engine stands within `engine`"
        else:
            close = difflib.get_close_matches(field, known, 1)
            hint = f"did you mean `{close[0]}`?" if close else f"there are {', '.join(known)}"
        raise InvalidRequest(f"{field[:80]}: there is no such field; {hint}", field[:80])
    return decode(kind, body)
