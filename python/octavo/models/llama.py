"""The Llama family, and those that differ from it by a bias, a window or a norm of queries and keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast, get_args

from octavo.errors import UnsupportedModel
from octavo.layers.spec import Activation, DecoderSpec, RotaryKind, RotarySpec

if TYPE_CHECKING:
    from octavo.loading.model_config import ModelConfig

__all__ = ["llama", "mistral", "qwen2", "qwen3", "rotary"]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}


def llama(config: ModelConfig, **changes: Any) -> DecoderSpec:
    """LlamaForCausalLM: one flag gives all four projections of the attention a bias."""
    return DecoderSpec(
        **{
            "architecture": config.architecture,
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_layers": config.num_layers,
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "norm_eps": config.rms_norm_eps,
            "rotary": rotary(config),
            "windows": (0,) * config.num_layers,
            "attention_scale": config.head_dim**-0.5,
            "qkv_bias": config.attention_bias,
            "output_bias": config.attention_bias,
            "mlp_bias": config.mlp_bias,
            "activation": _activation(config),
            "tied_embeddings": config.tie_word_embeddings,
        }
        | changes
    )


def mistral(config: ModelConfig) -> DecoderSpec:
    """MistralForCausalLM: no biases, one window for all layers where the file names one."""
    return llama(
        config,
        windows=(config.sliding_window or 0,) * config.num_layers,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
    )


def qwen2(config: ModelConfig) -> DecoderSpec:
    """Qwen2ForCausalLM: queries, keys and values always have a bias, the output projection never."""
    return llama(config, windows=_qwen_windows(config), qkv_bias=True, output_bias=False, mlp_bias=False)


def qwen3(config: ModelConfig) -> DecoderSpec:
    """Qwen3ForCausalLM: a norm of each query and key head."""
    return llama(config, windows=_qwen_windows(config), mlp_bias=False, qk_norm=True)


def rotary(config: ModelConfig) -> RotarySpec:
    """The rotary settings of a model description.

    Raises:
        UnsupportedModel: a kind of scaling that Octavo does not know.
    """
    rope, given = config.rope, config.rope.parameters
    known = get_args(RotaryKind)
    if rope.kind not in known:
        raise UnsupportedModel(f"rope_type: {rope.kind!r} is not known; Octavo knows {', '.join(known)}")
    original = given.get("original_max_position_embeddings") or config.max_position_embeddings
    factor = given.get("factor") or config.max_position_embeddings / original
    return RotarySpec(
        dim=rope.dim,
        theta=rope.theta,
        kind=cast("RotaryKind", rope.kind),
        factor=factor,
        max_position=config.max_position_embeddings,
        original_max_position=original,
        low_freq_factor=given.get("low_freq_factor", 1.0),
        high_freq_factor=given.get("high_freq_factor", 4.0),
        beta_fast=given.get("beta_fast") or 32.0,
        beta_slow=given.get("beta_slow") or 1.0,
        truncate=given.get("truncate", True),
        attention_factor=given.get("attention_factor"),
        mscale=given.get("mscale"),
        mscale_all_dim=given.get("mscale_all_dim"),
        short_factors=tuple(given.get("short_factor", ())),
        long_factors=tuple(given.get("long_factor", ())),
    )


def _activation(config: ModelConfig) -> Activation:
    if config.hidden_act not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"hidden_act: {config.hidden_act!r} is not known; Octavo knows {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[config.hidden_act]


def _qwen_windows(config: ModelConfig) -> tuple[int, ...]:
    """Windows from the first layer beyond `max_window_layers`, and only where the file asks for them."""
    window = (config.sliding_window or 0) if config.raw.get("use_sliding_window") else 0
    first = config.raw.get("max_window_layers", 28)
    return tuple(window if layer >= first else 0 for layer in range(config.num_layers))
