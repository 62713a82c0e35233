from __future__ import annotations

import ast
import threading
from pathlib import Path
from typing import Any

import octavo.kernels
import pytest
import torch
import triton
from octavo.kernels.launch import compile_only, compiling, launch
from octavo.kernels.overlap import overlaps


class Kernel:
    arg_names = ("x", "n", "BLOCK")

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def run(self, *args: Any, grid: tuple[int, ...], warmup: bool, **options: Any) -> None:
        self.calls.append((args, grid, warmup, options))


def test_launch_runs_or_compiles_as_its_context_says() -> None:
    kernel = Kernel()
    launch(kernel, (3, 2), "x", 7, BLOCK=16, num_warps=4)
    with compile_only():
        assert compiling()
        launch(kernel, (3,), "y", BLOCK=32)
    launch(kernel, (1,), "z")
    assert kernel.calls == [
        (("x", 7), (3, 2), False, {"BLOCK": 16, "num_warps": 4}),
        (("y",), (3,), True, {"BLOCK": 32}),
        (("z",), (1,), False, {}),
    ]


def test_other_threads_go_on_running_kernels() -> None:
    seen = []
    with compile_only():
        thread = threading.Thread(target=lambda: seen.append(compiling()))
        thread.start()
        thread.join()
    assert seen == [False]


def test_an_error_ends_compile_only() -> None:
    with pytest.raises(ValueError, match="a kernel's"), compile_only():
        raise ValueError("a kernel's")
    assert not compiling()


def test_no_kernel_is_launched_past_it() -> None:
    """`kernel[grid](...)` would run where only compiling is asked for."""
    past = []
    for path in sorted(Path(octavo.kernels.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                name = ast.unparse(node.func.value)
                if name.endswith("kernel"):
                    past.append(f"{path.name}:{node.lineno} {name}")
    assert not past


@pytest.mark.parametrize(("version", "early"), [("3.4.0", False), ("3.5.1", True), ("3.10.0+git", True), ("4.0", True)])
def test_dependents_are_launched_early_where_triton_compiles_it(
    version: str, early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton, "__version__", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    overlaps.cache_clear()
    try:
        assert overlaps() is early
    finally:
        overlaps.cache_clear()
