"""Compiles kernels ahead, in threads, while the weights load."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

from octavo.errors import ConfigError
from octavo.kernels.launch import compile_only

__all__ = ["KernelCompiler"]

_LOG = logging.getLogger("octavo.runner.kernel_warmup")
_MAX_THREADS = 16


class _Loading(Executor):
    """An executor of compilations that then brings what was compiled to the device.

    Triton leaves to a kernel's first launch that the module is loaded and the C function that launches it is built,
    which takes as long as compiling it.
    """

    def __init__(self, pool: Executor, device: int | None) -> None:
        self._pool = pool
        self._device = device
        self.submitted = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """As `Executor.submit`."""
        self.submitted += 1
        return self._pool.submit(self._run, fn, *args, **kwargs)

    def _run(self, compile_kernel: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._device is not None:
            import torch

            torch.cuda.set_device(self._device)
        kernel = compile_kernel(*args, **kwargs)
        if self._device is not None:
            # Reading the property is what loads it.
            _ = kernel.run
        return kernel


class KernelCompiler:
    """Compiles what some calls launch, and starts cuBLAS. Triton keeps what it compiles on disk (`TRITON_CACHE_DIR`).

    What it misses is compiled when it is first launched, so failures cost time only and are logged; but for those that
    every launch would meet again.

    Args:
        calls: makes every call that service will make, on any tensors of the right dtypes: `launch` runs nothing. It
            is called in a thread of its own.
        device: index of the CUDA device that kernels are loaded on; None where there is none.

    Attributes:
        num_kernels: different kernels found, once `wait` has returned.
        error: why not all are compiled, once `wait` has returned; None when all are.
    """

    def __init__(self, calls: Callable[[], object], device: int | None) -> None:
        self.num_kernels = 0
        self.error: Exception | None = None
        self._calls = calls
        self._device = device
        self._thread = threading.Thread(target=self._run, name="octavo-compile", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until everything is compiled.

        Raises:
            ConfigError: the machine lacks what Triton needs to build the functions that launch kernels, or a folder
                to keep them in.
        """
        self._thread.join()
        if self.error is not None and _lacks_files(self.error):
            raise ConfigError(
                "device: `cuda` needs a folder that Triton can keep compiled kernels in, and a C compiler that starts: "
                "name a folder with room that may be written to in TRITON_CACHE_DIR (without it, HOME says where), "
                f"and gcc in CC, or use `cpu` ({self.error})"
            ) from self.error
        if self.error is not None and _lacks_c(self.error):
            raise ConfigError(
                "device: `cuda` needs a C compiler and Python's header files, with which Triton builds what launches "
                f"kernels: install gcc and python3-dev, or name a compiler in CC, or use `cpu` ({self.error})"
            ) from self.error

    def _run(self) -> None:
        try:
            self._compile()
        except Exception as error:
            self.error = error
            if _lacks_c(error) or _lacks_files(error):
                return
            _LOG.warning("kernels are compiled when they are first used, as compiling them ahead failed", exc_info=True)

    def _compile(self) -> None:
        import triton

        if self._device is not None:
            import torch

            torch.cuda.set_device(self._device)
        threads = max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0))))
        with ThreadPoolExecutor(threads, thread_name_prefix="octavo-compile") as pool:
            products = None if self._device is None else pool.submit(_start_products, self._device)
            executor = _Loading(pool, self._device)
            # Triton before 3.5 has no such mode: kernels are then compiled one after another, in this thread.
            mode = getattr(triton, "AsyncCompileMode", None)
            with contextlib.nullcontext() if mode is None else mode(executor), compile_only():
                self._calls()
            self.num_kernels = executor.submitted
            if products is not None:
                products.result()


def _lacks_c(error: Exception) -> bool:
    """Whether Triton found no C compiler, or the compiler failed, as it does without Python's header files."""
    return isinstance(error, subprocess.CalledProcessError) or "Failed to find C compiler" in str(error)


def _lacks_files(error: BaseException | None) -> bool:
    """Whether the system refused Triton a file: its cache cannot be written, or CC names no program."""
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__
    return error is not None


def _start_products(device: int) -> None:
    """Make a handle of cuBLAS, which torch passes on to whichever thread needs one next, and have its code loaded."""
    import torch

    with torch.cuda.device(device):
        x = torch.zeros((16, 16), dtype=torch.float16, device="cuda")
        torch.mm(x, x)
        torch.cuda.current_stream().synchronize()
