"""A model's configuration, from `config.json` or GGUF metadata, checked and in one form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from octavo.errors import CorruptFile, ModelNotFound, UnsupportedModel
from octavo.loading import fields

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["ModelConfig", "RopeConfig", "read_json"]

_JSON_LIMIT = 64 << 20
"""Bytes: no configuration is near this; a larger file is not one."""

# Values that transformers assumes where a config.json of this model type leaves them out, as Google's do.
_GEMMA: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma2": {
        **_GEMMA,
        "vocab_size": 256_000,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    "gemma3_text": {
        **_GEMMA,
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
}

_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class RopeConfig(msgspec.Struct, kw_only=True, frozen=True):
    """Rotary position embedding.

    Attributes:
        kind: `default`, or the scaling's name: `linear`, `dynamic`, `llama3`, `yarn`, `longrope`; `factors`: the
            weights hold `rope_freqs.weight` float32[dim / 2], by which each frequency is divided (llama3 scaling as
            GGUF keeps it).
        theta: base of the frequencies.
        dim: leading elements of a head that are rotated.
        parameters: the scaling's own values under transformers' names, such as `factor`,
            `original_max_position_embeddings`, `low_freq_factor`, `beta_fast`, `attention_factor`.
    """

    kind: str
    theta: float
    dim: int
    parameters: dict[str, Any] = {}


class ModelConfig(msgspec.Struct, kw_only=True, frozen=True):
    """A causal decoder's description; sizes are positive and consistent with each other.

    Attributes:
        architecture: transformers' class name, such as `LlamaForCausalLM`.
        model_type: transformers' `model_type`, or GGUF's `general.architecture`.
        rms_norm_eps: epsilon of the norms.
        max_position_embeddings: tokens of context the model was made for.
        rope: of all layers, or of those with full attention.
        local_rope: of the layers with a sliding window, where it differs.
        sliding_window: tokens a query sees, where the file names one.
        eos_token_ids: tokens that end an answer; unite them with the tokenizer's.
        dtype: stored dtype as the file says (`bfloat16`, ...), `gguf` for GGUF, None where it says nothing.
        sampling_defaults: temperature, top_p, top_k, min_p, repetition_penalty that the model's makers recommend;
            only those given.
        raw: config.json as read, the text part of nested ones, with the defaults of its model type; of GGUF metadata
            what has a key in config.json.
    """

    architecture: str
    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    hidden_act: str
    attention_bias: bool
    mlp_bias: bool
    sliding_window: int | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    dtype: str | None
    sampling_defaults: dict[str, float]
    raw: dict[str, Any]
    local_rope: RopeConfig | None = None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CorruptFile: not JSON, not an object, or far too large. ModelNotFound: no such file.
    """
    try:
        size = path.stat().st_size
        if size > _JSON_LIMIT:
            raise CorruptFile(f"{path}: {size} bytes are too many for a configuration")
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelNotFound(f"{path}: no such file; a model folder needs it") from None
    except (ValueError, RecursionError) as error:
        raise CorruptFile(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CorruptFile(f"{path}: a JSON object is expected, not {type(value).__name__}")
    return value


def config_from_json(raw: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> ModelConfig:
    """Check config.json's and generation_config.json's values.

    Args:
        raw: config.json.
        generation: generation_config.json, empty where there is none.
        where: the file, for messages.
    """
    _refuse_quantization(raw, where)
    raw = _text_part(raw, where)
    read = fields.Reader(raw, where)
    num_heads = read.size("num_attention_heads", fields.MAX_HEADS)
    hidden_size = read.size("hidden_size", fields.MAX_WIDTH)
    num_kv_heads = read.size("num_key_value_heads", fields.MAX_HEADS, default=num_heads)
    head_dim = fields.head_dim(read, "head_dim", hidden_size, num_heads)
    fields.check_groups(num_heads, num_kv_heads, where)
    positions = read.size("max_position_embeddings", fields.MAX_POSITIONS, default=2048)
    eos = fields.token_ids(generation, "eos_token_id", where) or fields.token_ids(raw, "eos_token_id", where)
    bos = fields.token_ids(raw, "bos_token_id", where)
    return ModelConfig(
        architecture=_architecture(raw, where),
        model_type=read.text("model_type", default=""),
        vocab_size=read.size("vocab_size", fields.MAX_VOCABULARY),
        hidden_size=hidden_size,
        num_layers=read.size("num_hidden_layers", fields.MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=read.size("intermediate_size", fields.MAX_WIDTH),
        rms_norm_eps=read.number("rms_norm_eps", 0.0, 1.0, default=1e-6),
        max_position_embeddings=positions,
        rope=_rope(raw, where, head_dim, positions, "full_attention"),
        local_rope=_local_rope(raw, where, head_dim, positions),
        tie_word_embeddings=read.flag("tie_word_embeddings", default=False),
        hidden_act=read.text("hidden_activation", default="") or read.text("hidden_act", default="silu"),
        attention_bias=read.flag("attention_bias", default=False),
        mlp_bias=read.flag("mlp_bias", default=False),
        sliding_window=read.optional_size("sliding_window", fields.MAX_POSITIONS),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=eos,
        dtype=read.text("dtype", default="") or read.text("torch_dtype", default="") or None,
        sampling_defaults=_sampling_defaults(generation, where),
        raw=dict(raw),
    )


def _sampling_defaults(generation: Mapping[str, Any], where: str) -> dict[str, float]:
    """Sampling defaults of generation_config.json; `do_sample: false` is greedy at any temperature."""
    found = fields.sampling_defaults({key: generation.get(key) for key in _SAMPLING_KEYS}, where)
    if generation.get("do_sample") is False:
        greedy = {"temperature": 0.0}
        return greedy | {key: value for key, value in found.items() if key == "repetition_penalty"}
    return found


def _text_part(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The keys of the text model, under those of the whole, with the defaults of its model type."""
    nested = raw.get("text_config")
    if nested is None:
        return {**_DEFAULTS.get(str(raw.get("model_type")), {}), **raw}
    if not isinstance(nested, dict):
        raise CorruptFile(f"{where}: `text_config` is {nested!r}; an object is expected")
    text = {key: value for key, value in nested.items() if value is not None}
    whole = {key: value for key, value in raw.items() if key not in ("text_config", "vision_config", "model_type")}
    # The whole model says which tokens end an answer.
    whole_first = {
        key: raw[key] for key in ("architectures", "bos_token_id", "eos_token_id") if raw.get(key) is not None
    }
    return {**_DEFAULTS.get(str(nested.get("model_type")), {}), **whole, **text, **whole_first}


def _architecture(raw: Mapping[str, Any], where: str) -> str:
    names = raw.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    raise UnsupportedModel(f"{where}: `architectures` names no model class; Octavo needs it, such as LlamaForCausalLM")


def _refuse_quantization(raw: Mapping[str, Any], where: str) -> None:
    for key in ("quantization_config", "compression_config"):
        quantization = raw.get(key)
        if not quantization:
            continue
        method = quantization.get("quant_method") if isinstance(quantization, dict) else None
        raise UnsupportedModel(
            f"{where}: `{key}` says the weights are quantized ({method or 'method not named'}), which Octavo "
            "cannot read yet; use the unquantized checkpoint or a GGUF file"
        )


def _local_rope(raw: Mapping[str, Any], where: str, head_dim: int, positions: int) -> RopeConfig | None:
    """Rotary settings of the layers with a sliding window, where the file has some of their own."""
    by_type = raw.get("rope_parameters")
    if isinstance(by_type, dict) and isinstance(by_type.get("sliding_attention"), dict):
        return _rope(raw, where, head_dim, positions, "sliding_attention")
    if raw.get("rope_local_base_freq") is None:
        return None
    base = fields.Reader(raw, where).number("rope_local_base_freq", 0.0, 1e30, default=10000.0)
    return RopeConfig(kind="default", theta=base, dim=head_dim)


def _rope(raw: Mapping[str, Any], where: str, head_dim: int, positions: int, layer_type: str) -> RopeConfig:
    """Rotary settings, from transformers 5's `rope_parameters` or 4's `rope_theta` and `rope_scaling`."""
    parameters: dict[str, Any] = {}
    for key in ("rope_scaling", "rope_parameters"):
        value = raw.get(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise CorruptFile(f"{where}: `{key}` is {value!r}; an object is expected")
        if any(isinstance(entry, dict) for entry in value.values()):
            unknown = sorted(set(value) - {"full_attention", "sliding_attention"})
            if unknown or not isinstance(value.get(layer_type), dict):
                raise UnsupportedModel(
                    f"{where}: `{key}` has the layer types {', '.join(map(str, value))}; Octavo supports "
                    "full_attention and sliding_attention"
                )
            value = value[layer_type]
        parameters.update(value)
    defaults = {"rope_theta": 10000.0, "partial_rotary_factor": 1.0}
    merged = {key: parameters.pop(key, None) for key in defaults}
    read = fields.Reader({key: raw.get(key) if merged[key] is None else merged[key] for key in defaults}, where)
    kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
    parameters.pop("type", None)
    if not isinstance(kind, str):
        raise CorruptFile(f"{where}: `rope_type` is {kind!r}; a name is expected")
    factor = read.number("partial_rotary_factor", 0.0, 1.0, default=1.0)
    dim = int(head_dim * factor)
    if dim < 2 or dim % 2:
        raise UnsupportedModel(f"{where}: `head_dim` {head_dim} gives {dim} rotated elements; an even number is needed")
    if kind != "default" and "original_max_position_embeddings" not in parameters:
        original = raw.get("original_max_position_embeddings")
        if original is not None:
            parameters["original_max_position_embeddings"] = original
    fields.check_scaling(kind, parameters, dim, where)
    return RopeConfig(
        kind=kind,
        theta=read.number("rope_theta", 0.0, 1e30, default=10000.0),
        dim=dim,
        parameters=parameters,
    )
