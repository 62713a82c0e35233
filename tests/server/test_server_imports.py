"""The server's process stays small: no torch, no transformers."""

from __future__ import annotations

import subprocess
import sys


def test_no_torch() -> None:
    code = (
        "import sys, octavo.server, octavo.server.lifecycle\n"
        "print([name for name in ('torch', 'transformers', 'triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
