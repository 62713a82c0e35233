"""The demo model, fetched once."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def demo_file() -> Path:
    from octavo.loading.resolve import resolve_model

    return resolve_model("demo").path
