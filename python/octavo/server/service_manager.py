"""Tells systemd where the server stands, where a unit of `Type=notify` started it."""

from __future__ import annotations

import os
import socket

__all__ = ["notify"]


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
