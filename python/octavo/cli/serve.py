"""`octavo serve`."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import socket
import sys
from collections.abc import Container, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING

from octavo.cli.announce import Announcer
from octavo.cli.console import loading_progress
from octavo.cli.flags import reading_options
from octavo.cli.keys import key_ring
from octavo.cli.serve_plan import ServeOptions, ServePlan, check_plan, plan_serve
from octavo.config import EngineConfig
from octavo.engine.gc_policy import set_aside
from octavo.errors import ConfigError
from octavo.log_format import FORMATS, LEVELS, log_complaints
from octavo.server.access.hosts import check_exposure, check_settings
from octavo.server.models.engine_start import Progress, start_engine
from octavo.server.observability.logs import configure_logging
from octavo.server.service_manager import keep_watchdog, notify
from octavo.server.transport.listen import bind, bind_shared
from octavo.server.transport.tls import tls_context

if TYPE_CHECKING:
    from octavo.cli.api_processes import ApiProcesses
    from octavo.engine.supervisor import SupervisedEngine
    from octavo.server.access.api_keys import KeyRing
    from octavo.server.admin.routes import AdminKeys
    from octavo.server.models.model_handle import ModelHandle
    from octavo.server.settings import ServerSettings
    from octavo.server.state import ServerState

__all__ = ["serve_command"]

_LOG_LEVELS = ("critical", "error", "warning", "info", "debug", "trace")
_DRAIN_DELAY_S = 5.0


def serve_command(
    models: Sequence[str],
    file: str | None,
    config: EngineConfig,
    settings: ServerSettings,
    options: ServeOptions,
    given: Container[str],
) -> None:
    """Take the ports, load the models, serve until a signal.

    Args:
        models: `[NAME=]MODEL` each.
        file: path of a TOML file.
        config: engine settings of the command line.
        settings: of the command line.
        options: of the command line.
        given: parameters of the command line that were given; the others are the file's to say.

    Raises:
        WrongOption: the command line is wrong by itself.
        OctavoError: a port is taken or would be open to all, or a model cannot be loaded.
    """
    with reading_options():
        _check_words(options)
    with _at_fault(file):
        plan = plan_serve(models, file, config, settings, options, given)
        settings, options = plan.settings, plan.options
        _check_words(options)
        check_plan(plan)
    configure_logging(options.log_format, options.log_level)
    log_complaints()
    environment_key = os.environ.get("OCTAVO_API_KEY")
    keys = key_ring(options.api_key_file, options.api_key)
    with _at_fault(file):
        check_settings(settings, has_keys=keys.required)
    tls_context(settings)
    with ExitStack() as listening:
        listeners = [
            listening.enter_context(sock) for sock in bind_shared(options.host, options.port, options.api_processes)
        ]
        listener = listeners[0]
        check_exposure(listener.getsockname()[0], has_keys=keys.required, insecure=options.insecure)
        admin = None
        # The engine's process has no use for it.
        admin_key = os.environ.pop("OCTAVO_ADMIN_KEY", None)
        if options.admin_port is not None:
            from octavo.server.admin.routes import AdminKeys

            admin = (
                listening.enter_context(bind(options.admin_host, options.admin_port, prefix="admin_")),
                AdminKeys(admin_key, keys),
            )
        listening.pop_all()
    import uvloop

    uvloop.run(_serve(plan, keys, listeners, admin, environment_key))


def _at_fault(file: str | None) -> AbstractContextManager[None]:
    """Errors raised inside are errors of the command line, unless there is a configuration file."""
    return reading_options() if file is None else nullcontext()


def _check_words(options: ServeOptions) -> None:
    """Refuse options that are not one of their words.

    Raises:
        ConfigError: naming the option, its value and the choices.
    """
    for name, known in (
        ("uvicorn_log_level", _LOG_LEVELS),
        ("log_format", FORMATS),
        ("log_level", LEVELS),
    ):
        value = getattr(options, name)
        if value not in known:
            raise ConfigError(f"{name}: {value!r} is not one of {', '.join(known)}")


class _Starter:
    """Starts engines, and shows how far they are; the first before the server is imported."""

    def __init__(self, first: EngineConfig | None, show: Progress) -> None:
        self._show = show
        self._first = first
        self._report: Progress | None = None
        self._last: tuple[str, int, int] | None = None
        self._early = None if first is None else asyncio.ensure_future(start_engine(first, self._tell))

    def _tell(self, stage: str, done: int, total: int) -> None:
        self._show(stage, done, total)
        self._last = (stage, done, total)
        if self._report is not None:
            self._report(stage, done, total)

    async def __call__(self, config: EngineConfig, progress: Progress) -> SupervisedEngine:
        early, self._early = self._early, None
        if early is not None and config is self._first:
            self._report = progress
            if self._last is not None:
                progress(*self._last)
            return await early
        self._early = early

        def tell(stage: str, done: int, total: int) -> None:
            self._show(stage, done, total)
            progress(stage, done, total)

        return await start_engine(config, tell)

    async def close(self) -> None:
        """End an early engine that nobody asked for."""
        if self._early is not None:
            self._early.cancel()
            await asyncio.gather(self._early, return_exceptions=True)

    def quiet(self) -> None:
        """Show nothing more."""
        self._show = lambda stage, done, total: None


async def _serve(
    plan: ServePlan,
    keys: KeyRing,
    listeners: list[socket.socket],
    admin: tuple[socket.socket, AdminKeys] | None,
    environment_key: str | None,
) -> None:
    options, settings = plan.options, plan.settings
    urls = _url(listeners[0], settings), None if admin is None else _url(admin[0], settings)
    announcer = Announcer(*urls, options.shutdown_timeout, needs_key=keys.required)
    early = _early_signals()
    announcer.starting([model.id for model in plan.models], api_processes=options.api_processes)
    with ExitStack() as shown:
        show_people = shown.enter_context(loading_progress())

        def show(stage: str, done: int, total: int) -> None:
            show_people(stage, done, total)
            announcer.loading(stage, done, total)

        starter = _Starter(next((model.config for model in plan.models if model.autostart), None), show)
        # The engine's process starts now, and loads while this one imports the server.
        await asyncio.sleep(0)
        from octavo.server.admin.routes import create_admin_app
        from octavo.server.config_file import populate
        from octavo.server.lifecycle import Events, serve
        from octavo.server.state import ServerState

        watchdog = None
        try:
            state = ServerState(settings, starter, keys=keys)
            registry = state.registry
            populate(registry, plan.models, plan.aliases)
            watchdog = asyncio.ensure_future(keep_watchdog(lambda: not any(e.lost() for e in registry.entries)))
            delay = _drain_delay(options)
            processes = _api_processes(plan, environment_key, delay, listeners[1:], state)

            def announce(models: list[ModelHandle]) -> None:
                shown.close()
                starter.quiet()
                set_aside()
                if processes is not None:
                    processes.start()
                announcer.ready(models, registry)

            await serve(
                listeners[0],
                grace=options.shutdown_timeout,
                drain_delay=delay,
                log_level=options.uvicorn_log_level,
                events=Events(announce, announcer.stopping, announcer.waiting, announcer.stopped),
                state=state,
                processes=processes,
                early=early,
                admin=None if admin is None else (admin[0], create_admin_app(state, admin[1], options.admin_host)),
            )
        finally:
            notify("STOPPING=1")
            if watchdog is not None:
                watchdog.cancel()
            await starter.close()


def _early_signals() -> list[signal.Signals]:
    """Signals that arrive before the server handles them."""
    early: list[signal.Signals] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, early.append, number)
    return early


def _drain_delay(options: ServeOptions) -> float:
    if options.drain_delay is not None:
        return options.drain_delay
    return 0.0 if sys.stderr.isatty() else _DRAIN_DELAY_S


def _api_processes(
    plan: ServePlan, environment_key: str | None, delay: float, listeners: list[socket.socket], state: ServerState
) -> ApiProcesses | None:
    """The other processes that answer HTTP, one a listener; None without any."""
    if not listeners:
        return None
    from octavo.cli.api_processes import ApiProcesses
    from octavo.server.apis.metrics import exposition

    state.siblings = ApiProcesses(plan, environment_key, delay, listeners, state, functools.partial(exposition, state))
    return state.siblings


def _url(listener: socket.socket, settings: ServerSettings) -> str:
    host, port = listener.getsockname()[:2]
    shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)  # noqa: S104
    return f"{'https' if settings.ssl_certfile else 'http'}://{shown}:{port}"
