"""`octavo serve` in a process of its own, for benches."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from octavo.cli.options import config_arguments
from octavo.config import EngineConfig
from octavo.errors import ConfigError

__all__ = ["ServerProcess", "server_process"]

_READY = re.compile(r"Serving .* at (http://\S+) ")
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
    command = [sys.executable, "-m", "octavo", "serve", "--port", "0", *config_arguments(config), "--", config.model]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # noqa: S603
    assert process.stdout is not None
    assert process.stderr is not None
    complaints: list[str] = []
    # Both pipes are read to their end, so that the server never waits for us.
    readers = [threading.Thread(target=complaints.extend, args=(process.stderr,), daemon=True)]
    readers[0].start()
    try:
        found = next((match for line in process.stdout if (match := _READY.search(line))), None)
        if found is None:
            process.wait(_STOP_SECONDS)
            readers[0].join(_STOP_SECONDS)
            reason = complaints[-1].strip().removeprefix("error: ") if complaints else "it gave no reason"
            raise ConfigError(f"serve: the server did not start: {reason}")
        readers.append(threading.Thread(target=process.stdout.read, daemon=True))
        readers[1].start()
        yield ServerProcess(found.group(1), process.pid)
    finally:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for reader in readers:
            reader.join()
        process.stdout.close()
        process.stderr.close()
