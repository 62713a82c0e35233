"""What blocks can do beyond the families at hand: scales, soft caps, windows, partial rotation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decoder_driver import DecoderDriver
from octavo.layers.decoder import Decoder
from tiny_models import TinyModel, random_tokens

TOKENS = random_tokens(40, seed=4)


def scores(**changes: Any) -> Callable[[Decoder], None]:
    """Change what the kernels know of every layer's attention."""

    def change(decoder: Decoder) -> None:
        for block in decoder.blocks:
            block.attention.spec = dataclasses.replace(block.attention.spec, **changes)

    return change


def windows(decoder: Decoder) -> None:
    for block, window in zip(decoder.blocks, (9, 16), strict=True):
        block.attention.spec = dataclasses.replace(block.attention.spec, window=window)


def half_rotary(decoder: Decoder) -> None:
    scores(rotary_dim=32)(decoder)
    for rope in decoder.ropes:
        rope.spec = dataclasses.replace(rope.spec, dim=32)


def embedding_scale(decoder: Decoder) -> None:
    decoder.embedding.scale = 3.0


def logits(scale: float, softcap: float) -> Callable[[Decoder], None]:
    def change(decoder: Decoder) -> None:
        decoder.head.scale, decoder.head.softcap = scale, softcap

    return change


CHANGES: dict[str, Callable[[Decoder], None]] = {
    "attention_softcap": scores(softcap=2.0),
    "attention_scale": scores(scale=0.5),
    "embedding_scale": embedding_scale,
    "logits": logits(0.5, 4.0),
    "windows": windows,
    "half_rotary": half_rotary,
}


def logits_of(
    model: TinyModel,
    change: Callable[[Decoder], None] = lambda _decoder: None,
    *,
    backend: str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    decoder = model.decoder()
    change(decoder)
    return DecoderDriver(decoder, model.weights, backend=backend, dtype=dtype).alone(0, TOKENS)


@pytest.fixture
def model(tiny_model: Callable[[str], TinyModel]) -> TinyModel:
    return tiny_model("llama")


def test_logits_are_scaled_then_capped(model: TinyModel) -> None:
    plain = logits_of(model)
    changed = logits_of(model, logits(0.25, 3.0))
    torch.testing.assert_close(changed, 3.0 * torch.tanh(0.25 * plain / 3.0), rtol=1e-5, atol=1e-5)


def test_embedding_scale_acts_before_the_first_layer(model: TinyModel) -> None:
    decoder = model.decoder()
    embedding_scale(decoder)
    driver = DecoderDriver(decoder, model.weights)
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
@pytest.mark.parametrize("name", CHANGES)
def test_kernels_agree_with_the_reference(name: str, dtype: torch.dtype, tolerance: float, model: TinyModel) -> None:
    change = CHANGES[name]
    ours = logits_of(model, change, dtype=dtype)
    reference = logits_of(model, change, backend="reference", dtype=dtype)
    plain = logits_of(model, backend="reference")
    assert (reference - plain).abs().max() > 0.5, "the option changed nothing"
    assert (ours - reference).abs().max() < tolerance
