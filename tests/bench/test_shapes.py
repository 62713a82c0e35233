"""The shapes that benches run with random weights are those of the models they are named after."""

from __future__ import annotations

from pathlib import Path

import pytest
from octavo.loading.model_files import load_model_config
from octavo.loading.resolve import resolve_model
from octavo.models.registry import build_decoder

SHAPES = Path(__file__).parents[2] / "benches" / "shapes"


@pytest.mark.parametrize(
    ("name", "billions", "positions"), [("qwen3-0.6b", 0.596, 40960), ("llama3-8b", 8.030, 131072)]
)
def test_shapes(name: str, billions: float, positions: int) -> None:
    source = resolve_model(str(SHAPES / name))
    assert (source.kind, source.name) == ("config-only", name)
    config = load_model_config(source)
    decoder = build_decoder(config)
    assert round(decoder.num_parameters / 1e9, 3) == billions
    assert config.max_position_embeddings == positions
