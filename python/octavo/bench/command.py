"""`octavo bench NAME`: runs a workload and reports it."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import typer

from octavo.bench import workloads
from octavo.cli.options import given_settings
from octavo.config import EngineConfig
from octavo.errors import ConfigError

__all__ = [
    "BENCHES",
    "SERVE_REQUESTS",
    "Bench",
    "BenchOptions",
    "Results",
    "bench_command",
    "check_context",
    "end_progress",
    "note",
    "progress",
    "run_bench",
]

Results = list[dict[str, Any]]

_CLEAR = "\r\x1b[K"
# File formats of charts.
_DRAWN = (".png", ".svg", ".pdf")


@dataclass(frozen=True)
class BenchOptions:
    """Options of a bench besides the engine's settings.

    Attributes:
        runs: repeats, each with fresh prompts; medians are reported.
        concurrency: `serve`: streaming clients at once, one result each.
        request_rate: `serve`: requests a second of a Poisson process, one result each.
        num_prompts: `serve`: requests of one run.
        base_url: `serve`: an endpoint that runs already.
        model: `serve`: the name to ask that endpoint for; the first that it serves when None.
        api_key: `serve`: that endpoint's key; of the environment when None.
        batch: `latency`: batch sizes, one result each.
        ttft_slo_ms: `serve`: time to the first token that a good request keeps.
        tpot_slo_ms: `serve`: time per output token that a good request keeps.
        workload: the bench's name; `run_bench` sets it.
        context: tokens of prompt and output together that its longest request has; `run_bench` sets it.
    """

    runs: int = 3
    concurrency: tuple[int, ...] = ()
    request_rate: tuple[float, ...] = ()
    num_prompts: int | None = None
    base_url: str | None = None
    model: str | None = None
    api_key: str | None = None
    batch: tuple[int, ...] = ()
    ttft_slo_ms: float | None = None
    tpot_slo_ms: float | None = None
    workload: str = ""
    context: int = 0


@dataclass(frozen=True)
class Bench:
    """A workload.

    Attributes:
        module: of this package, that measures it.
        function: of that module.
        text: what it measures.
        takes: options that not every workload takes.
        requests: its longest ones are among them; None without a model.
        count: how many of them are asked when `num_prompts` does not say; all when None.
    """

    module: str
    function: str
    text: str
    takes: frozenset[str] = frozenset({"runs", "model"})
    requests: Callable[[], list[workloads.Request]] | None = None
    count: int | None = None

    def context(self, options: BenchOptions) -> int:
        """Tokens of prompt and output of the longest request."""
        if self.requests is None:
            return 0
        requests = self.requests()
        if options.num_prompts is not None and options.num_prompts > len(requests):
            raise ConfigError(
                f"num_prompts: {options.num_prompts} is more than the {len(requests)} requests of the workload"
            )
        return workloads.context([workloads.WARM_UP, *requests[: options.num_prompts or self.count]])


_SERVING = frozenset(
    {"runs", "model", "concurrency", "request_rate", "num_prompts", "base_url", "api_key", "ttft_slo_ms", "tpot_slo_ms"}
)
# Of one run of `serve`.
SERVE_REQUESTS = 64
_OF_SOME = _SERVING | {"batch"}
# Engine settings that apply without a model.
_OF_THE_CORE = frozenset({"scheduling_policy", "enable_prefix_caching"})
# Workloads of the demo model have two names.
_DEMO = {"demo-offline": "W1", "demo-latency": "W2", "demo-shared": "W3", "demo-serve": "W4"}
BENCHES: dict[str, Bench] = {
    "offline": Bench(
        "throughput",
        "offline",
        "256 requests at once, prompt and output U[100, 1024]",
        requests=workloads.offline,
    ),
    "latency": Bench(
        "latency",
        "latency",
        "batches of prompts of 1024 tokens: first token, time per output token",
        frozenset({"runs", "model", "batch"}),
        requests=lambda: workloads.latency(1, 129),
    ),
    # Prompts that do not fit are left out.
    "prefill": Bench(
        "latency", "prefill", "one prompt of 512, 2048, 8192 tokens", requests=lambda: workloads.prefill(512)
    ),
    "shared": Bench(
        "throughput", "shared", "256 requests that share 4096 tokens", requests=lambda: workloads.shared()[1]
    ),
    "short": Bench(
        "throughput",
        "short",
        "2048 requests of 16 + 16 tokens: the host's own cost",
        requests=workloads.short,
    ),
    "start": Bench(
        "start",
        "start",
        "from process start to the first token",
        requests=lambda: [(prompt, 1) for prompt, _ in workloads.demo("W2")],
    ),
    "step": Bench("step", "step", "the core alone, without a model", frozenset({"runs"})),
    "serve": Bench(
        "serve",
        "serve",
        "streaming clients against an OpenAI endpoint",
        _SERVING,
        requests=workloads.offline,
        count=SERVE_REQUESTS,
    ),
    "memory": Bench(
        "memory",
        "memory",
        "resident memory against the plan; a long run without a model",
        frozenset({"model"}),
        requests=lambda: workloads.demo("W4"),
    ),
    "W1": Bench(
        "throughput",
        "demo_offline",
        "64 requests at once, prompt U[64, 512], output U[32, 128]",
        requests=lambda: workloads.demo("W1"),
    ),
    "W2": Bench("latency", "demo_latency", "one request, 128 + 128 tokens", requests=lambda: workloads.demo("W2")),
    "W3": Bench(
        "throughput", "demo_shared", "32 requests that share 1024 tokens", requests=lambda: workloads.demo("W3")
    ),
    "W4": Bench(
        "serve",
        "demo_serve",
        "48 requests from 8 streaming clients",
        _SERVING,
        requests=lambda: workloads.demo("W4"),
    ),
}


def bench_command(
    name: str,
    config: EngineConfig,
    options: BenchOptions,
    *,
    json: bool,
    plot: str | None,
    given: Collection[str] = (),
) -> None:
    """Run a bench and print a table, or with `json` a single object.

    Args:
        name: of the bench, or `list`.
        config: the engine.
        options: the bench's own.
        json: print an object, no table.
        plot: draw a chart into this file.
        given: parameters that the command line names; those that the bench does not take are refused.

    Raises:
        OctavoError: no such bench, an option that it does not take, or the model refuses it.
    """
    if name == "list":
        for option in sorted({*given} - {"name"}):
            raise ConfigError(f"{option}: `octavo bench list` takes no options")
        names = {bench: f"{BENCHES[bench].text} (also: {alias})" for alias, bench in _DEMO.items()}
        for known, bench in BENCHES.items():
            typer.echo(f"{known:9} {names.get(known, bench.text)}")
        return
    _refuse_what_is_not_taken(name, config, options, given)
    if plot is not None:
        _need_matplotlib()
        _check_plot(Path(plot))
    report = run_bench(name, config, options)
    if json:
        typer.echo(msgspec.json.encode(report).decode())
    else:
        from octavo.bench.report import print_table

        print_table(report)
    if plot is not None:
        from octavo.bench.report import draw

        draw(report, plot)


def run_bench(name: str, config: EngineConfig, options: BenchOptions) -> dict[str, Any]:
    """The report of a bench.

    Against an endpoint that runs already `model` is what answered, and there is no `config`.

    Raises:
        OctavoError: no such bench, or the model refuses it.
    """
    from octavo._core import __version__
    from octavo.bench.machine import machine

    bench = _find(name)
    model = None if bench.requests is None else config.model
    settings = msgspec.to_builtins(config)
    options = replace(options, workload=name, context=bench.context(options))
    if options.base_url is not None and "base_url" in bench.takes:
        from octavo.bench.client import find_served

        assert options.base_url is not None
        model = find_served(options.base_url, options.model, options.api_key, options.context, options.workload)
        options, settings = replace(options, model=model), None
    elif config.max_model_len is not None:
        check_context(options, config.max_model_len)
    run: Callable[[EngineConfig, BenchOptions], Results] = getattr(
        importlib.import_module(f"octavo.bench.{bench.module}"), bench.function
    )
    where = machine()
    try:
        results = run(config, options)
    finally:
        end_progress()
    return {
        "bench": name,
        "version": __version__,
        "machine": where,
        "model": model,
        "config": settings,
        "results": results,
    }


def check_context(options: BenchOptions, max_model_len: int) -> None:
    """Refuse a context that is too short for the longest request of a workload.

    Raises:
        ConfigError: it is too short.
    """
    if max_model_len < options.context:
        raise ConfigError(
            f"max_model_len: {max_model_len} is too small for {options.workload}, whose longest request has "
            f"{options.context} tokens of prompt and output together; give {options.context} or more"
        )


def _find(name: str) -> Bench:
    bench = BENCHES.get(_DEMO.get(name, name))
    if bench is None:
        raise ConfigError(
            f"bench: there is no {name!r}; there are {', '.join([*BENCHES, *_DEMO])}; "
            "`octavo bench list` says what each measures"
        )
    return bench


def _refuse_what_is_not_taken(name: str, config: EngineConfig, options: BenchOptions, given: Collection[str]) -> None:
    bench = _find(name)
    for option in sorted(_OF_SOME.intersection(given) - bench.takes):
        takers = [known for known, other in BENCHES.items() if option in other.takes]
        raise ConfigError(f"{option}: {name} does not take it; {_listed(takers)}")
    if bench.requests is None:
        for setting in sorted(given_settings(config, given).keys() - _OF_THE_CORE):
            raise ConfigError(f"{setting}: {name} runs without a model; remove it")
    if options.base_url is not None:
        for setting in given_settings(config, given):
            raise ConfigError(f"{setting}: does not apply to the running server at --base-url; remove it")
    elif options.api_key is not None:
        raise ConfigError("api_key: only for a server at --base-url; the server that the bench starts needs none")


def _listed(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last} do" if first else f"{last} does"


def progress(text: str) -> None:
    """Show on standard error what is running.

    On a terminal the next line replaces it. Nothing is drawn while it runs: that would take time from what is measured.
    """
    if _on_terminal():
        width = shutil.get_terminal_size().columns - 1
        sys.stderr.write(f"{_CLEAR}{text[:width]}")
    else:
        sys.stderr.write(text + "\n")
    sys.stderr.flush()


def end_progress() -> None:
    """Clear the progress line."""
    if _on_terminal():
        sys.stderr.write(_CLEAR)
        sys.stderr.flush()


def note(text: str) -> None:
    """Print a note beside the report."""
    end_progress()
    sys.stderr.write(text + "\n")


def _on_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"


def _check_plot(file: Path) -> None:
    if file.suffix.lower() not in _DRAWN:
        raise ConfigError(f"plot: {str(file)!r} does not end in {', '.join(_DRAWN[:-1])} or {_DRAWN[-1]}")
    if not file.parent.is_dir():
        raise ConfigError(f"plot: there is no folder {str(file.parent)!r} to draw {file.name!r} into; make it first")
    try:
        if file.exists():
            file.open("ab").close()
        else:
            tempfile.TemporaryFile(dir=file.parent).close()
    except OSError as error:
        raise ConfigError(f"plot: {str(file)!r} cannot be written ({error.strerror}); name another file") from None


def _need_matplotlib() -> None:
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        raise ConfigError("plot: requires matplotlib; pip install 'octavo[plot]'") from None
