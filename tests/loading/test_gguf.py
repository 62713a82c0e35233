from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from decoders import make_decoder
from gguf import GGMLQuantizationType as Kind
from octavo.errors import CorruptFile, ModelError, ModelNotFound, UnsupportedModel
from octavo.layers.parameter import Parameter
from octavo.layers.rope import cos_sin_table
from octavo.loading.model_files import load_model_config, open_weights
from octavo.loading.resolve import ModelSource, resolve_model
from octavo.models.common import rotary
from octavo.models.registry import build_decoder

HIDDEN, HEADS, KV_HEADS, INNER, VOCAB = 256, 8, 4, 512, 320
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")


def permuted(rows: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of q and k."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def raw(rng: np.random.Generator, shape: tuple[int, int], kind: str) -> np.ndarray:
    """A tensor as the file stores it, values of a weight's size."""
    values = rng.standard_normal(shape).astype(np.float32) * 0.05
    if kind not in ("Q4_K", "Q5_K", "Q6_K"):
        return gguf.quants.quantize(values, Kind[kind])
    block, size = gguf.GGML_QUANT_SIZES[Kind[kind]]
    blocks = rng.integers(0, 256, (shape[0], shape[1] // block, size), dtype=np.uint8)
    scale = np.float16(0.01).tobytes()
    places = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,)}[kind]
    for place in places:
        blocks[..., place : place + 2] = np.frombuffer(scale, dtype=np.uint8)
    return blocks.reshape(shape[0], -1)


def parameters(arch: str, *, tied: bool, biases: bool) -> dict[str, Parameter]:
    """What the model of a file calls its tensors, by their GGUF names."""
    names = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    decoder = make_decoder(
        names.get(arch, "LlamaForCausalLM"),
        model_type=arch,
        tie_word_embeddings=tied,
        attention_bias=biases,
        num_hidden_layers=1,
        hidden_size=HIDDEN,
        **heads,
    )
    return {parameter.gguf_name: parameter for parameter in decoder.parameters()}


def tensors_of(source: ModelSource) -> list[Parameter]:
    """The parameters of the model that a file describes."""
    return list(build_decoder(load_model_config(source)).parameters())


def write(
    path: Path,
    kind: str = "F32",
    *,
    tied: bool = True,
    biases: bool = False,
    factors: int = 0,
    arch: str = "llama",
    **changes: Any,
) -> dict[str, np.ndarray]:
    """A one-layer model; returns the tensors in Hugging Face's order, as gguf-py dequantizes them."""
    rng = np.random.default_rng(7)
    names = parameters(arch, tied=tied, biases=biases)
    writer = gguf.GGUFWriter(path, arch)
    values = {
        "block_count": 1,
        "context_length": 512,
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 5e5,
        "rope.dimension_count": HIDDEN // HEADS,
        **changes,
    }
    for key, value in values.items():
        name = key if key.startswith(("tokenizer.", "general.", "split.")) else f"{arch}.{key}"
        if value is None:
            continue
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            writer.add_uint32(name, value)
    kv_size = HIDDEN // HEADS * KV_HEADS
    matrices = {
        "token_embd": (VOCAB, HIDDEN),
        "blk.0.attn_q": (HIDDEN, HIDDEN),
        "blk.0.attn_k": (kv_size, HIDDEN),
        "blk.0.attn_v": (kv_size, HIDDEN),
        "blk.0.attn_output": (HIDDEN, HIDDEN),
        "blk.0.ffn_gate": (INNER, HIDDEN),
        "blk.0.ffn_up": (INNER, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, INNER),
    }
    if not tied:
        matrices["output"] = (VOCAB, HIDDEN)
    expected = {}
    heads = {"blk.0.attn_q": HEADS, "blk.0.attn_k": KV_HEADS} if arch == "llama" else {}
    for name, shape in matrices.items():
        blocks = raw(rng, shape, kind)
        expected[names[f"{name}.weight"].name] = gguf.quants.dequantize(blocks, Kind[kind]).reshape(shape)
        if name in heads:
            blocks = permuted(blocks, heads[name])
        writer.add_tensor(f"{name}.weight", blocks, raw_dtype=Kind[kind])
    if biases:
        for name, rows in (("attn_q", HIDDEN), ("attn_k", kv_size), ("attn_v", kv_size)):
            bias = rng.standard_normal(rows).astype(np.float32)
            expected[names[f"blk.0.{name}.bias"].name] = bias
            full = f"blk.0.{name}"
            writer.add_tensor(f"{full}.bias", permuted(bias, heads[full]) if full in heads else bias)
    if factors:
        values = np.linspace(1, 8, factors, dtype=np.float32)
        expected["rope_freqs.weight"] = values
        writer.add_tensor("rope_freqs.weight", values)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        norm = rng.standard_normal(HIDDEN).astype(np.float32)
        expected[names[f"{name}.weight"].name] = norm
        writer.add_tensor(f"{name}.weight", norm)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


@pytest.mark.parametrize("kind", KINDS)
def test_every_tensor_type(tmp_path, kind):
    expected = write(tmp_path / "m.gguf", kind, tied=False)
    source = resolve_model(str(tmp_path / "m.gguf"))
    weights = open_weights(source, tensors_of(source))
    assert sorted(weights.names()) == sorted(expected)
    weights.prefetch()
    for name, values in expected.items():
        tensor = weights.to_torch(name, torch.float32)
        stored, shape = weights.describe(name)
        assert stored == (kind if values.ndim == 2 else "F32")
        assert shape == values.shape
        np.testing.assert_allclose(tensor.numpy(), values, rtol=1e-6, atol=1e-7, err_msg=name)
        rounded = weights.to_torch(name, torch.bfloat16)
        np.testing.assert_allclose(rounded.float().numpy(), values, rtol=2**-8, atol=1e-6, err_msg=name)


def test_rows_of_biases_are_put_back_too(tmp_path):
    expected = write(tmp_path / "m.gguf", biases=True)
    source = resolve_model(str(tmp_path / "m.gguf"))
    weights = open_weights(source, tensors_of(source))
    for name, values in expected.items():
        assert np.array_equal(weights.to_torch(name).numpy(), values), name
    assert load_model_config(source).attention_bias


@pytest.mark.parametrize("arch", ["qwen2", "qwen3"])
def test_architectures_whose_rows_stay(tmp_path, arch):
    expected = write(tmp_path / "m.gguf", arch=arch)
    source = resolve_model(str(tmp_path / "m.gguf"))
    weights = open_weights(source, tensors_of(source))
    for name, values in expected.items():
        assert np.array_equal(weights.to_torch(name).numpy(), values), name
    assert load_model_config(source).architecture == {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[arch]


@pytest.mark.demo
def test_demo_weights_equal_what_transformers_makes_of_them(demo):
    from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

    transformers = LlamaTensorProcessor({"num_attention_heads": 9, "num_key_value_heads": 3})
    names = {parameter.gguf_name: parameter.name for parameter in tensors_of(demo)}
    weights = open_weights(demo, tensors_of(demo))
    tensors = gguf.GGUFReader(demo.path).tensors
    assert sorted(names) == sorted(tensor.name for tensor in tensors)
    for tensor in tensors:
        if not tensor.name.startswith(("blk.0.", "blk.17.", "blk.29.", "output", "token")):
            continue
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        expected = torch.from_numpy(transformers.process(values, tensor.name).weights.copy())
        assert torch.equal(weights.to_torch(names[tensor.name], torch.float32), expected), tensor.name


@pytest.mark.demo
def test_demo_config_equals_what_transformers_reads(demo):
    from transformers import AutoConfig

    expected = AutoConfig.from_pretrained(demo.path.parent, gguf_file=demo.path.name)
    config = load_model_config(demo)
    assert config.architecture == "LlamaForCausalLM"
    assert config.vocab_size == expected.vocab_size == 49152
    assert config.hidden_size == expected.hidden_size
    assert config.num_layers == expected.num_hidden_layers
    assert config.num_heads == expected.num_attention_heads
    assert config.num_kv_heads == expected.num_key_value_heads
    assert config.head_dim == expected.head_dim
    assert config.intermediate_size == expected.intermediate_size
    assert config.rms_norm_eps == expected.rms_norm_eps
    assert config.max_position_embeddings == expected.max_position_embeddings
    assert config.rope.theta == expected.rope_parameters["rope_theta"]
    assert config.tie_word_embeddings is expected.tie_word_embeddings is True
    assert config.eos_token_ids == (expected.eos_token_id,)
    assert config.bos_token_id == expected.bos_token_id


def config_of(path: Path, **changes: Any):
    write(path, **changes)
    return load_model_config(resolve_model(str(path)))


def test_config(tmp_path):
    config = config_of(tmp_path / "m.gguf", tied=False)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (1, 8, 4, 32)
    assert (config.rope.kind, config.rope.theta, config.rope.dim) == ("default", 5e5, 32)
    assert not config.tie_word_embeddings
    assert not config.attention_bias
    assert config.vocab_size == VOCAB
    assert config.dtype == "gguf"


def test_scaled_positions(tmp_path):
    config = config_of(
        tmp_path / "m.gguf",
        **{
            "rope.scaling.type": "yarn",
            "rope.scaling.factor": 4.0,
            "rope.scaling.original_context_length": 128,
            "rope.scaling.attn_factor": 1.25,
        },
    )
    assert config.rope.kind == "yarn"
    assert config.rope.parameters == {
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "attention_multiplier": 1.25,
        "extrapolation": 1.0,
    }


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128}


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {"attn_factor": 1.0},
        {"attn_factor": 1.25},
        {"yarn_ext_factor": 0.0, "yarn_attn_factor": 1.5, "attn_factor": 1.25},
        {"yarn_ext_factor": 0.5},
        {"yarn_beta_fast": 16.0, "yarn_beta_slow": 2.0},
        {"yarn_log_multiplier": 0.5},
    ],
    ids=str,
)
def test_yarn_is_what_llama_cpp_computes(tmp_path, keys):
    config = config_of(tmp_path / "m.gguf", **YARN, **{f"rope.scaling.{key}": value for key, value in keys.items()})
    table = cos_sin_table(rotary(config).spec, 300)
    np.testing.assert_allclose(table, llama_cpp_yarn(keys, positions=300), rtol=0, atol=2e-5)


def llama_cpp_yarn(keys: dict[str, float], positions: int) -> np.ndarray:
    """ggml's rope_yarn and the factors that llama.cpp gives it, in float64 (ggml-cpu/ops.cpp, llama-context.cpp)."""
    dim, base, factor, original = HIDDEN // HEADS, 5e5, 4.0, 128
    ext, scale = keys.get("yarn_ext_factor", 1.0), 1 / factor

    def magnitude(weight: float) -> float:
        return 0.1 * weight * np.log(factor) + 1.0

    attn = keys.get("yarn_attn_factor", 1.0)
    if ext != 0:
        attn = magnitude(1.0)
        if "yarn_log_multiplier" in keys:
            attn = magnitude(1.0) / magnitude(keys["yarn_log_multiplier"])
        attn /= 1 + 0.1 * np.log(factor)
    attn *= keys.get("attn_factor", 1.0)

    def correction(turns: float) -> float:
        return dim * np.log(original / (turns * 2 * np.pi)) / (2 * np.log(base))

    low = max(0.0, np.floor(correction(keys.get("yarn_beta_fast", 32.0))))
    high = min(dim - 1.0, np.ceil(correction(keys.get("yarn_beta_slow", 1.0))))
    pairs = np.arange(dim // 2)
    ramp = (1 - np.clip((pairs - low) / max(0.001, high - low), 0, 1)) * ext
    extrapolated = np.outer(np.arange(positions), base ** (-2.0 * pairs / dim))
    theta = extrapolated * scale * (1 - ramp) + extrapolated * ramp
    if ext != 0:
        attn *= 1 + 0.1 * np.log(1 / scale)
    return np.concatenate([np.cos(theta), np.sin(theta)], axis=1) * attn


def test_frequency_factors(tmp_path):
    expected = write(tmp_path / "m.gguf", factors=16)
    source = resolve_model(str(tmp_path / "m.gguf"))
    assert load_model_config(source).rope.kind == "factors"
    factors = open_weights(source).to_torch("rope_freqs.weight", torch.float32)
    assert np.array_equal(factors.numpy(), expected["rope_freqs.weight"])
    with pytest.raises(CorruptFile, match=r"`rope_freqs\.weight` has shape \[8\]; \[16\] is needed"):
        config_of(tmp_path / "short.gguf", factors=8)
    scaled = {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0}
    with pytest.raises(UnsupportedModel, match=r"together with `rope_freqs\.weight`"):
        config_of(tmp_path / "both.gguf", factors=16, **scaled)


def test_counts_given_a_layer_each(tmp_path):
    config = config_of(tmp_path / "m.gguf", **{"attention.head_count_kv": [KV_HEADS, KV_HEADS]})
    assert config.num_kv_heads == KV_HEADS


def test_recommended_sampling(tmp_path):
    config = config_of(tmp_path / "m.gguf", **{"general.sampling.temp": 0.5, "general.sampling.top_k": 20})
    assert config.sampling_defaults == {"temperature": 0.5, "top_k": 20}


def test_end_tokens(tmp_path):
    config = config_of(
        tmp_path / "m.gguf",
        **{
            "tokenizer.ggml.tokens": ["a", "b", "c", "d"],
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.eot_token_id": 3,
            "tokenizer.ggml.eom_token_id": 2,
        },
    )
    assert config.eos_token_ids == (1, 3, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arch": "mamba"}, "`general.architecture` is 'mamba'"),
        ({"expert_count": 8}, "llama.expert_count"),
        ({"attention.value_length": 16}, "values of 16"),
        ({"split.count": 3}, "one of 3 parts"),
    ],
)
def test_unsupported_files(tmp_path, changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        config_of(tmp_path / "m.gguf", **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": None}, "`llama.block_count` is missing"),
        ({"block_count": 0}, "`llama.block_count` is 0"),
        ({"embedding_length": "many"}, "`llama.embedding_length` is 'many'"),
        ({"attention.head_count": 7, "attention.head_count_kv": 7}, "cannot be divided among 7 heads"),
        ({"attention.head_count_kv": 3}, "8 query heads cannot share 3"),
        ({"attention.head_count_kv": [1, 2]}, r"head_count_kv` is \[1, 2\]"),
        ({"attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon` is nan"),
        ({"rope.freq_base": -1.0}, "freq_base` is -1"),
        ({"rope.dimension_count": 33}, "dimension_count` is 33"),
        ({"rope.scaling.type": "linear"}, "`factor` is missing"),
        ({"tokenizer.ggml.tokens": [str(i) for i in range(VOCAB + 1)]}, "rows for a larger vocabulary"),
    ],
)
def test_contradictory_files(tmp_path, changes, message):
    with pytest.raises(CorruptFile, match=message):
        config_of(tmp_path / "m.gguf", **changes)


def test_rows_that_heads_cannot_share(tmp_path):
    write(tmp_path / "m.gguf")
    tensors = parameters("llama", tied=True, biases=False).values()
    uneven = [dataclasses.replace(tensor, gguf_heads=24) for tensor in tensors]
    weights = open_weights(resolve_model(str(tmp_path / "m.gguf")), uneven)
    with pytest.raises(CorruptFile, match="which 24 heads cannot share"):
        weights.get("model.layers.0.self_attn.q_proj.weight")


@pytest.mark.parametrize("keep", [0, 3, 8, 30, 400, -1])
def test_truncated_files(tmp_path, keep):
    write(tmp_path / "whole.gguf")
    path = tmp_path / "m.gguf"
    path.write_bytes((tmp_path / "whole.gguf").read_bytes()[:keep])
    # As if it had been cut after it was found: one without its first four bytes is refused by name already.
    source = ModelSource("gguf", path, "m")
    for read in (load_model_config, open_weights):
        with pytest.raises(ModelError, match=r"m\.gguf"):
            read(source)


def test_missing_file(tmp_path):
    with pytest.raises(ModelNotFound, match=r"none\.gguf"):
        resolve_model(str(tmp_path / "none.gguf"))
