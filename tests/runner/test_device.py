"""Which device and dtype the settings come to, and what is said where they cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo import _core
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.runner import device
from octavo.runner.device import find_gpu, resolve_device, resolve_dtype, why_cpu


def config(**settings: Any) -> EngineConfig:
    return EngineConfig(model="m", **settings)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Makes this machine look like one with a driver and a card."""

    def make(*, driver: bool = True, cuda: str | None = "13.0", usable: bool = True, capability: Any = (9, 0)) -> None:
        if driver:
            (tmp_path / "dev").mkdir()
            (tmp_path / "dev/nvidiactl").touch()
        monkeypatch.setattr(device, "_ROOT", tmp_path)
        monkeypatch.setenv("TORCH_BLAS_PREFER_CUBLASLT", "1")
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: usable)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=None: "NVIDIA Test")
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        spare = [3]
        monkeypatch.setattr(torch.cuda, "empty_cache", spare.clear)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (5 - sum(spare), 9))

    return make


def test_a_gpu_is_taken_where_there_is_one(machine: Any) -> None:
    machine()
    assert resolve_device(config()) == resolve_device(config(device="cuda")) == "cuda"
    assert resolve_device(config(device="cpu")) == "cpu"
    # What torch keeps and nothing uses is free.
    assert find_gpu() == (0, "NVIDIA Test", (9, 0), 5, 9)


@pytest.mark.parametrize(
    ("looks", "reason"),
    [
        ({"driver": False}, r"there is no NVIDIA driver here; install one, .*or use `cpu`"),
        ({"cuda": None}, r"torch \S+ is built without CUDA; install torch's CUDA build, or use `cpu`"),
        ({"usable": False}, r"finds no GPU: CUDA_VISIBLE_DEVICES hides it, or the driver is too old for CUDA 13.0"),
        (
            {"capability": (7, 5)},
            r"NVIDIA Test has compute capability 7\.5, and 8\.0 is the least; take a later GPU .*, or use `cpu`",
        ),
    ],
)
def test_why_there_is_none(machine: Any, looks: dict[str, Any], reason: str) -> None:
    machine(**looks)
    assert resolve_device(config()) == "cpu"
    with pytest.raises(ConfigError, match=f"^device: `cuda` cannot be used: .*{reason}"):
        resolve_device(config(device="cuda"))


@pytest.mark.parametrize(
    ("looks", "reason"),
    [({"driver": False}, "there is no NVIDIA driver here"), ({"cuda": None}, "is built without CUDA; install")],
)
def test_a_refusal_of_the_cpu_says_why_there_is_no_gpu(machine: Any, looks: dict[str, Any], reason: str) -> None:
    machine(**looks)
    with pytest.raises(ConfigError, match=rf"use `bfloat16` or `float32` \(no GPU is used: .*{reason}"):
        resolve_dtype(config(dtype="float16"), "cpu")
    with pytest.raises(ConfigError, match=r"use `bfloat16` or `float32`$"):
        resolve_dtype(config(dtype="float16", device="cpu"), "cpu")
    assert reason in why_cpu(config())
    assert why_cpu(config(device="cpu")) == ""


def test_a_gpu_that_cannot_be_reached(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine()

    def busy(_index: int) -> None:
        raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable\nmore")

    monkeypatch.setattr(torch.cuda, "mem_get_info", busy)
    with pytest.raises(ConfigError, match=r"are busy or unavailable; see `nvidia-smi`, or use `cpu`$"):
        find_gpu()


@pytest.mark.parametrize(("native", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_dtype_goes_by_the_processor(native: bool, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_core, "cpu_info", lambda: {"bf16_native": native})
    assert resolve_dtype(config(), "cpu") == dtype
    assert resolve_dtype(config(dtype="float32"), "cpu") == "float32"


def test_dtypes_of_a_gpu() -> None:
    assert resolve_dtype(config(), "cuda") == "bfloat16"
    assert resolve_dtype(config(dtype="float16"), "cuda") == "float16"
    with pytest.raises(ConfigError, match="dtype: `float32` is not supported on a GPU; use `bfloat16` or `float16`"):
        resolve_dtype(config(dtype="float32"), "cuda")


def test_torch_is_loaded_with_the_library_that_the_kernels_need(tmp_path: Path) -> None:
    """So nothing needs to be chosen later, of which torch would warn."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    program = f"""
import pathlib, sys
from octavo.config import EngineConfig
from octavo.runner import device
device._ROOT = pathlib.Path({str(tmp_path)!r})
assert "torch" not in sys.modules
device.resolve_device(EngineConfig(model="m"))
import torch
from octavo.kernels.linear import configure_cublas
restore = configure_cublas()
assert torch.backends.cuda.preferred_blas_library().name == "Cublaslt"
restore()
"""
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_BLAS_PREFER_CUBLASLT"}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert "preferred_blas_library" not in done.stderr
