"""Every Triton kernel compiles for every supported generation of GPUs, within its shared memory and registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227}


def test_kernels_compile_for_every_gpu() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = Path(__file__).with_name("compile_kernels.py")
    run = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=280, check=False
    )
    assert run.returncode == 0, run.stderr
    reports = [json.loads(line) for line in run.stdout.splitlines()]
    assert {report["capability"] for report in reports if "capability" in report} == set(SHARED_KIB)
    failed = [report for report in reports if "error" in report]
    assert not failed, failed
    too_large = [report for report in reports if report["shared"] > SHARED_KIB[report["capability"]] * 1024]
    assert not too_large, too_large
    spilled = [report for report in reports if report["spilled"] > report["max_spilled"]]
    assert not spilled, spilled
