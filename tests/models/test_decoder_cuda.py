"""Logits of the decoder on a GPU (or interpreted) against transformers and the plain-torch operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from cuda_driver import CudaDriver
from decoder_driver import DecoderDriver
from test_decoder_logits import assert_close, mixed_run, three_sequences
from tiny_models import TinyModel, random_tokens

# Rows that pad a step hold whatever memory held, and the interpreter sums them with numpy.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered in reduce:RuntimeWarning")


@pytest.mark.parametrize("case", ["qwen3", "mistral-window", "gemma2", "gemma3-three-layers"])
def test_chunks_decodes_and_prefix_hits_equal_transformers(
    case: str, device: torch.device, tiny_model: Callable[[str], TinyModel]
) -> None:
    model = tiny_model(case)
    sequences = three_sequences()
    logits = mixed_run(CudaDriver(model.decoder(), model.weights, device), *sequences)
    assert_close(logits[0], model.expected(sequences[0]))
    assert_close(logits[1], model.expected(sequences[1]))
    assert_close(logits[2], model.expected(sequences[2])[32:])


@pytest.mark.parametrize("case", ["llama-biases", "llama-one-kv-head", "llama-wide-heads", "llama-no-groups"])
def test_prompts_equal_transformers(case: str, device: torch.device, tiny_model: Callable[[str], TinyModel]) -> None:
    model = tiny_model(case)
    tokens = random_tokens(20, seed=5)
    assert_close(CudaDriver(model.decoder(), model.weights, device).alone(0, tokens), model.expected(tokens))


def test_groups_of_a_long_shared_prefix(device: torch.device, tiny_model: Callable[[str], TinyModel]) -> None:
    model = tiny_model("qwen3")
    tokens = random_tokens(281, seed=6)
    filled = DecoderDriver(model.decoder(), model.weights, backend="reference")
    driver = CudaDriver(model.decoder(), model.weights, device)
    for start, end in ((0, 256), (256, 272)):
        filled.alone(0, tokens[start:end])
    for layer, source in zip(driver.cache.layers, filled.cache.layers, strict=True):
        layer.copy_(source)
    driver.adopt(filled)
    driver.share(0, 1, 17)
    steps = []
    for shared_blocks in (0, 17):
        driver.shared_blocks = shared_blocks
        driver.lengths[:2] = [272, 272]
        steps.append(driver.step([(0, [tokens[272]]), (1, [tokens[280]])]))
    assert all(torch.equal(alone, grouped) for alone, grouped in zip(*steps, strict=True))
    assert_close(steps[0][0], model.expected(tokens[:273])[-1:])
    assert_close(steps[0][1], model.expected([*tokens[:272], tokens[280]])[-1:])
    # As much beside a prompt row.
    mixed = []
    for shared_blocks in (0, 17):
        driver.shared_blocks = shared_blocks
        driver.lengths[:3] = [272, 272, 0]
        mixed.append(driver.step([(0, [tokens[272]]), (1, [tokens[280]]), (2, tokens[:5])]))
    assert all(torch.equal(alone, grouped) for alone, grouped in zip(*mixed, strict=True))
    assert_close(torch.cat(mixed[0][:2]), torch.cat(steps[0]))
    assert_close(mixed[0][2], model.expected(tokens[:5]))


def test_a_cache_of_eight_bits_is_near(device: torch.device, tiny_model: Callable[[str], TinyModel]) -> None:
    model = tiny_model("qwen3")
    tokens = random_tokens(33, seed=4)
    driver = CudaDriver(model.decoder(), model.weights, device, kv_cache_dtype="fp8")
    logits = torch.cat([driver.alone(0, tokens[:32]), driver.alone(0, tokens[32:])])
    expected = DecoderDriver(model.decoder(), model.weights, backend="reference").alone(0, tokens)
    error = (logits - expected).std() / expected.std()
    assert 1e-4 < error < 0.15


def test_half_precision_is_near(device: torch.device, tiny_model: Callable[[str], TinyModel]) -> None:
    model = tiny_model("qwen3")
    tokens = random_tokens(9, seed=4)
    driver = CudaDriver(model.decoder(), model.weights, device, dtype=torch.float16)
    logits = torch.cat([driver.alone(0, tokens[:8]), driver.alone(0, tokens[8:])])
    expected = model.expected(tokens)
    error = (logits - expected).std() / expected.std()
    assert 1e-4 < error < 0.01
