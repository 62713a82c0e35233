"""What importing costs, and what it must not drag in."""

from __future__ import annotations

import subprocess
import sys

import octavo
import pytest


def _modules_after(statement: str) -> set[str]:
    script = f"{statement}\nimport sys\nprint('\\n'.join(sys.modules))"
    shown = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120)
    return set(shown.stdout.split())


@pytest.mark.parametrize("module", ["octavo", "octavo.server", "octavo.text.tokenizer", "octavo.cli"])
def test_rooms_that_must_not_know_torch(module: str) -> None:
    loaded = _modules_after(f"import {module}")
    assert not loaded & {"torch", "transformers", "triton"}


def test_importing_the_package_loads_next_to_nothing() -> None:
    loaded = _modules_after("import octavo")
    assert not loaded & {"numpy", "msgspec", "starlette", "uvicorn", "tokenizers", "rich", "typer", "asyncio"}


def test_every_public_name_resolves() -> None:
    for name in octavo.__all__:
        assert getattr(octavo, name) is not None
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        _ = octavo.nothing_of_that_name
