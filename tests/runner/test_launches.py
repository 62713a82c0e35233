"""All that steps of every kind and size launch binds to its kernels, and few variants of these serve all sizes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", minversion="3.5", reason="kernels are counted as they are compiled in threads")


@pytest.mark.parametrize(
    ("capability", "architecture", "windows"),
    [
        (80, "Qwen3ForCausalLM", [0, 0, 0, 0]),
        (90, "Qwen3ForCausalLM", [0, 512, 0, 512]),
        (90, "Gemma2ForCausalLM", [512, 0, 512, 0]),
    ],
)
def test_every_launch_binds_and_sizes_share_kernels(capability: int, architecture: str, windows: list[int]) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = Path(__file__).with_name("launches_process.py")
    run = subprocess.run(
        [sys.executable, str(program), str(capability), architecture, json.dumps(windows)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert not report["missed"], "launched in service and not compiled ahead"
    made = report["ahead"]
    for name in ("_take_plan_kernel", "_publish_kernel", "_count_history_kernel", "_copy_blocks_kernel"):
        assert made.pop(name) == 1, name
    # Four kinds of step; a sliding window shares no prefixes.
    assert made.pop("_plan_kernel") == (6 if any(windows) else 4)
    assert {"reduce_blocks_kernel", "_choose_kernel"} <= set(made)
    assert max(made.values()) <= 12, made
