"""The server's settings as command line options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from octavo.cli.flags import reading_options

if TYPE_CHECKING:
    from octavo.server.settings import ServerSettings

__all__ = ["LOGS", "MODELS", "SECURITY", "given_server_settings", "server_options"]

LOGS = "Logs, metrics and traces"
SECURITY = "Security"
_LIMITS = "Limits of a request"
_LOAD = "Load"

MODELS = "Models"
_SIZES = ("model_memory",)

_LIST = list[str] | None


def _option(panel: str, field: str, kind: Any, default: Any, *names: str, text: str, hidden: bool = False) -> Any:
    """An option of a field of `ServerSettings`, whose default it repeats (a test compares them)."""
    option = typer.Option(*names, help=text, rich_help_panel=panel, hidden=hidden)
    return inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, option])


_OPTIONS = (
    _option(
        MODELS,
        "generation_config",
        str,
        "auto",
        "--generation-config",
        text="auto: what requests leave open is as the model's makers recommend; vllm: as OpenAI says.",
    ),
    _option(
        MODELS,
        "override_generation_config",
        str,
        "",
        "--override-generation-config",
        text='Sampling that stands before the makers\', as a JSON object such as {"temperature": 0.6}.',
    ),
    _option(
        _LOAD,
        "sse_keep_alive_seconds",
        float,
        15.0,
        "--sse-keep-alive-interval",
        text="Seconds of silence after which a stream sends a comment, so that proxies keep it; 0 for never.",
    ),
    _option(
        LOGS,
        "access_log",
        bool,
        True,
        "--access-log/--no-access-log",
        " /--disable-log-requests",
        text="Log a line a request, without prompts.",
    ),
    _option(
        LOGS,
        "log_prompts",
        int,
        0,
        "--log-prompts",
        text="Put so many characters of each request's body, prompts among them, in its line.",
    ),
    _option(
        LOGS,
        "metrics_prefix",
        str,
        "vllm:",
        "--metrics-prefix",
        text="Prefix of the metrics that vLLM has too; octavo_ gives all metrics one prefix.",
    ),
    _option(
        LOGS,
        "metrics_old_names",
        bool,
        False,
        "--metrics-old-names/--no-metrics-old-names",
        text="Show metrics that vLLM renamed under their old names as well.",
    ),
    _option(
        LOGS,
        "otlp_traces_endpoint",
        str | None,
        None,
        "--otlp-traces-endpoint",
        text="OpenTelemetry collector that gets a span a request, such as http://localhost:4318/v1/traces.",
    ),
    _option(
        SECURITY,
        "metrics_public",
        bool,
        False,
        "--metrics-public/--no-metrics-public",
        text="Let /metrics answer without an API key.",
    ),
    _option(
        SECURITY,
        "allowed_hosts",
        _LIST,
        None,
        "--allowed-hosts",
        text="Name that a Host header may carry, such as llm.example.com, *.example.com or *; may be repeated.",
    ),
    _option(
        SECURITY,
        "allowed_origins",
        _LIST,
        None,
        "--allowed-origins",
        text="Origin whose pages may ask, such as https://chat.example.com; may be repeated. None by default.",
    ),
    _option(
        SECURITY, "allowed_methods", _LIST, None, "--allowed-methods", text="That such pages may use: GET and POST."
    ),
    _option(SECURITY, "allowed_headers", _LIST, None, "--allowed-headers", text="That such pages may send: any."),
    _option(
        SECURITY,
        "allow_credentials",
        bool,
        False,
        "--allow-credentials/--no-allow-credentials",
        text="Let such pages send cookies and logins.",
    ),
    _option(
        SECURITY, "root_path", str, "", "--root-path", text="Path under which a proxy shows the server, such as /llm."
    ),
    _option(SECURITY, "ssl_certfile", str | None, None, "--ssl-certfile", text="PEM file of the certificate chain."),
    _option(SECURITY, "ssl_keyfile", str | None, None, "--ssl-keyfile", text="PEM file of the certificate's key."),
    _option(
        SECURITY,
        "ssl_ca_certs",
        str | None,
        None,
        "--ssl-ca-certs",
        text="PEM file; clients must show a certificate that one of these has signed.",
    ),
    _option(
        SECURITY,
        "share_prefix_cache",
        bool,
        False,
        "--share-prefix-cache/--no-share-prefix-cache",
        text="Let API keys reuse each other's cached prefixes; answers' times then tell what others asked.",
    ),
    _option(_LIMITS, "max_body_bytes", int, 8 << 20, "--max-body-bytes", text="Of a request's body."),
    _option(
        _LOAD,
        "max_bodies_bytes",
        int,
        1 << 30,
        "--max-bodies-bytes",
        text="Of the bodies of all requests under way; more are refused with 503.",
    ),
    _option(_LIMITS, "max_json_depth", int, 64, "--max-json-depth", text="Objects and arrays within each other."),
    _option(_LIMITS, "max_json_containers", int, 65536, "--max-json-containers", text="Objects and arrays in a body."),
    _option(_LIMITS, "max_messages", int, 4096, "--max-messages", text="Of a conversation."),
    _option(_LIMITS, "max_answers", int, 1024, "--max-answers", text="Prompts times n."),
    _option(_LIMITS, "max_answer_tokens", int, 1 << 22, "--max-answer-tokens", text="Prompts x n x max_tokens."),
    _option(_LIMITS, "max_stops", int, 16, "--max-stops", text="Stop texts."),
    _option(_LIMITS, "max_stop_chars", int, 256, "--max-stop-chars", text="Characters of a stop text."),
    _option(_LIMITS, "max_logit_bias", int, 1024, "--max-logit-bias", text="Entries of logit_bias."),
    _option(_LIMITS, "max_bad_words", int, 128, "--max-bad-words", text="Entries of bad_words."),
    _option(
        _LIMITS,
        "max_constraint_bytes",
        int,
        1 << 18,
        "--max-constraint-bytes",
        text="Of a schema, pattern, grammar or list of choices that answers are to be held to.",
    ),
    _option(
        _LOAD,
        "max_engine_requests",
        int | None,
        None,
        "--max-engine-requests",
        text="Answers in the engine at once; what it runs at once and a few to follow, when left out.",
    ),
    _option(
        _LOAD,
        "max_queue_requests",
        int,
        2048,
        "--max-queue-requests",
        text="Prompts that may wait for the engine; more are refused with 503.",
    ),
    _option(
        _LOAD,
        "max_queue_tokens",
        int,
        1 << 22,
        "--max-queue-tokens",
        text="Tokens that may wait, of prompts and expected answers; more are refused with 503.",
    ),
    _option(
        _LOAD,
        "max_concurrency",
        int | None,
        None,
        "--max-concurrency",
        text="Requests that one API key may have under way, where its line names no other number; more get 429.",
    ),
    _option(
        _LOAD,
        "request_timeout",
        float | None,
        None,
        "--request-timeout",
        text="Seconds of a request; one that waits is then refused, one that generates ends with what it has.",
    ),
    _option(
        MODELS,
        "autoload",
        bool,
        True,
        "--autoload/--no-autoload",
        text="Load a known model when a request asks for it.",
    ),
    _option(
        MODELS,
        "model_load_wait",
        float,
        60.0,
        "--model-load-wait",
        text="Seconds that a request waits for its model to be loaded; 0 refuses it at once with 503.",
    ),
    _option(MODELS, "model_load_timeout", float, 1800.0, "--model-load-timeout", text="Seconds that a load may take."),
    _option(
        MODELS,
        "model_drain_timeout",
        float,
        300.0,
        "--model-drain-timeout",
        text="Seconds that running requests get when their model is unloaded.",
    ),
    _option(
        MODELS,
        "idle_unload",
        float | None,
        None,
        "--idle-unload",
        text="Unload a model after so many seconds without requests.",
    ),
    _option(
        MODELS,
        "max_loaded_models",
        int | None,
        None,
        "--max-loaded-models",
        text="Models loaded at once; the least recently used makes room.",
    ),
    _option(
        MODELS,
        "model_memory",
        str | None,
        None,
        "--model-memory",
        text="Memory of all loaded models, weights and KV cache: bytes, or such as 40GiB; the same way.",
    ),
)


def given_server_settings(settings: ServerSettings, given: Container[str]) -> dict[str, Any]:
    """The server's settings that the command line names, by field.

    Args:
        settings: of the command line.
        given: parameters that were given.
    """
    return {option.name: getattr(settings, option.name) for option in _OPTIONS if option.name in given}


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
        from octavo.sizes import parse_bytes

        values = {option.name: arguments.pop(option.name) for option in _OPTIONS}
        for option in _OPTIONS:
            if option.annotation.__origin__ == _LIST:
                given = values.pop(option.name)
                if given:
                    values[option.name] = tuple(given)
        with reading_options():
            for name in _SIZES:
                if isinstance(values[name], str):
                    values[name] = parse_bytes(values[name], name)
            settings = ServerSettings(**values)
        command(settings=settings, **arguments)

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del wrapper.__wrapped__
    return wrapper
