"""Qwen2 and Qwen3."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.models.common import Keys, layer_windows
from octavo.models.llama import COMMON_KEYS, pre_norm_decoder

if TYPE_CHECKING:
    from octavo.layers.decoder import Decoder
    from octavo.loading.model_config import ModelConfig

__all__ = ["QWEN2_KEYS", "QWEN3_KEYS", "qwen2", "qwen3"]

_WINDOW_KEYS = {"sliding_window", "use_sliding_window", "max_window_layers", "layer_types"}
QWEN2_KEYS = Keys(COMMON_KEYS | _WINDOW_KEYS)
QWEN3_KEYS = Keys(COMMON_KEYS | _WINDOW_KEYS | {"attention_bias"})


def qwen2(config: ModelConfig) -> Decoder:
    """Qwen2ForCausalLM: queries, keys and values have a bias, the output projection has none."""
    return pre_norm_decoder(config, _windows(config), qkv_bias=True)


def qwen3(config: ModelConfig) -> Decoder:
    """Qwen3ForCausalLM: query and key heads are normed."""
    bias = config.attention_bias
    return pre_norm_decoder(config, _windows(config), qkv_bias=bias, output_bias=bias, head_norms=True)


def _windows(config: ModelConfig) -> list[int]:
    """`layer_types` where the file has it, else windows from `max_window_layers` on; none unless the file asks."""
    if not config.raw.get("use_sliding_window"):
        return [0] * config.num_layers
    first = config.raw.get("max_window_layers", 28)
    return layer_windows(config, [layer >= first for layer in range(config.num_layers)])
