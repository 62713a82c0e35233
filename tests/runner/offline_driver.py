"""Makes Triton compile for a GPU that is not there; nothing can be run."""

from __future__ import annotations

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

__all__ = ["compile_for"]


class _Driver:
    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return self._target


def compile_for(capability: int) -> None:
    """Have this process compile for a compute capability, such as 90."""
    driver.set_active(_Driver(capability))
