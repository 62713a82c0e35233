"""Which device an engine runs on, and what is wrong with it if it cannot. Imports torch only where a GPU may be."""

from __future__ import annotations

import importlib.util
import logging
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from octavo import _core
from octavo.errors import ConfigError
from octavo.runner.context_init import EarlyContext

if TYPE_CHECKING:
    from octavo.config import EngineConfig

__all__ = ["WHOLE_DEVICE", "Gpu", "find_gpu", "resolve_device", "resolve_dtype", "why_cpu"]

_LOG = logging.getLogger(__name__)

WHOLE_DEVICE = threading.RLock()
"""Held while a graph is captured, and while something waits for a whole device or has torch give memory back, which
CUDA and torch forbid during a capture in any thread. Reentrant, for garbage collection may close an engine in it.
"""

_ROOT = Path("/")
_MIN_CAPABILITY = (8, 0)
_DRIVER_FILES = ("dev/nvidiactl", "dev/nvhost-gpu", "dev/dxg")
"""Signs of a driver: for a card, for a board with a built-in GPU, and for WSL."""


class Gpu(NamedTuple):
    """A GPU that Octavo can use.

    Attributes:
        ordinal: torch's number of it.
        name: such as `NVIDIA H200`.
        capability: of its instruction set, such as (9, 0).
        free_bytes: of its memory, now.
        total_bytes: of its memory.
    """

    ordinal: int
    name: str
    capability: tuple[int, int]
    free_bytes: int
    total_bytes: int


def resolve_device(config: EngineConfig) -> str:
    """The device the settings name; for `auto` the GPU where there is one that Octavo can use.

    Returns:
        `cpu` or `cuda`.

    Raises:
        ConfigError: `cuda` where it cannot be used, with the reason and the remedy.
    """
    if config.device == "cpu":
        return "cpu"
    reason = _what_is_missing()
    if reason is None:
        return "cuda"
    if config.device == "cuda":
        raise ConfigError(f"device: `cuda` cannot be used: {reason}, or use `cpu`")
    if reason != _NO_DRIVER:
        _LOG.warning("running on the CPU: %s", reason)
    return "cpu"


def resolve_dtype(config: EngineConfig, device: str) -> str:
    """The dtype of weights, activations and KV cache.

    Raises:
        ConfigError: one that the device computes too slowly to be of use.
    """
    if device == "cuda":
        if config.dtype == "float32":
            raise ConfigError("dtype: `float32` is not supported on a GPU; use `bfloat16` or `float16`")
        return "bfloat16" if config.dtype == "auto" else config.dtype
    if config.dtype == "auto":
        return "bfloat16" if _core.cpu_info()["bf16_native"] else "float32"
    if config.dtype == "float16":
        raise ConfigError(f"dtype: `float16` is not supported on a CPU; use `bfloat16` or `float32`{why_cpu(config)}")
    return config.dtype


def why_cpu(config: EngineConfig) -> str:
    """For errors on a CPU that `auto` chose: why there is no GPU, in brackets; else empty."""
    reason = _what_is_missing() if config.device == "auto" else None
    return "" if reason is None else f" (no GPU is used: {reason})"


def find_gpu() -> Gpu:
    """The GPU in use, and its free memory; only after `resolve_device` said `cuda`.

    What torch keeps of memory that nothing in this process uses any more is given back first, and so is free too.

    Raises:
        ConfigError: it cannot be reached, as when another process holds it alone.
    """
    import torch

    try:
        index = torch.cuda.current_device()
        with WHOLE_DEVICE:
            torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(index)
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        raise ConfigError(f"device: `cuda` cannot be used: {text}; see `nvidia-smi`, or use `cpu`") from None
    return Gpu(index, torch.cuda.get_device_name(index), torch.cuda.get_device_capability(index), free, total)


_NO_DRIVER = "there is no NVIDIA driver here; install one, or give the container the GPU (docker run --gpus all)"


def _what_is_missing() -> str | None:
    """Why no GPU can be used, and the remedy; None where one can."""
    if not any((_ROOT / name).exists() for name in _DRIVER_FILES):
        return _NO_DRIVER
    # Read when torch is loaded, and so without the warning that choosing the library later prints.
    os.environ.setdefault("TORCH_BLAS_PREFER_CUBLASLT", "1")
    context = EarlyContext()
    import torch

    context.wait()
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install torch's CUDA build"
    if not torch.cuda.is_available():
        return (
            f"torch {torch.__version__} finds no GPU: CUDA_VISIBLE_DEVICES hides it, or the driver is too old for CUDA "
            f"{torch.version.cuda}; see `nvidia-smi`"
        )
    capability = torch.cuda.get_device_capability()
    if capability < _MIN_CAPABILITY:
        return (
            f"{torch.cuda.get_device_name()} has compute capability {capability[0]}.{capability[1]}, and 8.0 is the "
            "least; take a later GPU (A100, A10, L4, RTX 30 and so on)"
        )
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed; install it"
    return None
