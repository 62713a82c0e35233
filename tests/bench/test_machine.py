"""A report names the GPUs that NVIDIA's tool names, and none where there is no tool or it fails."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
from octavo.bench.machine import machine

H200 = "NVIDIA H200, 143771 MiB, 570.86.15"


@pytest.mark.parametrize(
    ("script", "expected"),
    [(f"echo '{H200}'; echo '{H200}'", [H200, H200]), ("echo no devices were found; exit 6", []), (None, [])],
)
def test_gpus(script: str | None, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if script is not None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine()["gpus"] == expected


def test_versions() -> None:
    import torch

    # `+cu130` and the like belong to the build, and some packages leave it out of their version.
    assert machine()["torch"].partition("+")[0] == str(torch.__version__).partition("+")[0]
