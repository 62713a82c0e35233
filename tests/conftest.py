"""What every test may rely on."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    import torch

# A shell starts background jobs (`make test &`) with SIGINT ignored, and their children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# How long an example takes says something of the machine alone.
settings.register_profile("octavo", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("octavo")

# Processes that share a machine (pytest-xdist) share its cores too; torch reads this when it is imported.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    share = len(os.sched_getaffinity(0)) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(share, 1)))

# OpenBLAS picks its kernels by the processor. Where it can, the suite runs with those whose results depend most on the
# shape of a product. numpy reads this when it is imported.
if "avx512vl" in Path("/proc/cpuinfo").read_text():
    os.environ.setdefault("OPENBLAS_CORETYPE", "SkylakeX")

# Triton's own functions are made for the interpreter or the compiler when it is imported, which any test may do first.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where Triton's kernels run: a GPU where there is one, else the CPU, interpreted."""
    import torch

    if os.environ.get("TRITON_INTERPRET") != "1":
        return torch.device("cuda")
    _let_tensors_be_bounds()
    _sum_products_in_one_order()
    return torch.device("cpu")


def _let_tensors_be_bounds() -> None:
    """Give the interpreter `range(n)` of a loaded n, which numpy 2.4 refuses: its scalars are arrays of one element."""
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


def _sum_products_in_one_order() -> None:
    """Give the interpreter's products one order of sums, as tensor cores have.

    numpy leaves them to OpenBLAS, which on some processors gives a single row other bits than the same row among
    several. Tests that compare bits would then see OpenBLAS instead of the kernel.
    """
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        left, right = a.data, b.data
        if any(handle.dtype.primitive_bitwidth == 8 and handle.dtype.is_floating() for handle in (a, b)):
            half = interpreter.tl.float16
            left, right = (
                interpreter._convert_float(handle.data, handle.dtype, half, None).view("float16") for handle in (a, b)
            )
        dtype = d.data.dtype
        return interpreter.TensorHandle(
            ordered_product(left.astype(dtype), right.astype(dtype), d.data), d.dtype.scalar
        )

    interpreter.InterpreterBuilder.create_dot = create_dot


def ordered_product(left: Any, right: Any, start: Any) -> Any:
    """start + left @ right: K in order, 16 elements at a time, each 16 as a tree of elementwise sums.

    Args:
        left: [..., M, K], K a power of two.
        right: [..., K, N].
        start: [..., M, N].
    """
    import numpy as np

    depth = left.shape[-1]
    step = min(16, depth)
    # Rows of padding hold anything.
    with np.errstate(invalid="ignore", over="ignore"):
        products = left[..., :, :, None] * right[..., None, :, :]
        sums = products.reshape(*products.shape[:-2], depth // step, step, products.shape[-1])
        while sums.shape[-2] > 1:
            half = sums.shape[-2] // 2
            sums = sums[..., :half, :] + sums[..., half:, :]
        total = start
        for index in range(depth // step):
            total = total + sums[..., index, 0, :]
    return total


@pytest.fixture(autouse=True)
def own_log() -> Iterator[None]:
    """Undo what a command that ran in this process did to logging: its lines would go on to standard error."""
    root, environment = logging.getLogger(), os.environ.get("OCTAVO_LOG")
    hooks = sys.excepthook, threading.excepthook, sys.unraisablehook
    handlers, level = list(root.handlers), root.level
    yield
    if root.handlers == handlers:
        return
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    sys.excepthook, threading.excepthook, sys.unraisablehook = hooks
    if environment is None:
        os.environ.pop("OCTAVO_LOG", None)
    else:
        os.environ["OCTAVO_LOG"] = environment


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that need a CUDA device where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
