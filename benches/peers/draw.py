"""Octavo's own workloads, loaded by path: a peer's environment does not hold the package."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

_PATH = Path(__file__).resolve().parents[2] / "python/octavo/bench/workloads.py"


def demo_workloads() -> Callable[[str, int], list[tuple[list[int], int]]]:
    """`octavo.bench.workloads.demo`."""
    spec = importlib.util.spec_from_file_location("workloads", _PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.demo
