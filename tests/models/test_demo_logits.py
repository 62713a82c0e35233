"""The demo model against transformers on the same file."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from decoder_driver import DecoderDriver
from octavo.layers.decoder import Decoder
from octavo.loading.model_files import load_model_config, open_weights
from octavo.loading.resolve import ModelSource, resolve_model
from octavo.loading.weights import WeightSource
from octavo.models.registry import build_decoder
from tiny_models import as_bfloat16, logits_of
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

# In one process: what the tests share takes long to make.
pytestmark = [pytest.mark.demo, pytest.mark.xdist_group("demo_logits")]

TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return fibonacci(n - 1) + fibonacci(n - 2)\n",
    "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n<|im_start|>assistant\n2 + 2 equals 4.<|im_end|>\n",
)


@pytest.fixture(scope="module")
def source() -> ModelSource:
    return resolve_model("demo")


@pytest.fixture(scope="module")
def oracle(source: ModelSource) -> Any:
    config = transformers.AutoConfig.from_pretrained(source.path.parent, gguf_file=source.path.name)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    checkpoint = load_gguf_checkpoint(str(source.path), return_tensors=True, model_to_load=model)
    loaded = model.load_state_dict(checkpoint["tensors"], strict=False)
    assert loaded.missing_keys == ["lm_head.weight"]
    assert not loaded.unexpected_keys
    return model.eval()


@pytest.fixture(scope="module")
def weights(source: ModelSource) -> WeightSource:
    return open_weights(source, decoder_of(source).parameters())


def decoder_of(source: ModelSource) -> Decoder:
    return build_decoder(load_model_config(source))


@pytest.fixture(scope="module")
def prompts(source: ModelSource) -> list[list[int]]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.path.parent, gguf_file=source.path.name)
    return [tokenizer(text)["input_ids"] for text in TEXTS]


@pytest.fixture(scope="module")
def expected(oracle: Any, prompts: list[list[int]]) -> list[torch.Tensor]:
    return [logits_of(oracle, prompt) for prompt in prompts]


def run(source: ModelSource, weights: WeightSource, dtype: torch.dtype, prompts: list[list[int]]) -> list[torch.Tensor]:
    driver = DecoderDriver(decoder_of(source), weights, dtype=dtype)
    return driver.step(list(enumerate(prompts)))


def test_float32_logits_equal_transformers(
    source: ModelSource, weights: WeightSource, prompts: list[list[int]], expected: list[torch.Tensor]
) -> None:
    for ours, theirs in zip(run(source, weights, torch.float32, prompts), expected, strict=True):
        assert theirs.std() > 1
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-3)


def test_bfloat16_errs_no_more_than_transformers(
    source: ModelSource,
    weights: WeightSource,
    prompts: list[list[int]],
    expected: list[torch.Tensor],
    oracle: Any,
) -> None:
    ours = run(source, weights, torch.bfloat16, prompts)
    twin = as_bfloat16(oracle)
    for mine, exact, prompt in zip(ours, expected, prompts, strict=True):
        assert _error(mine, exact) < 1.25 * _error(logits_of(twin, prompt), exact)


def _error(logits: torch.Tensor, exact: torch.Tensor) -> float:
    """Root of the mean squared difference of log probabilities."""
    return (logits.log_softmax(-1) - exact.log_softmax(-1)).pow(2).mean().sqrt().item()
