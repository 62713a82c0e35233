"""Tells systemd where the server stands, where a unit of `Type=notify` started it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

__all__ = ["keep_watchdog", "notify"]


def notify(state: str) -> bool:
    """Send such as `READY=1` or `STOPPING=1`.

    Returns:
        False when nobody asked to be told, or nobody listens.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    # An @ stands for the zero byte that begins an abstract name.
    path = address.replace("@", "\0", 1) if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.setblocking(False)
            connection.sendto(state.encode(), path)
    except OSError:
        return False
    return True


async def keep_watchdog(is_alive: Callable[[], bool]) -> None:
    """Tell systemd that the server lives, twice as often as a unit with `WatchdogSec=` asks; for ever.

    Where the event loop stands still, or only a new process helps, systemd ends this one and starts another. Returns
    where nobody asked.

    Args:
        is_alive: what `/livez` answers.
    """
    text = os.environ.get("WATCHDOG_USEC", "")
    if not text.isdecimal() or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return
    while True:
        # A word that is lost, as systemd was behind, is said again in time.
        if is_alive():
            notify("WATCHDOG=1")
        await asyncio.sleep(int(text) / 2e6)
