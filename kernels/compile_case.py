"""What a kernel module says of its kernels so that they can be compiled where there is no GPU.

A module with kernels has `compile_cases(capability: int) -> list[CompileCase]`: for each of its kernels (the functions
named `..._kernel`) at least one case, with the shapes of real models.
"""

from __future__ import annotations

import dataclasses
from typing import Any

__all__ = ["CompileCase"]


@dataclasses.dataclass(frozen=True)
class CompileCase:
    """One kernel, compiled for one set of constants as a launch would.

    Attributes:
        kernel: the `triton.jit` function.
        arguments: type of each argument that is not a constant, in Triton's names: `*bf16`, `*fp32`, `*i32`, `*u8`,
            `*fp8e4nv`, `i32`, `i64`, `fp32`.
        constants: value of each constant.
        num_warps: of a program.
        num_stages: of pipelined loops.
        enable_fp_fusion: whether products and sums may contract.
        aligned: integer arguments that are multiples of 16; pointers always are.
        registers: most a thread may use; None for what the compiler takes.
        max_spilled: bytes of registers that a thread may spill; above 0 where that was found to be the fastest.
    """

    kernel: Any
    arguments: dict[str, str]
    constants: dict[str, Any]
    num_warps: int = 4
    num_stages: int = 3
    enable_fp_fusion: bool = False
    aligned: tuple[str, ...] = ()
    registers: int | None = None
    max_spilled: int = 0
