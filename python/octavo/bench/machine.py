"""Where a figure was measured."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

__all__ = ["machine"]


def machine() -> dict[str, Any]:
    """Processor, memory and versions, for whoever compares figures."""
    from octavo import _core

    info = _core.cpu_info()
    return {
        "processor": _field(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        "architecture": platform.machine(),
        "isa": info["isa"],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
        "load_average": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "build": _core.build_info()["profile"],
        "python": platform.python_version(),
    }


def _field(path: Path, name: str) -> str:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
