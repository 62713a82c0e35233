"""The commands and their options; what they do is imported when they run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from octavo.cli.help import GroupedHelp
from octavo.cli.options import engine_options
from octavo.cli.server_options import LOGS, MODELS, SECURITY, server_options

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.server.settings import ServerSettings

__all__ = ["app"]

app = typer.Typer(
    name="octavo",
    help="Serve and run large language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # rich doubles the time of --help
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[str, typer.Argument(help="`demo`, a folder, a .gguf file or a Hugging Face repository.")]
MaxTokens = Annotated[int | None, typer.Option("--max-tokens", help="Output tokens, at most.")]
Temperature = Annotated[float | None, typer.Option("--temperature", help="0 takes the likeliest token.")]
TopP = Annotated[float | None, typer.Option("--top-p", help="Keep the likeliest tokens that make up this share.")]
TopK = Annotated[int | None, typer.Option("--top-k", help="Keep the k likeliest tokens.")]
SamplingSeed = Annotated[int | None, typer.Option("--sampling-seed", help="Makes the answer reproducible.")]
System = Annotated[str | None, typer.Option("--system", help="The system message.")]

Models = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[NAME=]MODEL...",
        help="`demo`, a folder, a .gguf file or a Hugging Face repository, each with a name in the API if need be, "
        "such as chat@v1=FOLDER.",
    ),
]
ConfigFile = Annotated[
    str | None,
    typer.Option("--config", help="TOML file of the server, its models and aliases; options go before it."),
]
Host = Annotated[str, typer.Option("--host", help="Address to listen on.")]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes any free one.")]
ServedModelName = Annotated[
    list[str] | None,
    typer.Option("--served-model-name", help="Name in the API; several times for several names."),
]
ShutdownTimeout = Annotated[
    float, typer.Option("--shutdown-timeout", min=0, help="Seconds that running answers get at the end.")
]
DrainDelay = Annotated[
    float | None,
    typer.Option(
        "--drain-delay",
        min=0,
        help="Seconds after SIGTERM in which /readyz is 503 and requests are still taken; 5, on a terminal 0.",
    ),
]
ApiProcesses = Annotated[
    int,
    typer.Option("--api-processes", min=1, max=64, help="Processes that answer HTTP; one engine serves them all."),
]
AdminPort = Annotated[
    int | None,
    typer.Option(
        "--admin-port",
        min=0,
        max=65535,
        help="Load, unload and swap models through a listener of its own, with the key of OCTAVO_ADMIN_KEY.",
        rich_help_panel=MODELS,
    ),
]
AdminHost = Annotated[str, typer.Option("--admin-host", help="Address of that listener.", rich_help_panel=MODELS)]
LogFormat = Annotated[
    str,
    typer.Option(
        "--log-format", help="json, console, or auto: console on a terminal, else json.", rich_help_panel=LOGS
    ),
]
LogLevel = Annotated[
    str, typer.Option("--log-level", help="critical, error, warning, info or debug.", rich_help_panel=LOGS)
]
UvicornLogLevel = Annotated[
    str,
    typer.Option(
        "--uvicorn-log-level",
        help="Of the HTTP library: critical, error, warning, info, debug or trace.",
        rich_help_panel=LOGS,
    ),
]
ApiKeyFile = Annotated[
    str | None,
    typer.Option(
        "--api-key-file",
        help="File of API keys, `NAME KEY [OPTION=VALUE ...]` a line; a KEY is 8 to 512 visible ASCII characters. "
        "Read again when it changes.",
        rich_help_panel=SECURITY,
    ),
]
ApiKey = Annotated[
    list[str] | None,
    typer.Option(
        "--api-key",
        help="An API key of 8 to 512 visible ASCII characters; may be repeated. "
        "Others on this machine can see it: prefer a file or OCTAVO_API_KEY.",
        rich_help_panel=SECURITY,
    ),
]
Insecure = Annotated[
    bool,
    typer.Option("--insecure", help="Answer other machines without API keys.", rich_help_panel=SECURITY),
]

_BENCH_HELP = (
    "The workload: offline, latency, prefill, shared, short, start, step, serve, memory, W1, W2, W3 or W4; "
    "`octavo bench list` says what each measures."
)

_SERVE_EPILOG = """Examples:
  octavo serve demo
  octavo serve Qwen/Qwen3-0.6B --served-model-name qwen --max-model-len 8192
  octavo serve chat@v1=/models/first chat@v2=/models/second
  octavo serve --config serve.toml
  octavo serve demo --host 0.0.0.0 --api-key-file keys --log-format json

Exit codes:
  0  after SIGTERM, SIGINT, or SIGHUP of a terminal that was closed
  1  it cannot serve: a model or a file is refused, a port is taken, keys are missing
  2  the command line is wrong: an option, or its value"""


def _print_version(asked: bool) -> None:
    if asked:
        from octavo._core import __version__

        typer.echo(f"octavo {__version__}")
        raise typer.Exit


def _given(context: typer.Context) -> set[str]:
    """The parameters that the command line names."""
    return {name for name in context.params if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"}


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command(cls=GroupedHelp, epilog=_SERVE_EPILOG)
@engine_options
@server_options
def serve(
    context: typer.Context,
    config: EngineConfig,
    settings: ServerSettings,
    models: Models = None,
    config_file: ConfigFile = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    served_model_name: ServedModelName = None,
    shutdown_timeout: ShutdownTimeout = 30.0,
    drain_delay: DrainDelay = None,
    api_processes: ApiProcesses = 1,
    admin_port: AdminPort = None,
    admin_host: AdminHost = "127.0.0.1",
    log_format: LogFormat = "auto",
    log_level: LogLevel = "info",
    uvicorn_log_level: UvicornLogLevel = "warning",
    api_key_file: ApiKeyFile = None,
    api_key: ApiKey = None,
    insecure: Insecure = False,
) -> None:
    """Serve models over the OpenAI API."""
    from octavo.cli.serve import serve_command
    from octavo.cli.serve_plan import ServeOptions

    options = ServeOptions(
        host=host,
        port=port,
        admin_host=admin_host,
        admin_port=admin_port,
        shutdown_timeout=shutdown_timeout,
        drain_delay=drain_delay,
        uvicorn_log_level=uvicorn_log_level,
        log_format=log_format,
        log_level=log_level,
        api_key_file=api_key_file,
        api_key=tuple(api_key or ()),
        insecure=insecure,
        api_processes=api_processes,
    )
    serve_command(models or [], config_file, config, settings, options, _given(context))


@app.command(cls=GroupedHelp)
@engine_options
def run(
    model: Model,
    config: EngineConfig,
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    raw: Annotated[bool, typer.Option("--raw", help="Complete the text as it is, without the chat template.")] = False,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    sampling_seed: SamplingSeed = None,
    stop: Annotated[
        list[str] | None, typer.Option("--stop", help="Text that ends the answer; may be repeated.")
    ] = None,
) -> None:
    """Answer one prompt on standard output, as it is generated."""
    from octavo.cli.run import run_command

    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": sampling_seed,
        "stop": stop,
    }
    run_command(config, prompt, raw, system, sampling)


@app.command(cls=GroupedHelp)
@engine_options
def chat(
    model: Model,
    config: EngineConfig,
    system: System = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    top_k: TopK = None,
    sampling_seed: SamplingSeed = None,
) -> None:
    """Chat in the terminal; /help there lists what else it understands."""
    from octavo.cli.chat import chat_command

    sampling = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "seed": sampling_seed,
    }
    chat_command(config, system, sampling)


@app.command(cls=GroupedHelp)
@engine_options
def plan(
    model: Model,
    config: EngineConfig,
    json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Show what memory a model would take, before loading it."""
    from octavo.cli.plan import plan_command

    plan_command(config, json)


@app.command(cls=GroupedHelp)
@engine_options
def bench(
    context: typer.Context,
    config: EngineConfig,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help=_BENCH_HELP, show_default=False)] = None,
    model: Annotated[
        str, typer.Option("--model", help="As for `serve`; with --base-url, the name to ask it for.")
    ] = "demo",
    runs: Annotated[int, typer.Option("--runs", min=1, help="Repeats; the medians are reported.")] = 3,
    json: Annotated[bool, typer.Option("--json", help="One JSON object and nothing else.")] = False,
    plot: Annotated[
        str | None, typer.Option("--plot", help="Draw the results into this file: .png, .svg or .pdf.")
    ] = None,
    concurrency: Annotated[
        list[int] | None,
        typer.Option("--concurrency", min=1, help="serve: streaming clients at once; may be repeated."),
    ] = None,
    request_rate: Annotated[
        list[float] | None,
        typer.Option("--request-rate", help="serve: requests a second, Poisson; may be repeated."),
    ] = None,
    num_prompts: Annotated[int | None, typer.Option("--num-prompts", min=1, help="serve: requests of one run.")] = None,
    base_url: Annotated[
        str | None, typer.Option("--base-url", help="serve: an endpoint that runs already, such as http://host:8000.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            help="serve: that endpoint's key; others on this machine can see it: prefer OCTAVO_API_KEY or "
            "OPENAI_API_KEY in the environment.",
        ),
    ] = None,
    ttft_slo_ms: Annotated[
        float | None, typer.Option("--ttft-slo-ms", min=0, help="serve: goodput counts requests within it.")
    ] = None,
    tpot_slo_ms: Annotated[
        float | None, typer.Option("--tpot-slo-ms", min=0, help="serve: goodput counts requests within it.")
    ] = None,
    batch: Annotated[list[int] | None, typer.Option("--batch", min=1, help="latency: batch; may be repeated.")] = None,
) -> None:
    """Measure a standard workload."""
    from octavo.bench.command import BenchOptions, bench_command

    if name is None:
        context.fail("name a workload, such as `octavo bench W2`; `octavo bench list` says what each measures")
    given = _given(context)
    options = BenchOptions(
        runs=runs,
        concurrency=tuple(concurrency or ()),
        request_rate=tuple(request_rate or ()),
        num_prompts=num_prompts,
        base_url=base_url,
        model=model if "model" in given else None,
        api_key=api_key,
        batch=tuple(batch or ()),
        ttft_slo_ms=ttft_slo_ms,
        tpot_slo_ms=tpot_slo_ms,
    )
    bench_command(name, config, options, json=json, plot=plot, given=given)
