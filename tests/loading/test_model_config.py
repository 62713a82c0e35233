from __future__ import annotations

import json
import subprocess
import sys

import pytest
from octavo.errors import CorruptFile, ModelNotFound, UnsupportedModel
from octavo.loading.model_files import load_model_config
from octavo.loading.resolve import ModelSource

BASE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128009],
    "torch_dtype": "bfloat16",
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def load(tmp_path):
    def load(generation=None, **changes):
        raw = {key: value for key, value in {**BASE, **changes}.items() if value is not ...}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return load_model_config(ModelSource("config-only", tmp_path, "m"))

    return load


def test_all_fields(load):
    config = load()
    assert config.architecture == "LlamaForCausalLM"
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (32, 32, 8, 128)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (128256, 4096, 14336)
    assert config.rms_norm_eps == 1e-5
    assert config.max_position_embeddings == 131072
    assert (config.rope.kind, config.rope.theta, config.rope.dim) == ("default", 10000.0, 128)
    assert config.eos_token_ids == (128001, 128009)
    assert config.bos_token_id == 128000
    assert config.dtype == "bfloat16"
    assert (config.tie_word_embeddings, config.attention_bias, config.mlp_bias) == (False, False, False)
    assert config.hidden_act == "silu"
    assert config.sampling_defaults == {}
    assert config.raw["model_type"] == "llama"


def test_what_may_be_missing_or_null(load):
    config = load(
        num_key_value_heads=None, rms_norm_eps=..., max_position_embeddings=None, eos_token_id=None, torch_dtype=...
    )
    assert config.num_kv_heads == 32
    assert config.rms_norm_eps == 1e-6
    assert config.max_position_embeddings == 2048
    assert config.eos_token_ids == ()
    assert config.dtype is None


def test_head_dim_of_its_own(load):
    assert load(head_dim=96).head_dim == 96


@pytest.mark.parametrize(
    "given",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": 500000, "rope_scaling": {"type": "llama3", **LLAMA3}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}},
    ],
    ids=["transformers 4", "older", "transformers 5"],
)
def test_rotary_scaling_in_every_spelling(load, given):
    rope = load(**given).rope
    assert (rope.kind, rope.theta, rope.parameters) == ("llama3", 500000.0, LLAMA3)


def test_partial_rotary(load):
    assert load(partial_rotary_factor=0.5).rope.dim == 64


def test_generation_config_takes_precedence(load):
    config = load({"eos_token_id": [7, 9, 7], "temperature": 0.6, "top_p": 0.9, "top_k": None, "do_sample": True})
    assert config.eos_token_ids == (7, 9)
    assert config.sampling_defaults == {"temperature": 0.6, "top_p": 0.9}


def test_do_sample_false_is_greedy(load):
    generation = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}
    assert load(generation=generation).sampling_defaults == {"temperature": 0.0, "repetition_penalty": 1.1}
    assert load(generation={"do_sample": True, "temperature": 0.6}).sampling_defaults == {"temperature": 0.6}


def test_what_transformers_writes(make_checkpoint):
    folder, _ = make_checkpoint(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4})
    config = load_model_config(ModelSource("folder", folder, "m"))
    assert (config.head_dim, config.num_kv_heads, config.rope.kind) == (16, 2, "linear")
    assert config.rope.parameters == {"factor": 2.0}
    assert config.dtype == "float32"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": ...}, "`hidden_size` is missing"),
        ({"vocab_size": 0}, "`vocab_size` is 0; it must lie between"),
        ({"num_hidden_layers": -3}, "`num_hidden_layers` is -3"),
        ({"num_hidden_layers": 10**9}, "`num_hidden_layers` is 1000000000"),
        ({"intermediate_size": 1.5}, "`intermediate_size` is 1.5; a whole number"),
        ({"num_attention_heads": True}, "`num_attention_heads` is True"),
        ({"num_attention_heads": 31}, "cannot be divided among 31 heads"),
        ({"num_key_value_heads": 5}, "32 query heads cannot share 5"),
        ({"rms_norm_eps": "small"}, "`rms_norm_eps` is 'small'"),
        ({"rms_norm_eps": float("inf")}, "`rms_norm_eps` is inf"),
        ({"rope_theta": 0}, "`rope_theta` is 0"),
        ({"rope_scaling": "linear"}, "`rope_scaling` is 'linear'"),
        ({"rope_scaling": {"type": 3}}, "`rope_type` is 3"),
        ({"rope_scaling": {"type": "linear"}}, "`factor` is missing from the rotary scaling `linear`"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}, "`short_factor`"),
        ({"tie_word_embeddings": "yes"}, "`tie_word_embeddings` is 'yes'"),
        ({"eos_token_id": "</s>"}, "`eos_token_id` is '</s>'"),
        ({"generation": {"temperature": "hot"}}, "`temperature` is 'hot'"),
    ],
)
def test_values_that_cannot_be(load, changes, message):
    with pytest.raises(CorruptFile, match=message):
        load(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ...}, "`architectures` names no model class"),
        ({"architectures": []}, "`architectures` names no model class"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized .gptq."),
        ({"quantization_config": {}, "compression_config": {"format": "x"}}, "`compression_config`"),
        ({"rope_parameters": {"full": {"rope_type": "default"}}}, "has the layer types full; Octavo supports"),
        ({"partial_rotary_factor": 0.01}, "1 rotated elements"),
    ],
)
def test_features_that_are_not_there(load, changes, message):
    with pytest.raises(UnsupportedModel, match=message):
        load(**changes)


@pytest.mark.parametrize("text", ["", "{", "[1]", "\xff", '{"a":' * 10000])
def test_files_that_are_no_json_object(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CorruptFile, match=r"config\.json"):
        load_model_config(ModelSource("config-only", tmp_path, "m"))


def test_no_file(tmp_path):
    with pytest.raises(ModelNotFound, match=r"config\.json"):
        load_model_config(ModelSource("folder", tmp_path, "m"))


def test_code_of_the_model_is_ignored(load, tmp_path):
    (tmp_path / "modeling_evil.py").write_text("raise SystemExit('ran')")
    config = load(auto_map={"AutoModelForCausalLM": "modeling_evil.Evil"})
    assert config.architecture == "LlamaForCausalLM"


def test_no_torch_is_imported(make_checkpoint):
    folder, _ = make_checkpoint()
    program = (
        "import sys; from octavo.loading.model_files import load_model_config; "
        "from octavo.loading.resolve import resolve_model; import octavo.text.tokenizer, octavo.loading.weights; "
        f"load_model_config(resolve_model({str(folder)!r})); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
