"""The engine's settings as command line options, under vLLM's names, once for every command."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Container
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer

from octavo.cli.flags import reading_options
from octavo.sizes import parse_bytes

if TYPE_CHECKING:
    from octavo.config import EngineConfig

__all__ = ["config_arguments", "engine_options", "given_settings", "parse_bytes"]

_PANEL = "Engine"


def _option(kind: Any, default: Any, *names: str, text: str) -> inspect.Parameter:
    return inspect.Parameter(
        names[0].split("/")[0].lstrip("-").replace("-", "_"),
        inspect.Parameter.KEYWORD_ONLY,
        default=default,
        annotation=Annotated[kind, typer.Option(*names, help=text, rich_help_panel=_PANEL)],
    )


_OPTIONS = (
    _option(str | None, None, "--tokenizer", text="Folder, file or repository of the tokenizer."),
    _option(str, "auto", "--dtype", text="auto, bfloat16, float16 or float32."),
    _option(str, "auto", "--device", text="auto, cpu or cuda."),
    _option(
        str,
        "auto",
        "--load-format",
        text="auto; dummy: random weights from a config.json alone; fake: no model, for tests.",
    ),
    _option(int | None, None, "--max-model-len", text="Tokens of prompt and output together."),
    _option(
        int | None,
        None,
        "--max-num-seqs",
        text="Sequences that run at once; 256 on a CPU and up to 1024 on a GPU when left out.",
    ),
    _option(
        int | None,
        None,
        "--max-num-batched-tokens",
        text="Tokens computed in one step, at most; 2048 on a CPU and 8192 on a GPU when left out.",
    ),
    _option(int, 16, "--block-size", text="Tokens a KV block; a multiple of 16."),
    _option(
        str,
        "auto",
        "--kv-cache-dtype",
        text="auto: as the activations; fp8, or fp8_e4m3: half the memory (GPU only).",
    ),
    _option(int | None, None, "--num-gpu-blocks-override", text="Blocks of the KV cache; planned when left out."),
    _option(float, 0.9, "--gpu-memory-utilization", text="Share of the device's free memory to take, at most."),
    _option(
        str | None,
        None,
        "--kv-cache-memory",
        text="Size of the KV cache: bytes, or such as 512MiB; within the share.",
    ),
    _option(str, "fcfs", "--scheduling-policy", text="fcfs or priority."),
    _option(
        bool,
        True,
        "--enable-prefix-caching/--no-enable-prefix-caching",
        text="Reuse the blocks of equal prefixes.",
    ),
    _option(int, 0, "--seed", text="Seeds the sampling of requests without a seed of their own."),
    _option(int | None, None, "--num-threads", text="CPU threads; the physical cores when left out."),
    _option(float, 30.0, "--stall-timeout", text="Seconds a step may stand still before the engine is restarted."),
    _option(int, 5, "--restart-limit", text="Quick failures in a row after which the engine is given up."),
    _option(bool, False, "--trust-remote-code", text="Refused: Octavo never runs code from model files."),
)
_NO_MODEL = "demo"  # of a command that names several: it replaces it
_CONFIG_NAMES = {"num_gpu_blocks_override": "num_blocks"}


def engine_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command all engine options; it gets them as one `EngineConfig` named `config`.

    The command's own `model` parameter becomes the config's model; a `served_model_name` is passed on too.
    """
    own = inspect.signature(command)
    # EngineConfig is not imported before a command runs: --help is to be quick.
    hints = get_type_hints(command, localns={"EngineConfig": object}, include_extras=True)
    parameters = [
        parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY)
        for name, parameter in own.parameters.items()
        if name != "config"
    ]
    parameters += _OPTIONS

    @functools.wraps(command)
    def wrapper(**arguments: Any) -> None:
        settings = {_CONFIG_NAMES.get(option.name, option.name): arguments.pop(option.name) for option in _OPTIONS}
        with reading_options():
            config = _config(arguments, settings)
        command(config=config, **arguments)

    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    wrapper.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    del wrapper.__wrapped__
    return wrapper


def config_arguments(config: EngineConfig) -> list[str]:
    """The options that give `config` again; those at their default are left out."""
    arguments: list[str] = []
    for option in _OPTIONS:
        value = getattr(config, _CONFIG_NAMES.get(option.name, option.name))
        if value == option.default:
            continue
        flag = "--" + option.name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(flag if value else f"--no-{flag[2:]}")
        else:
            arguments += [flag, str(value)]
    for name in config.served_model_name:
        arguments += ["--served-model-name", name]
    return arguments


def given_settings(config: EngineConfig, given: Container[str]) -> dict[str, Any]:
    """The engine settings that the command line names, by field.

    Args:
        config: of the command line.
        given: parameters that were given.
    """
    fields = [_CONFIG_NAMES.get(option.name, option.name) for option in _OPTIONS if option.name in given]
    return {field: getattr(config, field) for field in fields}


def _config(arguments: dict[str, Any], settings: dict[str, Any]) -> EngineConfig:
    from octavo.config import EngineConfig

    names = arguments.get("served_model_name") or ()
    return EngineConfig.of(model=arguments.get("model", _NO_MODEL), served_model_name=tuple(names), **settings)
