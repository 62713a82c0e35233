"""The Llama family, and those that differ from it by a bias or a window: Mistral."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.layers.block import PreNormBlock
from octavo.layers.decoder import Decoder
from octavo.layers.embedding import Embedding, Head
from octavo.models.common import Keys, attention, gated_mlp, layer_windows, norm, rotary

if TYPE_CHECKING:
    from collections.abc import Sequence

    from octavo.loading.model_config import ModelConfig

__all__ = ["COMMON_KEYS", "LLAMA_KEYS", "MISTRAL_KEYS", "llama", "mistral", "pre_norm_decoder"]

COMMON_KEYS = frozenset(
    {
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "max_position_embeddings",
        "rms_norm_eps",
        "rope_parameters",
        "rope_theta",
        "rope_scaling",
        "partial_rotary_factor",
        "original_max_position_embeddings",
        "tie_word_embeddings",
        "bos_token_id",
        "eos_token_id",
        "architectures",
        "model_type",
        "dtype",
        "torch_dtype",
        "quantization_config",
    }
)
"""Keys that every family reads."""

LLAMA_KEYS = Keys(COMMON_KEYS | {"attention_bias", "mlp_bias"})
MISTRAL_KEYS = Keys(COMMON_KEYS | {"sliding_window", "layer_types"})


def llama(config: ModelConfig) -> Decoder:
    """LlamaForCausalLM: one flag gives all four projections of attention a bias."""
    bias = config.attention_bias
    windows = [0] * config.num_layers
    # GGUF's name `llama` covers Mistral too, whose files name a window.
    if config.dtype == "gguf" and config.sliding_window:
        windows = [config.sliding_window] * config.num_layers
    return pre_norm_decoder(config, windows, qkv_bias=bias, output_bias=bias, mlp_bias=config.mlp_bias)


def mistral(config: ModelConfig) -> Decoder:
    """MistralForCausalLM: no biases, and one window for all layers where the file names one."""
    return pre_norm_decoder(config, layer_windows(config, [True] * config.num_layers))


def pre_norm_decoder(
    config: ModelConfig,
    windows: Sequence[int],
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    head_norms: bool = False,
) -> Decoder:
    """A decoder of pre-norm blocks under Llama's names.

    Args:
        config: of the model.
        windows: of each layer, 0 for full attention.
        qkv_bias: queries, keys and values have a bias.
        output_bias: attention's output projection has one.
        mlp_bias: the MLP's layers have one.
        head_norms: query and key heads are normed.
    """
    rope = rotary(config)
    # Only files of GGUF's own `llama` hold rows in pairs.
    paired = config.model_type == "llama"
    blocks = [
        PreNormBlock(
            norm(config, f"model.layers.{layer}.input_layernorm", f"blk.{layer}.attn_norm"),
            attention(
                config,
                layer,
                rope,
                window=window,
                qkv_bias=qkv_bias,
                output_bias=output_bias,
                head_norms=head_norms,
                gguf_rows_paired=paired,
            ),
            norm(config, f"model.layers.{layer}.post_attention_layernorm", f"blk.{layer}.ffn_norm"),
            gated_mlp(config, layer, bias=mlp_bias),
        )
        for layer, window in enumerate(windows)
    ]
    embedding = Embedding(config.vocab_size, config.hidden_size)
    final_norm = norm(config, "model.norm", "output_norm")
    head = Head(embedding, tied=config.tie_word_embeddings)
    return Decoder(config.architecture, embedding, blocks, final_norm, head)
