"""On a GPU everything is compiled when the engine is ready: service compiles nothing, a second start neither."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from small_models import CONFIGS, write_config

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("gpu")]


def run(model: Path, caches: Path) -> dict[str, Any]:
    program = Path(__file__).with_name("compiled_ahead_process.py")
    done = subprocess.run(
        [sys.executable, str(program), str(model)],
        env={**os.environ, "TRITON_CACHE_DIR": str(caches)},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "compiling them ahead failed" not in done.stderr, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_service_compiles_nothing(name: str, tmp_path: Path) -> None:
    model, caches = tmp_path / "model", tmp_path / "caches"
    model.mkdir()
    write_config(name, model)
    first = run(model, caches)
    assert first["before"] > 10
    assert first["after"] == first["before"]
    assert first["imported"] == []
    assert run(model, caches)["after"] == first["after"]
