"""What test_kernel_warmup.py runs in a process of its own, where Triton compiles: prints a JSON object."""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

import torch
import triton
import triton.language as tl
from octavo.errors import ConfigError
from octavo.kernels.launch import launch
from octavo.runner.kernel_warmup import KernelCompiler
from offline_driver import compile_for


@triton.jit
def scale_kernel(x_ptr, out_ptr, count, factor, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets, mask=offsets < count) * factor, mask=offsets < count)


@triton.jit
def wrong_kernel(x_ptr, BLOCK: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, BLOCK), there_is_no_such_value)  # noqa: F821


def scale(device: str, dtypes: list[torch.dtype]) -> None:
    """Every variant twice."""
    for dtype in dtypes:
        x = torch.empty(64, dtype=dtype, device=device)
        for count in (64, 63, 128):
            for block in (32, 64):
                launch(scale_kernel, (2,), x, x, count, 2.0, BLOCK=block, num_warps=1)


def binaries() -> int:
    return len(list(Path(os.environ["TRITON_CACHE_DIR"]).rglob("*.cubin")))


def main(case: str) -> dict[str, object]:
    compile_for(90)
    dtypes = [torch.bfloat16, torch.float32]

    def calls() -> None:
        scale("meta", dtypes)
        if case == "wrong":
            launch(wrong_kernel, (1,), torch.empty(4, device="meta"), BLOCK=4)

    compiler = KernelCompiler(calls, None)
    try:
        compiler.wait()
    except ConfigError as error:
        return {"refused": str(error)}
    before = binaries()
    # Tensors with memory, as in service: nothing new to compile.
    service = KernelCompiler(lambda: scale("cpu", dtypes), None)
    service.wait()
    return {
        "error": type(compiler.error).__name__,
        "found": compiler.num_kernels,
        "binaries": before,
        "found_in_service": service.num_kernels,
        "compiled_in_service": binaries() - before,
    }


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    sys.stdout.write(json.dumps(main(sys.argv[1])) + "\n")
