"""The server's imports: no torch, no circle, and every folder imports only folders before it."""

from __future__ import annotations

import subprocess
import sys

from import_graph import cycles, python_imports

# A request walks forward through these. A module may import from its own group and from those before it.
ORDER = (
    ("settings", "error_responses", "ipc", "service_manager"),
    ("transport",),
    ("observability",),
    ("access",),
    ("queueing",),
    ("models",),
    ("state", "config_file"),
    ("request",),
    ("apis",),
    ("app",),
    ("admin",),
    ("lifecycle",),
)
_SERVER = "octavo.server."


def test_no_torch() -> None:
    code = (
        "import sys, octavo.server, octavo.server.lifecycle\n"
        "print([name for name in ('torch', 'transformers', 'triton') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_imports_point_backwards_only() -> None:
    places = {name: place for place, group in enumerate(ORDER) for name in group}
    upward = []
    for module, targets in python_imports().items():
        for target in targets:
            if module.startswith(_SERVER) and target.startswith(_SERVER):
                ends = [name.removeprefix(_SERVER).split(".")[0] for name in (module, target)]
                if places[ends[0]] < places[ends[1]]:
                    upward.append(f"{module} -> {target}")
    assert not upward


def test_no_circle() -> None:
    graph = {module: targets for module, targets in python_imports().items() if module.startswith(_SERVER)}
    assert not cycles(graph)
