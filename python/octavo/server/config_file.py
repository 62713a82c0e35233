"""Configuration file of a server in TOML: its settings, its models and their names.

[server]
host = "0.0.0.0"
port = 8000
max_loaded_models = 2

[defaults]                     # engine settings of every model
max_num_seqs = 64

[models."chat@v1"]
model = "/models/chat-v1"      # as `octavo serve MODEL`
kv_cache_memory = "4GiB"       # any engine setting

[models."chat@v2"]
model = "/models/chat-v2"
autostart = false              # loaded by its first request
keep_alive = 600

[aliases]
gpt = "chat@v1"
chat = { "chat@v1" = 90, "chat@v2" = 10 }
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.server.models.aliases import Alias, parse_aliases
from octavo.server.settings import ServerSettings
from octavo.sizes import parse_bytes

if TYPE_CHECKING:
    from octavo.server.models.registry import ModelRegistry

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = [
    "LISTEN_FIELDS",
    "ModelPlan",
    "ServeFile",
    "divide_memory",
    "engine_config",
    "engine_fields",
    "populate",
    "read_serve_file",
]

_MAX_FILE_BYTES = 1 << 20
_SIZES = ("kv_cache_memory", "model_memory")
_SECTIONS = ("server", "defaults", "models", "aliases")

LISTEN_FIELDS: dict[str, type | tuple[type, ...]] = {
    "host": str,
    "port": int,
    "admin_host": str,
    "admin_port": int,
    "shutdown_timeout": (int, float),
    "drain_delay": (int, float),
    "log_format": str,
    "log_level": str,
    "api_key_file": str,
}
"""Keys of `[server]` besides those of `ServerSettings`: options of the command."""


class ModelPlan(msgspec.Struct, kw_only=True):
    """A model to register.

    Attributes:
        id: `name@version` or `name`.
        config: of its engine.
        aliases: further names.
        autostart: load it before the server is ready; else at its first request.
        keep_alive: idle seconds after which it is unloaded; None for the server's setting, negative for never.
        pinned: never unload it to free memory.
    """

    id: str
    config: EngineConfig
    aliases: tuple[str, ...] = ()
    autostart: bool = True
    keep_alive: float | None = None
    pinned: bool = False


class ServeFile(msgspec.Struct, kw_only=True):
    """Contents of a configuration file.

    Attributes:
        listen: values of `LISTEN_FIELDS`.
        settings: fields of `ServerSettings`.
        models: in the file's order.
        aliases: by name.
    """

    listen: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    models: list[ModelPlan] = []
    aliases: dict[str, Alias] = {}


class _ModelSection(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    model: str
    aliases: tuple[str, ...] = ()
    autostart: bool = True
    keep_alive: float | None = None
    pinned: bool = False


def engine_config(settings: Mapping[str, Any]) -> EngineConfig:
    """An engine's settings from a file or a request. Sizes may be strings such as `512MiB`.

    Raises:
        ConfigError: naming the setting, its value and the remedy.
    """
    return EngineConfig.of(**settings)


def read_serve_file(path: str | Path, flags: Mapping[str, Any] | None = None) -> ServeFile:
    """Read and check a file.

    Args:
        path: of the file.
        flags: engine settings of the command line. They override the file's defaults, not a model's own settings.

    Raises:
        ConfigError: naming the file, the key, its value and the remedy.
    """
    document = _parse(Path(path))
    try:
        _known("", document, _SECTIONS)
        server = _table(document, "server")
        _known("server.", server, (*LISTEN_FIELDS, *ServerSettings.__struct_fields__))
        listen = {key: _listen_value(key, server[key]) for key in LISTEN_FIELDS if key in server}
        settings = {key: value for key, value in server.items() if key in ServerSettings.__struct_fields__}
        settings = _under("server.", lambda: _settings(settings))
        defaults = _table(document, "defaults")
        _known("defaults.", defaults, engine_fields())
        shared = {**defaults, **(flags or {})}
        models = [_model(id, section, shared) for id, section in _table(document, "models").items()]
        aliases = parse_aliases(_table(document, "aliases"))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    return ServeFile(listen=listen, settings=settings, models=models, aliases=aliases)


def _parse(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
        if len(data) > _MAX_FILE_BYTES:
            raise ConfigError(f"config: {path} is longer than the limit of {_MAX_FILE_BYTES} bytes")
        document: dict[str, Any] = tomllib.loads(data.decode())
    except OSError as error:
        raise ConfigError(f"config: {path} cannot be read ({error.strerror}); name a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: {path} is not valid TOML: {error}") from None
    return document


def _table(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    table = document.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{name}: {table!r} is not a table; write [{name}]")
    return table


def _known(place: str, table: Mapping[str, Any], names: Sequence[str]) -> None:
    for key in table:
        if key not in names:
            close = difflib.get_close_matches(key, names, 1)
            hint = f"did you mean {close[0]}?" if close else f"the keys are {', '.join(names)}"
            raise ConfigError(f"{place}{key}: this key does not exist; {hint}")


def _under(place: str, work: Any) -> Any:
    try:
        return work()
    except ConfigError as error:
        raise ConfigError(f"{place}{error}") from None


def _listen_value(key: str, value: Any) -> Any:
    wanted = LISTEN_FIELDS[key]
    if isinstance(value, bool) or not isinstance(value, wanted):
        kind = "a string in quotes" if wanted is str else "an integer" if wanted is int else "a number"
        raise ConfigError(f"server.{key}: {value!r} is not {kind}")
    return value


def _settings(values: dict[str, Any]) -> dict[str, Any]:
    values = _with_sizes(values)
    try:
        checked = msgspec.convert(values, ServerSettings)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, ConfigError):
            raise error.__cause__ from None
        raise ConfigError(str(error)) from None
    return {key: getattr(checked, key) for key in values}


def _with_sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: parse_bytes(value, key) if key in _SIZES and isinstance(value, str) else value
        for key, value in values.items()
    }


def engine_fields() -> tuple[str, ...]:
    """Names of an engine's settings, without its model."""
    return tuple(name for name in EngineConfig.__struct_fields__ if name not in ("model", "served_model_name"))


def _model(id: str, section: Any, shared: Mapping[str, Any]) -> ModelPlan:
    place = f"models.{id}"
    if not isinstance(section, dict):
        raise ConfigError(f'{place}: {section!r} is not a table; write [models."{id}"] and model = "..." below it')
    own = _ModelSection.__struct_fields__
    _known(f"{place}.", section, (*own, *engine_fields()))
    try:
        plan = msgspec.convert({key: value for key, value in section.items() if key in own}, _ModelSection)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{place}: {error}") from None
    if plan.keep_alive is not None and not math.isfinite(plan.keep_alive):
        raise ConfigError(
            f"{place}.keep_alive: {plan.keep_alive} is not a number of seconds; use 0 or more, or -1 for never"
        )
    engine = {key: value for key, value in section.items() if key not in own}
    config = _under(f"{place}.", lambda: engine_config({**shared, **engine, "model": plan.model}))
    return ModelPlan(
        id=id,
        config=config,
        aliases=plan.aliases,
        autostart=plan.autostart,
        keep_alive=plan.keep_alive,
        pinned=plan.pinned,
    )


def divide_memory(plans: list[ModelPlan], most: int | None = None) -> list[ModelPlan]:
    """Divide the memory evenly among models without memory settings: each load takes its share of the free memory.

    Otherwise the first of several models on one device would leave nothing for the next.

    Args:
        plans: in the order of loading.
        most: maximum number of models loaded at once.
    """
    default = EngineConfig(model="demo").gpu_memory_utilization
    silent = [
        plan
        for plan in plans
        if plan.autostart and plan.config.kv_cache_memory is None and plan.config.gpu_memory_utilization == default
    ]
    count = min(len(silent), most or len(silent))
    if count < 2:
        return plans
    shares = {}
    for place, plan in enumerate(silent):
        # Each gets default / count of the memory that was free at first.
        taken = min(place, count - 1) * default / count
        shares[plan.id] = round(default / count / (1 - taken), 4)
    return [
        msgspec.structs.replace(
            plan, config=msgspec.structs.replace(plan.config, gpu_memory_utilization=shares[plan.id])
        )
        if plan.id in shares
        else plan
        for plan in plans
    ]


def populate(registry: ModelRegistry, plans: Sequence[ModelPlan], aliases: Mapping[str, Alias]) -> None:
    """Register models and aliases.

    Raises:
        ConfigError: an id or alias that appears twice, or an alias for an unknown model.
    """
    table: dict[str, Alias] = {}
    for plan in plans:
        if any(plan.id == entry.id for entry in registry.entries):
            raise ConfigError(f"models: `{plan.id}` appears twice; write NAME=MODEL to give models different names")
        registry.register(plan.id, plan.config, keep_alive=plan.keep_alive, pinned=plan.pinned, at_start=plan.autostart)
        for name in plan.aliases:
            if name in table:
                raise ConfigError(f"aliases: `{name}` leads to two models; use a table of weights under [aliases]")
            table[name] = Alias(name, {plan.id: 1})
    known = {name: Alias(name, weights) for name, weights in registry.aliases.items()}
    registry.set_aliases({**known, **table, **aliases})
