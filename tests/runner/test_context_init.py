"""The context that is made early is the one that torch uses; without a GPU nothing happens."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from octavo.runner.context_init import EarlyContext


def test_without_a_driver_nothing_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    context = EarlyContext()
    context.wait()
    assert not context.made


@pytest.mark.parametrize("failing", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", None])
def test_what_the_driver_refuses_is_left_to_torch(failing: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def call(name: str) -> Any:
        def function(*arguments: Any) -> int:
            calls.append(name)
            return 100 if name == failing else 0

        return function

    names = ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(**{each: call(each) for each in names}))
    context = EarlyContext()
    context.wait()
    assert context.made == (failing is None)
    assert calls == (names if failing is None else names[: names.index(failing) + 1])


@pytest.mark.gpu
def test_torch_uses_the_context() -> None:
    # A device cannot be left again, so in a process of its own.
    program = (
        "from octavo.runner.context_init import EarlyContext\n"
        "context = EarlyContext()\n"
        "import torch\n"
        "context.wait()\n"
        "assert context.made\n"
        "assert torch.ones(3, device='cuda').sum().item() == 3\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
