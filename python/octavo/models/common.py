"""Shared by the families: tensor names, rotary settings, and the check of configuration keys."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast, get_args

from octavo.errors import CorruptFile, UnsupportedModel
from octavo.layers.attention import Attention
from octavo.layers.backend import AttentionSpec
from octavo.layers.linear import Linear, Projection
from octavo.layers.mlp import Activation, GatedMlp
from octavo.layers.norm import Norm
from octavo.layers.rope import Rope, RotaryKind, RotarySpec

if TYPE_CHECKING:
    from octavo.loading.model_config import ModelConfig, RopeConfig

__all__ = ["Keys", "activation", "attention", "gated_mlp", "layer_windows", "norm", "number", "rotary"]

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclasses.dataclass(frozen=True)
class Keys:
    """The keys of a family's config.json that change its output.

    Attributes:
        read: keys that Octavo computes with.
        fixed: keys that Octavo knows one value of; another one is refused by name.
    """

    read: frozenset[str]
    fixed: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def check(self, config: ModelConfig) -> None:
        """Refuse values that would change the output and are not computed with.

        Raises:
            UnsupportedModel: names the key, its value and the one that is supported.
        """
        for key, value in self.fixed.items():
            given = config.raw.get(key, value)
            if given != value and given is not None:
                raise UnsupportedModel(
                    f"{key}: {given!r} is not supported for {config.architecture}; Octavo supports {value!r}"
                )


def norm(config: ModelConfig, name: str, gguf_name: str, *, size: int | None = None, offset: float = 0.0) -> Norm:
    """A norm of the model's width, or of `size`."""
    return Norm(name, gguf_name, size or config.hidden_size, config.rms_norm_eps, offset=offset)


def attention(
    config: ModelConfig,
    layer: int,
    rope: Rope,
    *,
    window: int,
    qkv_bias: bool,
    output_bias: bool,
    head_norms: bool = False,
    scale: float | None = None,
    softcap: float = 0.0,
    offset: float = 0.0,
    gguf_rows_paired: bool = False,
) -> Attention:
    """Grouped-query attention under the names that most families use.

    Args:
        config: of the model.
        layer: number of the block.
        rope: its rotary table.
        window: of the layer, 0 for full attention.
        qkv_bias: queries, keys and values have a bias.
        output_bias: the output projection has one.
        head_norms: query and key heads are normed.
        scale: of the scores; None for 1 / sqrt(head_dim).
        softcap: of the scores.
        offset: of the head norms' weights.
        gguf_rows_paired: GGUF files hold rows of q and k in the order of interleaved rotary pairs.
    """
    names, gguf = f"model.layers.{layer}.self_attn", f"blk.{layer}"
    heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim

    def projection(name: str, gguf_name: str, count: int, *, paired: bool = False) -> Projection:
        return Projection(f"{names}.{name}_proj", f"{gguf}.{gguf_name}", count * dim, count if paired else 0)

    def head_norm(name: str) -> Norm | None:
        if not head_norms:
            return None
        return norm(config, f"{names}.{name}_norm", f"{gguf}.attn_{name}_norm", size=dim, offset=offset)

    projections = (
        projection("q", "attn_q", heads, paired=gguf_rows_paired),
        projection("k", "attn_k", kv_heads, paired=gguf_rows_paired),
        projection("v", "attn_v", kv_heads),
    )
    return Attention(
        AttentionSpec(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            rotary_dim=rope.spec.dim,
            scale=dim**-0.5 if scale is None else scale,
            softcap=softcap,
            window=window,
            norm_eps=config.rms_norm_eps,
        ),
        Linear(projections, config.hidden_size, bias=qkv_bias),
        Linear(
            [Projection(f"{names}.o_proj", f"{gguf}.attn_output", config.hidden_size)],
            heads * dim,
            bias=output_bias,
            shard_axis=1,
        ),
        rope,
        head_norm("q"),
        head_norm("k"),
    )


def gated_mlp(config: ModelConfig, layer: int, *, bias: bool = False) -> GatedMlp:
    """The gated MLP under the names that most families use."""
    names, gguf = f"model.layers.{layer}.mlp", f"blk.{layer}"
    inner, hidden = config.intermediate_size, config.hidden_size
    gate_up = [
        Projection(f"{names}.gate_proj", f"{gguf}.ffn_gate", inner),
        Projection(f"{names}.up_proj", f"{gguf}.ffn_up", inner),
    ]
    down = [Projection(f"{names}.down_proj", f"{gguf}.ffn_down", hidden)]
    return GatedMlp(
        Linear(gate_up, hidden, bias=bias),
        Linear(down, inner, bias=bias, shard_axis=1),
        activation(config),
    )


def activation(config: ModelConfig) -> Activation:
    """The activation of the MLP's gate.

    Raises:
        UnsupportedModel: one that Octavo does not know.
    """
    if config.hidden_act not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"hidden_act: {config.hidden_act!r} is not supported; Octavo supports {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[config.hidden_act]


def layer_windows(config: ModelConfig, default: list[bool]) -> list[int]:
    """The window of each layer, 0 for full attention.

    Args:
        config: its `layer_types` decides, where the file has it.
        default: which layers slide where the file does not say so.

    Raises:
        UnsupportedModel: a kind of layer that the family does not have.
    """
    window = config.sliding_window or 0
    types = config.raw.get("layer_types")
    if types is None:
        return [window if slides else 0 for slides in default]
    if not isinstance(types, list) or len(types) != config.num_layers or not set(types) <= {_SLIDING, _FULL}:
        raise UnsupportedModel(
            f"layer_types: {types!r} is not supported; a list of {config.num_layers} names is expected, each "
            f"{_SLIDING!r} or {_FULL!r}"
        )
    if _SLIDING in types and not window:
        raise UnsupportedModel(f"layer_types: {_SLIDING!r} needs `sliding_window`, which is missing")
    return [window if kind == _SLIDING else 0 for kind in types]


def number(config: ModelConfig, key: str, default: float) -> float:
    """A number of the configuration; `default` where it is missing or null.

    Raises:
        CorruptFile: not a number of at least 0.
    """
    value = config.raw.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise CorruptFile(f"{key}: {value!r} is not valid; a number of at least 0 is expected")
    return float(value)


def rotary(config: ModelConfig, rope: RopeConfig | None = None) -> Rope:
    """The rotary table of a model, or of the layers that `rope` is for.

    Raises:
        UnsupportedModel: a kind of scaling that Octavo does not know.
    """
    rope = rope or config.rope
    given, known = rope.parameters, get_args(RotaryKind)
    if rope.kind not in known:
        raise UnsupportedModel(f"rope_type: {rope.kind!r} is not supported; Octavo supports {', '.join(known)}")
    original = given.get("original_max_position_embeddings") or config.max_position_embeddings
    factor = given.get("factor") or config.max_position_embeddings / original
    return Rope(
        RotarySpec(
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
            attention_multiplier=given.get("attention_multiplier", 1.0),
            extrapolation=given.get("extrapolation", 1.0),
            short_factors=tuple(given.get("short_factor", ())),
            long_factors=tuple(given.get("long_factor", ())),
        )
    )
