"""All that steps of every kind and size launch binds to its kernels, and few variants of these serve all sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.5", reason="kernels are counted as they are compiled in threads")


def test_every_launch_binds_and_sizes_share_kernels() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = Path(__file__).with_name("launches_process.py")
    run = subprocess.run(
        [sys.executable, str(program)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    made = json.loads(run.stdout)
    for name in ("_take_plan_kernel", "_publish_kernel", "_count_history_kernel", "_copy_blocks_kernel"):
        assert made.pop(name) == 1, name
    # Three kinds of step, two windows, of which the sliding one shares no prefixes.
    assert made.pop("_plan_kernel") == 5
    assert {"_reduce_blocks_kernel", "_choose_kernel"} <= set(made)
    assert max(made.values()) <= 12, made
