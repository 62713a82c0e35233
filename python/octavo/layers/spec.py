"""What differs between the families of decoders: a family is a `DecoderSpec`, not a forward of its own."""

from __future__ import annotations

import dataclasses
from typing import Literal

__all__ = ["Activation", "DecoderSpec", "RotaryKind", "RotarySpec", "WeightNames"]

Activation = Literal["silu", "gelu", "gelu_tanh"]
RotaryKind = Literal["default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors"]


@dataclasses.dataclass(frozen=True)
class RotarySpec:
    """How positions turn queries and keys.

    Attributes:
        dim: channels of a head that are turned; the rest pass through.
        theta: base of the wavelengths.
        kind: how the wavelengths are stretched beyond the context the model was trained on; `factors`: each frequency
            is divided by what the tensor `rope_freqs.weight` holds.
        interleaved: pairs are (2i, 2i + 1) instead of (i, i + dim / 2).
        factor: the stretch.
        max_position: positions the model claims to know.
        original_max_position: positions it was trained on before the stretch.
        low_freq_factor, high_freq_factor: the band between kept and stretched wavelengths (llama3).
        beta_fast, beta_slow, truncate: the band in turns over the original context (yarn).
        attention_factor: cosines and sines are multiplied by it; None for the kind's own formula.
        mscale, mscale_all_dim: alternatives to `attention_factor` that some yarn models carry.
        short_factors, long_factors: a divisor a frequency, within and beyond the original context (longrope).
    """

    dim: int
    theta: float = 10000.0
    kind: RotaryKind = "default"
    interleaved: bool = False
    factor: float = 1.0
    max_position: int = 0
    original_max_position: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True)
class WeightNames:
    """What a family calls its tensors, by Hugging Face's names; `{layer}` is the layer's number.

    Each names a module: `.weight` and, where the spec says so, `.bias` follow.
    """

    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    attention_norm: str = "model.layers.{layer}.input_layernorm"
    q: str = "model.layers.{layer}.self_attn.q_proj"
    k: str = "model.layers.{layer}.self_attn.k_proj"
    v: str = "model.layers.{layer}.self_attn.v_proj"
    q_norm: str = "model.layers.{layer}.self_attn.q_norm"
    k_norm: str = "model.layers.{layer}.self_attn.k_norm"
    o: str = "model.layers.{layer}.self_attn.o_proj"
    mlp_norm: str = "model.layers.{layer}.post_attention_layernorm"
    gate: str = "model.layers.{layer}.mlp.gate_proj"
    up: str = "model.layers.{layer}.mlp.up_proj"
    down: str = "model.layers.{layer}.mlp.down_proj"


@dataclasses.dataclass(frozen=True)
class DecoderSpec:
    """One decoder: pre-norm attention and gated MLP blocks around a residual stream.

    Attributes:
        architecture: Hugging Face's name of the class.
        vocab_size: rows of the embedding.
        hidden_size: width of the residual stream.
        intermediate_size: width of the MLP.
        num_layers: blocks.
        num_heads, num_kv_heads: query heads, and heads of keys and values.
        head_dim: channels of a head.
        norm_eps: of every RMS norm.
        rotary: how positions enter.
        windows: a layer's sliding window in tokens, 0 for full attention.
        attention_scale: of the scores, before the soft cap.
        attention_softcap: cap * tanh(score / cap); 0 for none.
        qkv_bias, output_bias, mlp_bias: which dense layers add a bias.
        qk_norm: an RMS norm over each head of queries and keys, before the rotation.
        activation: of the gate.
        embedding_scale: of the embedding's output.
        logits_scale: of the logits.
        logits_softcap: cap * tanh(logit / cap), after the scale; 0 for none.
        tied_embeddings: the head is the embedding.
        names: of the tensors.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rotary: RotarySpec
    windows: tuple[int, ...]
    attention_scale: float
    attention_softcap: float = 0.0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    activation: Activation = "silu"
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_softcap: float = 0.0
    tied_embeddings: bool = False
    names: WeightNames = dataclasses.field(default_factory=WeightNames)

    @property
    def q_size(self) -> int:
        """Width of all query heads."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads, and of all value heads."""
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Width of the merged projection of queries, keys and values."""
        return self.q_size + 2 * self.kv_size

    def num_parameters(self) -> int:
        """Elements of embedding, head, dense layers, biases and norms."""
        tables = self.vocab_size * self.hidden_size * (1 if self.tied_embeddings else 2)
        dense = self.qkv_size * self.hidden_size + self.q_size * self.hidden_size
        dense += 3 * self.intermediate_size * self.hidden_size
        dense += self.qkv_size if self.qkv_bias else 0
        dense += self.hidden_size if self.output_bias else 0
        dense += 2 * self.intermediate_size + self.hidden_size if self.mlp_bias else 0
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.qk_norm else 0)
        return tables + self.num_layers * (dense + norms) + self.hidden_size

    def workspace_bytes(self, max_tokens: int, mlp_rows: int, head_rows: int, itemsize: int) -> int:
        """What `Decoder` takes for a step's activations, and for those of the MLP and the head a slice at a time."""
        token = 2 * self.hidden_size + max(self.hidden_size, self.q_size) + self.qkv_size
        elements = max_tokens * token + min(mlp_rows, max_tokens) * 3 * self.intermediate_size
        return (
            elements + head_rows * (2 * self.hidden_size + max(self.hidden_size, self.q_size))
        ) * itemsize + head_rows * 4 * self.vocab_size

    def kv_bytes_per_token(self, itemsize: int) -> int:
        """What one token takes in the KV cache of all layers."""
        return 2 * self.num_layers * self.kv_size * itemsize
