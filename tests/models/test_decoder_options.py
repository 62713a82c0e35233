"""What the spec can ask for beyond the families at hand: scales, soft caps, interleaved pairs, partial rotation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoder_driver import DecoderDriver
from tiny_models import TinyModel, random_tokens

TOKENS = random_tokens(40, seed=4)


def logits_of(
    model: TinyModel, *, backend: str = "cpu", dtype: torch.dtype = torch.float32, **changes: Any
) -> torch.Tensor:
    spec = dataclasses.replace(model.spec, **changes)
    return DecoderDriver(spec, model.weights, backend=backend, dtype=dtype).alone(0, TOKENS)


@pytest.fixture
def model(tiny_model: Callable[[str], TinyModel]) -> TinyModel:
    return tiny_model("llama")


def test_logits_are_scaled_then_capped(model: TinyModel) -> None:
    plain = logits_of(model)
    changed = logits_of(model, logits_scale=0.25, logits_softcap=3.0)
    torch.testing.assert_close(changed, 3.0 * torch.tanh(0.25 * plain / 3.0), rtol=1e-5, atol=1e-5)


def test_embedding_scale_acts_before_the_first_layer(model: TinyModel) -> None:
    driver = DecoderDriver(dataclasses.replace(model.spec, embedding_scale=3.0), model.weights)
    embedding = model.oracle.get_input_embeddings().weight
    original = embedding.detach().clone()
    try:
        with torch.no_grad():
            embedding.mul_(3.0)
        torch.testing.assert_close(driver.alone(0, TOKENS), model.expected(TOKENS), rtol=1e-4, atol=3e-4)
    finally:
        with torch.no_grad():
            embedding.copy_(original)


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-3), (torch.bfloat16, 0.35)], ids=["float32", "bfloat16"]
)
@pytest.mark.parametrize(
    "changes",
    [
        {"attention_softcap": 2.0},
        {"attention_scale": 0.5},
        {"embedding_scale": 3.0},
        {"logits_scale": 0.5, "logits_softcap": 4.0},
        {"windows": (0, 9, 16)},
        {"rotary": {"interleaved": True}},
        {"rotary": {"dim": 32}},
    ],
    ids=str,
)
def test_kernels_agree_with_the_reference(
    changes: dict[str, Any], dtype: torch.dtype, tolerance: float, model: TinyModel
) -> None:
    if isinstance(changes.get("rotary"), dict):
        changes = {"rotary": dataclasses.replace(model.spec.rotary, **changes["rotary"])}
    ours = logits_of(model, dtype=dtype, **changes)
    reference = logits_of(model, backend="reference", dtype=dtype, **changes)
    plain = logits_of(model, backend="reference")
    assert (reference - plain).abs().max() > 0.5, "the option changed nothing"
    assert (ours - reference).abs().max() < tolerance
