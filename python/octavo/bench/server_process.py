"""`octavo serve` in a process of its own, for benches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from octavo.cli.options import config_arguments
from octavo.config import EngineConfig
from octavo.errors import ConfigError

__all__ = ["ServerProcess", "server_process"]

_STOP_SECONDS = 30.0


class ServerProcess:
    """A running server.

    Attributes:
        base_url: where it answers.
        pid: of its HTTP process; the engine's is a child of it.
    """

    def __init__(self, base_url: str, pid: int) -> None:
        self.base_url = base_url
        self.pid = pid


@contextmanager
def server_process(config: EngineConfig) -> Iterator[ServerProcess]:
    """Start `octavo serve` on a free port of 127.0.0.1, wait until it is ready, stop it at the end.

    Raises:
        ConfigError: it could not start; with its own reason.
    """
    command = [sys.executable, "-m", "octavo", "serve", "--port", "0", "--log-format", "json"]
    command += [*config_arguments(config), "--", config.model]
    # Keys of the environment are for other servers: this one answers its own bench alone.
    environment = {name: value for name, value in os.environ.items() if name != "OCTAVO_API_KEY"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)  # noqa: S603
    assert process.stderr is not None
    reader = None
    try:
        message = "it gave no reason"
        for line in process.stderr:
            said = json.loads(line)
            message = said["msg"]
            if message == "ready":
                break
        else:
            process.wait(_STOP_SECONDS)
            raise ConfigError(f"serve: the server did not start: {message}")
        # The log is read to its end.
        reader = threading.Thread(target=process.stderr.read, daemon=True)
        reader.start()
        yield ServerProcess(said["address"], process.pid)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if reader is not None:
            reader.join()
        process.stderr.close()
