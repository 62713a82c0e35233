"""Decoders without weights, from the keys of a config.json."""

from __future__ import annotations

from typing import Any

from octavo.layers.decoder import Decoder
from octavo.loading.model_config import config_from_json
from octavo.models.registry import build_decoder

_KEYS: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}


def make_decoder(architecture: str = "LlamaForCausalLM", **keys: Any) -> Decoder:
    """The decoder of a small configuration with some keys changed."""
    return build_decoder(config_from_json({"architectures": [architecture], **_KEYS, **keys}, {}, "config.json"))
