"""The dtypes of the Triton kernels' tests; `device` is a fixture of tests/conftest.py."""

from __future__ import annotations

from typing import Any

from kernel_devices import DTYPES


def pytest_generate_tests(metafunc: Any) -> None:
    """Run a test that takes `dtype` without saying which in every model dtype of the device."""
    if "dtype" not in metafunc.fixturenames:
        return
    chosen = [name for mark in metafunc.definition.iter_markers("parametrize") for name in _names(mark.args[0])]
    if "dtype" not in chosen:
        metafunc.parametrize("dtype", DTYPES, ids=[str(dtype).removeprefix("torch.") for dtype in DTYPES])


def _names(argument: str | list[str] | tuple[str, ...]) -> list[str]:
    return [name.strip() for name in argument.split(",")] if isinstance(argument, str) else list(argument)
