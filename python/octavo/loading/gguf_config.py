"""GGUF metadata as a `ModelConfig`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from octavo import _core
from octavo.errors import CorruptFile, UnsupportedModel
from octavo.loading import fields
from octavo.loading.model_config import ModelConfig, RopeConfig
from octavo.text.gguf_tokens import end_token_ids

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

__all__ = ["config_from_metadata", "gguf_model_config", "refuse_split"]

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
}
_GELU_ARCHITECTURES = frozenset({"gemma2", "gemma3"})
# Keys of config.json that a family reads from `ModelConfig.raw`, and what GGUF calls them.
_RAW_KEYS = {
    "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping",
}
# Number of layers of the 27B models. llama.cpp knows them by it and scales their scores by hidden size over heads.
_WIDE_SCALE_LAYERS = {"gemma2": 46, "gemma3": 62}
_SAMPLING_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}
_ROPE_PARAMETERS = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def gguf_model_config(path: Path) -> ModelConfig:
    """The model's description from the file's metadata; see `load_model_config`."""
    metadata, tensors = _core.read_gguf(str(path))
    refuse_split(metadata, path)
    return config_from_metadata(metadata, {name: shape for name, _, shape, _, _ in tensors}, str(path))


def refuse_split(metadata: Mapping[str, Any], path: Path) -> None:
    """Refuse one part of a model that is split over several files."""
    count = metadata.get("split.count", 0)
    if isinstance(count, int) and count > 1:
        raise UnsupportedModel(
            f"{path}: is one of {count} parts of a split GGUF model, which Octavo cannot read; "
            "merge them first (llama-gguf-split --merge)"
        )


def config_from_metadata(metadata: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], where: str) -> ModelConfig:
    """Check a GGUF file's description.

    Args:
        metadata: keys and values of the header.
        shapes: GGUF tensor names to shapes in torch's order.
        where: the file, for messages.

    Raises:
        CorruptFile: values that cannot be, or contradict the tensors.
        UnsupportedModel: an architecture unknown here.
    """
    arch = metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"{where}: `general.architecture` is {arch!r}; Octavo reads GGUF files of {', '.join(_ARCHITECTURES)}"
        )
    if metadata.get(f"{arch}.expert_count"):
        raise UnsupportedModel(f"{where}: `{arch}.expert_count`: mixtures of experts cannot be read yet")
    read = fields.Reader({key: _uniform(value) for key, value in metadata.items()}, where)
    hidden_size = read.size(f"{arch}.embedding_length", fields.MAX_WIDTH)
    num_heads = read.size(f"{arch}.attention.head_count", fields.MAX_HEADS)
    num_kv_heads = read.size(f"{arch}.attention.head_count_kv", fields.MAX_HEADS, default=num_heads)
    head_dim = fields.head_dim(read, f"{arch}.attention.key_length", hidden_size, num_heads)
    value_dim = read.optional_size(f"{arch}.attention.value_length", fields.MAX_WIDTH)
    if value_dim not in (None, head_dim):
        raise UnsupportedModel(f"{where}: keys of {head_dim} and values of {value_dim} elements cannot be read yet")
    fields.check_groups(num_heads, num_kv_heads, where)
    bos = fields.token_ids(metadata, "tokenizer.ggml.bos_token_id", where)
    return ModelConfig(
        architecture=_ARCHITECTURES[arch],
        model_type=arch,
        vocab_size=_vocab_size(read, arch, metadata, shapes),
        hidden_size=hidden_size,
        num_layers=read.size(f"{arch}.block_count", fields.MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=read.size(f"{arch}.feed_forward_length", fields.MAX_WIDTH),
        rms_norm_eps=read.number(f"{arch}.attention.layer_norm_rms_epsilon", 0.0, 1.0, default=1e-6),
        max_position_embeddings=read.size(f"{arch}.context_length", fields.MAX_POSITIONS),
        rope=_rope(read, arch, head_dim, shapes),
        tie_word_embeddings="output.weight" not in shapes,
        hidden_act="gelu_pytorch_tanh" if arch in _GELU_ARCHITECTURES else "silu",
        attention_bias="blk.0.attn_q.bias" in shapes,
        mlp_bias="blk.0.ffn_up.bias" in shapes,
        sliding_window=read.optional_size(f"{arch}.attention.sliding_window", fields.MAX_POSITIONS),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=end_token_ids(metadata),
        dtype="gguf",
        sampling_defaults=fields.sampling_defaults(
            {name: metadata.get(key) for name, key in _SAMPLING_KEYS.items()}, where
        ),
        raw=_raw(read, arch, hidden_size, num_heads, head_dim),
        local_rope=_local_rope(read, arch, head_dim),
    )


def _raw(read: fields.Reader, arch: str, hidden_size: int, num_heads: int, head_dim: int) -> dict[str, Any]:
    """Keys of one family besides the common ones, under config.json's names."""
    raw: dict[str, Any] = {}
    for name, key in _RAW_KEYS.items():
        if read.values.get(f"{arch}.{key}") is not None:
            raw[name] = read.number(f"{arch}.{key}", 0.0, 1e30, default=0.0)
    pattern = read.values.get(f"{arch}.attention.sliding_window_pattern")
    layers = read.size(f"{arch}.block_count", fields.MAX_LAYERS)
    if isinstance(pattern, list) and len(pattern) == layers:
        raw["layer_types"] = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    elif isinstance(pattern, int) and not isinstance(pattern, bool):
        raw["sliding_window_pattern"] = read.size(f"{arch}.attention.sliding_window_pattern", fields.MAX_LAYERS)
    wide = layers == _WIDE_SCALE_LAYERS.get(arch)
    raw["query_pre_attn_scalar"] = hidden_size // num_heads if wide else head_dim
    return raw


def _local_rope(read: fields.Reader, arch: str, head_dim: int) -> RopeConfig | None:
    """Rotary settings of layers with a sliding window; only Gemma 3 has some of their own."""
    if arch != "gemma3":
        return None
    theta = read.number(f"{arch}.rope.freq_base_swa", 0.0, 1e30, default=10000.0)
    return RopeConfig(kind="default", theta=theta, dim=head_dim)


def _uniform(value: Any) -> Any:
    """A list that repeats one value, as that value: some writers give one entry a layer."""
    if isinstance(value, list) and value and not isinstance(value[0], list) and len(value) <= fields.MAX_LAYERS:
        return value[0] if all(entry == value[0] for entry in value) else value
    return value


def _vocab_size(
    read: fields.Reader, arch: str, metadata: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]
) -> int:
    """Rows of the embedding, which is what logits are computed for."""
    embedding = shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise CorruptFile(f"{read.where}: lacks the tensor `token_embd.weight`, or it is no matrix")
    rows = embedding[0]
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not 1 <= rows <= fields.MAX_VOCABULARY or (isinstance(tokens, list) and len(tokens) > rows):
        raise CorruptFile(f"{read.where}: `token_embd.weight` has {rows} rows for a larger vocabulary")
    return rows


def _yarn(read: fields.Reader, arch: str) -> dict[str, Any]:
    """YaRN's temperature as llama.cpp computes it: the file's factors multiply it and do not replace it."""

    def number(key: str, default: float) -> float:
        return read.number(f"{arch}.rope.scaling.{key}", -1e30, 1e30, default=default)

    # A negative share means that the file does not say.
    extrapolation = number("yarn_ext_factor", -1.0)
    extrapolation = 1.0 if extrapolation < 0 else extrapolation
    multiplier = number("attn_factor", 1.0)
    if extrapolation == 0:
        multiplier *= number("yarn_attn_factor", 1.0)
    given: dict[str, Any] = {"attention_multiplier": multiplier, "extrapolation": extrapolation}
    log_multiplier = number("yarn_log_multiplier", 0.0)
    if log_multiplier:
        given |= {"mscale": 1.0, "mscale_all_dim": log_multiplier}
    return given


def _rope(read: fields.Reader, arch: str, head_dim: int, shapes: Mapping[str, Sequence[int]]) -> RopeConfig:
    where = read.where
    dim = read.size(f"{arch}.rope.dimension_count", head_dim, default=head_dim)
    if dim % 2:
        raise CorruptFile(f"{where}: `{arch}.rope.dimension_count` is {dim}; an even number is needed")
    kind = read.text(f"{arch}.rope.scaling.type", default="none")
    parameters: dict[str, Any] = {}
    if kind == "none":
        kind = "default"
        # Files older than `scaling.type` give linear scaling by this key alone.
        scale = read.number(f"{arch}.rope.scale_linear", 0.0, 1e30, default=1.0)
        if scale != 1.0:
            kind, parameters = "linear", {"factor": scale}
    else:
        for key, name in _ROPE_PARAMETERS.items():
            value = read.values.get(f"{arch}.rope.scaling.{key}")
            if value is not None:
                parameters[name] = value
        if kind == "yarn":
            parameters |= _yarn(read, arch)
        fields.check_scaling(kind, parameters, dim, where)
    factors = shapes.get("rope_freqs.weight")
    if factors is not None:
        if list(factors) != [dim // 2]:
            raise CorruptFile(f"{where}: `rope_freqs.weight` has shape {list(factors)}; [{dim // 2}] is needed")
        if kind != "default":
            raise UnsupportedModel(f"{where}: rotary scaling `{kind}` together with `rope_freqs.weight`")
        kind = "factors"
    return RopeConfig(
        kind=kind,
        theta=read.number(f"{arch}.rope.freq_base", 0.0, 1e30, default=10000.0),
        dim=dim,
        parameters=parameters,
    )
