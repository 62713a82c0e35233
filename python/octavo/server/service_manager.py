"""Notifies systemd of the server's state, if a unit of `Type=notify` started it."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable

__all__ = ["keep_watchdog", "notify"]


def notify(state: str) -> bool:
    """Send a state such as `READY=1` or `STOPPING=1`.

    Returns:
        False if systemd does not expect notifications or does not listen.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    # A leading @ stands for the zero byte of an abstract socket name.
    path = address.replace("@", "\0", 1) if address.startswith("@") else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as connection:
            connection.setblocking(False)
            connection.sendto(state.encode(), path)
    except OSError:
        return False
    return True


async def keep_watchdog(is_alive: Callable[[], bool]) -> None:
    """Send systemd's watchdog notification twice in each `WatchdogSec=`, until cancelled.

    If the event loop hangs, or only a restart helps, systemd restarts the server. Returns at once if the unit has no
    watchdog.

    Args:
        is_alive: the result of `/livez`.
    """
    text = os.environ.get("WATCHDOG_USEC", "")
    if not text.isdecimal() or os.environ.get("WATCHDOG_PID", str(os.getpid())) != str(os.getpid()):
        return
    while True:
        # A lost notification is repeated in time.
        if is_alive():
            notify("WATCHDOG=1")
        await asyncio.sleep(int(text) / 2e6)
