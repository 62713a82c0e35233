"""Free memory for this process, as Linux reports it."""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["free_memory"]

_NO_LIMIT = 1 << 60


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that can be taken without swapping: the machine's, or less under a control group's limit.

    Args:
        root: where `proc` and `sys` are mounted.
    """
    return max(min(_machine(root), _control_groups(root)), 0)


def _machine(root: Path) -> int:
    """Memory the kernel says is available; half of all there is on systems that do not say."""
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _control_groups(root: Path) -> int:
    """The least that this process's control groups, and those above them, leave free."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return _NO_LIMIT
    free = _NO_LIMIT
    mount = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if not controllers:
            free = min(free, _walk(mount, path, "memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            free = min(free, _walk(mount / "memory", path, *names))
    return free


def _walk(mount: Path, path: str, limit: str, usage: str, reclaimable: str) -> int:
    """The least free memory of a group and its parents; inside a container the group's own path may not exist."""
    group = mount / path.lstrip("/")
    free = _NO_LIMIT
    while True:
        most, used = _number(group / limit), _number(group / usage)
        if most is not None and used is not None and most < _NO_LIMIT:
            free = min(free, most - used + _statistic(group / "memory.stat", reclaimable))
        if group == mount or mount not in group.parents:
            return free
        group = group.parent


def _number(path: Path) -> int | None:
    """The number in a file; None where there is none, as for `max`."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _statistic(path: Path, name: str) -> int:
    """One line of a statistics file; 0 where it is missing."""
    try:
        for line in path.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0
