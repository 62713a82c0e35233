"""The machine on which a figure was measured."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["machine"]

_TOOL_TIMEOUT_S = 30.0


def machine() -> dict[str, Any]:
    """Processor, memory and versions, for comparing figures."""
    from octavo import _core

    info = _core.cpu_info()
    return {
        "gpus": _gpus(),
        "processor": _field(Path("/proc/cpuinfo"), "model name") or platform.processor(),
        "architecture": platform.machine(),
        "isa": info["isa"],
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30), 1),
        "load_average": round(os.getloadavg()[0], 2),
        "system": f"{platform.system()} {platform.release()}",
        "build": _core.build_info()["profile"],
        "python": platform.python_version(),
        "torch": _version("torch"),
        "triton": _version("triton"),
    }


def _gpus() -> list[str]:
    """Name, memory and driver of each GPU from nvidia-smi; importing torch would take seconds."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    query = [tool, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=_TOOL_TIMEOUT_S, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return []
    return told.stdout.strip().splitlines() if told.returncode == 0 else []


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _field(path: Path, name: str) -> str:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")
