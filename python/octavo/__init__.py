"""Octavo serves large language models.

    from octavo import LLM, SamplingParams

    llm = LLM("demo")
    print(llm.generate("The capital of France is", SamplingParams(temperature=0))[0].outputs[0].text)

Importing this package costs milliseconds; torch and the rest load when `LLM` or `AsyncEngine` is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo._core import __version__
from octavo.errors import OctavoError

if TYPE_CHECKING:
    from octavo.config import EngineConfig
    from octavo.engine.async_engine import AsyncEngine
    from octavo.engine.llm import LLM
    from octavo.engine.outputs import CompletionOutput, RequestOutput
    from octavo.sampling_params import SamplingParams

__all__ = [
    "LLM",
    "AsyncEngine",
    "CompletionOutput",
    "EngineConfig",
    "OctavoError",
    "RequestOutput",
    "SamplingParams",
    "__version__",
]

_LAZY = {
    "LLM": "octavo.engine.llm",
    "AsyncEngine": "octavo.engine.async_engine",
    "CompletionOutput": "octavo.engine.outputs",
    "EngineConfig": "octavo.config",
    "RequestOutput": "octavo.engine.outputs",
    "SamplingParams": "octavo.sampling_params",
}


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module 'octavo' has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(module), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
