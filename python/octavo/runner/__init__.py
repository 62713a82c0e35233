"""Runs the steps that the core plans. What is needed to build a runner loads when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from octavo.runner.runner_builder import build_runner, plan_model

__all__ = ["build_runner", "plan_model"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'octavo.runner' has no attribute {name!r}")
    return getattr(importlib.import_module("octavo.runner.runner_builder"), name)
