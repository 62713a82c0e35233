"""Plan of `octavo serve`, from the command line and the configuration file."""

from __future__ import annotations

import re
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import typer

from octavo.cli.options import given_settings
from octavo.cli.server_options import given_server_settings
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.server.config_file import LISTEN_FIELDS, ModelPlan, divide_memory, read_serve_file
from octavo.server.models.aliases import Alias
from octavo.server.settings import ServerSettings

__all__ = ["ServeOptions", "ServePlan", "check_plan", "plan_serve"]

# A name before `=`; not a path, which may contain `=` too.
_NAMED = re.compile(r"([A-Za-z0-9_][A-Za-z0-9_.:@/-]*)=(.+)")


class ServeOptions(msgspec.Struct, kw_only=True, frozen=True):
    """Options of the command itself."""

    host: str = "127.0.0.1"
    port: int = 8000
    admin_host: str = "127.0.0.1"
    admin_port: int | None = None
    shutdown_timeout: float = 30.0
    drain_delay: float | None = None
    uvicorn_log_level: str = "warning"
    log_format: str = "auto"
    log_level: str = "info"
    api_key_file: str | None = None
    api_key: tuple[str, ...] = ()
    insecure: bool = False
    api_processes: int = 1


class ServePlan(msgspec.Struct, kw_only=True, frozen=True):
    """A server to start.

    Attributes:
        models: in the order of loading.
        aliases: further names.
        settings: of the server.
        options: of the command.
    """

    models: list[ModelPlan]
    aliases: Mapping[str, Alias]
    settings: ServerSettings
    options: ServeOptions


def plan_serve(
    models: Sequence[str],
    file: str | None,
    config: EngineConfig,
    settings: ServerSettings,
    options: ServeOptions,
    given: Container[str],
) -> ServePlan:
    """Merge the command line and the file; options given on the command line win.

    Args:
        models: `[NAME=]MODEL` each.
        file: path of a TOML file.
        config: engine settings of the command line; its model is not used.
        settings: of the command line.
        options: of the command line.
        given: parameters of the command line that were given.

    Raises:
        BadParameter: no model.
        ConfigError: a name given twice, a mistake in the file, or no model in it.
    """
    names = config.served_model_name
    config = msgspec.structs.replace(config, served_model_name=())
    plans = [_plan(text, config) for text in models]
    aliases: Mapping[str, Alias] = {}
    if file is not None:
        content = read_serve_file(file, given_settings(config, given))
        settings = msgspec.structs.replace(settings, **{**content.settings, **given_server_settings(settings, given)})
        listen: dict[str, Any] = {key: value for key, value in content.listen.items() if key not in given}
        options = msgspec.structs.replace(options, **{key: listen[key] for key in LISTEN_FIELDS if key in listen})
        plans += content.models
        aliases = content.aliases
    if not plans and file is not None:
        raise ConfigError(
            f'{file}: has no models; write [models.NAME] and model = "PATH" under it for each, or name one before it: '
            "`octavo serve MODEL --config FILE`"
        )
    if not plans:
        raise typer.BadParameter("no model given; write `octavo serve MODEL`, or give a file with --config")
    if names:
        if len(plans) > 1:
            raise ConfigError("served_model_name: only for a single model; write NAME=MODEL to name each of several")
        config = msgspec.structs.replace(plans[0].config, served_model_name=names)
        plans = [msgspec.structs.replace(plans[0], id=names[0], aliases=names[1:], config=config)]
    return ServePlan(
        models=divide_memory(plans, settings.max_loaded_models),
        aliases=aliases,
        settings=msgspec.structs.replace(settings, host=options.host),
        options=options,
    )


def _plan(text: str, config: EngineConfig) -> ModelPlan:
    named = None if Path(text).exists() else _NAMED.fullmatch(text)
    id, model = named.groups() if named else (text, text)
    return ModelPlan(id=id, config=msgspec.structs.replace(config, model=model))


def check_plan(plan: ServePlan) -> None:
    """Refuse options that do not work with several processes.

    Raises:
        ConfigError: naming the option.
    """
    if plan.options.api_processes == 1:
        return
    settings = plan.settings
    reasons = {
        "admin_port": plan.options.admin_port is not None,
        "idle_unload": settings.idle_unload is not None,
        "max_loaded_models": settings.max_loaded_models is not None,
        "model_memory": settings.model_memory is not None,
        "autostart": any(not model.autostart for model in plan.models),
        "keep_alive": any(model.keep_alive is not None and model.keep_alive >= 0 for model in plan.models),
    }
    for name, wrong in reasons.items():
        if wrong:
            raise ConfigError(
                f"{name}: models cannot come and go with --api-processes {plan.options.api_processes}; use one "
                f"process, or leave `{name}` at its default"
            )
