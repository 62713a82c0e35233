"""The server's settings as command line options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

__all__ = ["server_options"]

_LOGS = "Logs, metrics and traces"


def _option(panel: str, field: str, kind: Any, default: Any, *names: str, text: str, hidden: bool = False) -> Any:
    """An option of a field of `ServerSettings`, whose default it repeats (a test compares them)."""
    option = typer.Option(*names, help=text, rich_help_panel=panel, hidden=hidden)
    return inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


_OPTIONS = (
    _option(
        _LOGS,
        "access_log",
        bool,
        True,
        "--access-log/--no-access-log",
        " /--disable-log-requests",
        text="Log a line a request, without prompts.",
    ),
    _option(
        _LOGS,
        "log_prompts",
        int,
        0,
        "--log-prompts",
        text="Put so many characters of each request's body, prompts among them, in its line.",
    ),
    _option(
        _LOGS,
        "metrics_prefix",
        str,
        "vllm:",
        "--metrics-prefix",
        text="Prefix of the metrics that vLLM has too; octavo_ gives all metrics one prefix.",
    ),
    _option(
        _LOGS,
        "metrics_old_names",
        bool,
        False,
        "--metrics-old-names/--no-metrics-old-names",
        text="Show metrics that vLLM renamed under their old names as well.",
    ),
    _option(
        _LOGS,
        "otlp_traces_endpoint",
        str | None,
        None,
        "--otlp-traces-endpoint",
        text="OpenTelemetry collector that gets a span a request, such as http://localhost:4318/v1/traces.",
    ),
)


def server_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command all options of the server; it gets them as one `ServerSettings` named `settings`."""
    own = inspect.signature(command)
    # What is only imported for types is not imported before a command runs: --help is to be quick.
    hints = get_type_hints(command, localns={"EngineConfig": object, "ServerSettings": object}, include_extras=True)
    parameters = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in own.parameters.items()
        if name != "settings"
    ]
    parameters += _OPTIONS

    @functools.wraps(command)
    def wrapper(**arguments: Any) -> None:
        from octavo.server.settings import ServerSettings

        values = {option.name: arguments.pop(option.name) for option in _OPTIONS}
        command(settings=ServerSettings(**values), **arguments)

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del wrapper.__wrapped__
    return wrapper
