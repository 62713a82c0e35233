"""How every kernel is launched, and how the same call compiles it without running it.

Kernels are compiled ahead, while weights load, by making the calls of a step in a context where `launch` compiles
only: so the list of what to compile is the step itself and cannot drift from it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

from octavo.kernels.overlap import overlaps

__all__ = ["compile_only", "compiling", "launch"]

_COMPILING: ContextVar[bool] = ContextVar("octavo_compiling", default=False)


def launch(kernel: Any, grid: tuple[int, ...], /, *args: Any, **options: Any) -> None:
    """Run a kernel on the current stream, or compile it where `compile_only` holds.

    Args:
        kernel: a `triton.jit` function.
        grid: programs along each axis.
        args: the kernel's arguments.
        options: arguments by name, `num_warps` and the compiler's other options.
    """
    if "PDL" in kernel.arg_names:
        early = overlaps()
        options["PDL"] = early
        if early:
            options["launch_pdl"] = True
    kernel.run(*args, grid=grid, warmup=_COMPILING.get(), **options)


def compiling() -> bool:
    """Whether launches of this context compile only; what else works on the device is then to be left out."""
    return _COMPILING.get()


@contextlib.contextmanager
def compile_only() -> Iterator[None]:
    """Have the launches of this context (one thread's) compile only. Tensors may be on the `meta` device."""
    token = _COMPILING.set(True)
    try:
        yield
    finally:
        _COMPILING.reset(token)
