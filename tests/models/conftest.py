from __future__ import annotations

from collections.abc import Callable

import pytest
from tiny_models import TinyModel, make_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], TinyModel]:
    """A case's model, made once a session."""
    models: dict[str, TinyModel] = {}

    def get(case: str) -> TinyModel:
        if case not in models:
            models[case] = make_tiny_model(case, tmp_path_factory.mktemp(case))
        return models[case]

    return get
