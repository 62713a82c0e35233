"""Tiny random models, made by transformers and written as it writes them: the oracle and the files."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import torch
import transformers
from octavo.layers.decoder import Decoder
from octavo.loading.model_files import load_model_config, open_weights
from octavo.loading.resolve import ModelSource
from octavo.loading.weights import WeightSource
from octavo.models.registry import build_decoder

VOCAB_SIZE = 199

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 96,
    "intermediate_size": 144,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}


def _rope(kind: str, **values: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0, **values}}


_LONGROPE = {"short_factor": [1.0 + 0.01 * i for i in range(32)], "long_factor": [1.0 + 0.2 * i for i in range(32)]}

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-tied": ("LlamaConfig", {"tie_word_embeddings": True}),
    "llama-biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
    "llama-no-groups": ("LlamaConfig", {"num_key_value_heads": 6, "hidden_act": "gelu"}),
    "llama-one-kv-head": ("LlamaConfig", {"num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"}),
    "llama-wide-heads": ("LlamaConfig", {"head_dim": 128, "num_attention_heads": 2}),
    "rope-linear": ("LlamaConfig", _rope("linear", factor=3.0)),
    "rope-dynamic": ("LlamaConfig", _rope("dynamic", factor=2.0)),
    "rope-llama3": (
        "LlamaConfig",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "rope-yarn": ("LlamaConfig", _rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    "rope-longrope": (
        "LlamaConfig",
        _rope("longrope", factor=8.0, original_max_position_embeddings=64, **_LONGROPE),
    ),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "mistral-window": ("MistralConfig", {"sliding_window": 24}),
    "qwen2": ("Qwen2Config", {}),
    "qwen2-windows": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {}),
    "gemma2": (
        "Gemma2Config",
        {
            "num_hidden_layers": 4,
            "sliding_window": 24,
            "query_pre_attn_scalar": 48,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 6.0,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 7,
            "sliding_window": 20,
            "query_pre_attn_scalar": 64,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    # Kernels under the interpreter take their time by the layer.
    "gemma3-three-layers": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 20,
            "query_pre_attn_scalar": 64,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "gemma3-wide-heads": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 2,
            "head_dim": 256,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "sliding_window": 9,
            "layer_types": ["full_attention", "sliding_attention"],
            "tie_word_embeddings": True,
        },
    ),
}


@dataclasses.dataclass
class TinyModel:
    """A model of transformers and the same as Octavo reads it from disk."""

    oracle: Any
    source: ModelSource
    weights: WeightSource

    def decoder(self) -> Decoder:
        """The model without weights, a new one each time."""
        return build_decoder(load_model_config(self.source))

    def expected(self, tokens: list[int]) -> torch.Tensor:
        """The oracle's logits, float32 [tokens, vocab_size]."""
        return logits_of(self.oracle, tokens)


def logits_of(oracle: Any, tokens: list[int]) -> torch.Tensor:
    """Logits of a model of transformers, float32 [tokens, vocab_size]."""
    with torch.inference_mode():
        return oracle(torch.tensor([tokens])).logits[0].float()


def as_bfloat16(oracle: Any) -> Any:
    """A twin in bfloat16, its rotary tables left in float32 as transformers leaves them when it loads one."""
    twin = copy.deepcopy(oracle).to(torch.bfloat16)
    for name, buffer in oracle.named_buffers():
        parent, _, leaf = name.rpartition(".")
        setattr(twin.get_submodule(parent), leaf, buffer.clone())
    return twin


def make_oracle(case: str, dtype: torch.dtype = torch.float32, **keys: Any) -> Any:
    """A random model whose every weight matters: norms and biases differ from ones and zeros.

    `keys` of the configuration replace those of the case.
    """
    class_name, changes = CASES[case]
    config = getattr(transformers, class_name)(**(_SIZES | changes | keys))
    torch.manual_seed(11)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.3)
    return model.to(dtype).eval()


def make_tiny_model(case: str, folder: Path, dtype: torch.dtype = torch.float32) -> TinyModel:
    """Write a case's model into a folder and read it back."""
    oracle = make_oracle(case, dtype)
    oracle.save_pretrained(folder)
    source = ModelSource("folder", folder, case)
    decoder = build_decoder(load_model_config(source))
    return TinyModel(oracle, source, open_weights(source, decoder.parameters(), decoder.prefixes))


def random_tokens(count: int, seed: int) -> list[int]:
    """Token ids of a made-up prompt."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCAB_SIZE, (count,), generator=generator).tolist()
