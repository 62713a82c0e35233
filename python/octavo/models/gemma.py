"""Gemma 2 and Gemma 3 (text): norms around each sublayer, soft caps, and layers that slide in turn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octavo.layers.block import SandwichBlock
from octavo.layers.decoder import Decoder
from octavo.layers.embedding import Embedding, Head
from octavo.models.common import Keys, attention, gated_mlp, layer_windows, norm, number, rotary
from octavo.models.llama import COMMON_KEYS

if TYPE_CHECKING:
    from octavo.layers.rope import Rope
    from octavo.loading.model_config import ModelConfig

__all__ = ["GEMMA2_KEYS", "GEMMA3_KEYS", "gemma2", "gemma3"]

_KEYS = COMMON_KEYS | {
    "hidden_activation",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "sliding_window",
    "layer_types",
    "attention_bias",
}
GEMMA2_KEYS = Keys(_KEYS, {"use_bidirectional_attention": False})
GEMMA3_KEYS = Keys(_KEYS | {"sliding_window_pattern", "rope_local_base_freq"}, {"use_bidirectional_attention": False})

# Gemma 3 with vision puts the text model, which this decoder is, under one of these names.
_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_VISION = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")


def gemma2(config: ModelConfig) -> Decoder:
    """Gemma2ForCausalLM: every second layer slides, from the first on."""
    slides = [layer % 2 == 0 for layer in range(config.num_layers)]
    rope = rotary(config)
    return _decoder(config, layer_windows(config, slides), rope, rope, head_norms=False)


def gemma3(config: ModelConfig) -> Decoder:
    """Gemma3ForCausalLM: every sixth layer is full, with a rotary base of its own; head norms in place of soft caps."""
    pattern = int(number(config, "sliding_window_pattern", 6)) or 6
    slides = [(layer + 1) % pattern != 0 for layer in range(config.num_layers)]
    local = rotary(config, config.local_rope) if config.local_rope is not None else rotary(config)
    return _decoder(config, layer_windows(config, slides), rotary(config), local, head_norms=True)


def _decoder(config: ModelConfig, windows: list[int], rope: Rope, local: Rope, *, head_norms: bool) -> Decoder:
    """The decoder of both; norms are stored as w and applied as 1 + w."""

    def block(layer: int, window: int) -> SandwichBlock:
        names, gguf = f"model.layers.{layer}", f"blk.{layer}"
        return SandwichBlock(
            attention_norm=norm(config, f"{names}.input_layernorm", f"{gguf}.attn_norm", offset=1.0),
            attention=attention(
                config,
                layer,
                local if window else rope,
                window=window,
                qkv_bias=config.attention_bias,
                output_bias=config.attention_bias,
                head_norms=head_norms,
                scale=number(config, "query_pre_attn_scalar", config.head_dim) ** -0.5,
                softcap=number(config, "attn_logit_softcapping", 0.0),
                offset=1.0,
            ),
            attention_output_norm=norm(
                config, f"{names}.post_attention_layernorm", f"{gguf}.post_attention_norm", offset=1.0
            ),
            mlp_norm=norm(config, f"{names}.pre_feedforward_layernorm", f"{gguf}.ffn_norm", offset=1.0),
            mlp=gated_mlp(config, layer),
            output_norm=norm(config, f"{names}.post_feedforward_layernorm", f"{gguf}.post_ffw_norm", offset=1.0),
        )

    embedding = Embedding(config.vocab_size, config.hidden_size, scale=config.hidden_size**0.5)
    return Decoder(
        config.architecture,
        embedding,
        [block(layer, window) for layer, window in enumerate(windows)],
        norm(config, "model.norm", "output_norm", offset=1.0),
        Head(embedding, tied=config.tie_word_embeddings, softcap=number(config, "final_logit_softcapping", 0.0)),
        ignored=_VISION,
        prefixes=_PREFIXES,
    )
