"""Gemma 2 and 3 against transformers: from safetensors and GGUF, and through the whole engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from decoder_driver import DecoderDriver
from octavo import LLM, SamplingParams
from octavo._core import max_blocks_per_sequence
from octavo.loading.model_files import load_model_config, open_weights
from octavo.loading.resolve import ModelSource, resolve_model
from octavo.models.registry import build_decoder
from tiny_models import CASES, VOCAB_SIZE, logits_of, make_oracle, random_tokens
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

FAMILIES = ["gemma2", "gemma3"]
# GGUF's names of the tensors, as llama.cpp's converter writes them.
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert expected.std() > 0.5, "the oracle's logits say nothing"
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


def gguf_name(name: str) -> str:
    module, _, suffix = name.rpartition(".")
    if module in GGUF_NAMES:
        return f"{GGUF_NAMES[module]}.{suffix}"
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest]}.{suffix}"


def write_gguf(oracle: Any, family: str, path: Path) -> None:
    """A file as llama.cpp's converter writes it: norms as 1 + w, the head tied, no row moved."""
    config = oracle.config
    writer = gguf.GGUFWriter(path, family)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_sliding_window(config.sliding_window)
    if family == "gemma2":
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    else:
        rope = config.rope_parameters["full_attention"]
        writer.add_rope_freq_base(rope["rope_theta"])
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    for name, tensor in oracle.state_dict().items():
        if name == "lm_head.weight":
            continue
        values = tensor.float().numpy()
        writer.add_tensor(gguf_name(name), values + np.float32(1) if "norm" in name else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_tokenizer(folder: Path) -> None:
    """A byte for each token, so that the engine has a tokenizer; the tests give token ids."""
    names = sorted(pre_tokenizers.ByteLevel.alphabet())[:VOCAB_SIZE]
    tokenizer = Tokenizer(BPE({name: index for index, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


@pytest.fixture(scope="module", params=FAMILIES)
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A family's oracle, and the same model as a folder and as a GGUF file."""
    folder = tmp_path_factory.mktemp(request.param)
    # llama.cpp has no keys for the base of sliding layers and the scale of scores: they are as in the real models.
    keys: dict[str, Any] = {"query_pre_attn_scalar": 64}
    if request.param == "gemma3":
        rope = CASES["gemma3"][1]["rope_parameters"]
        keys["rope_parameters"] = {**rope, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}}
    oracle = make_oracle(request.param, initializer_range=0.06, **keys)
    oracle.save_pretrained(folder / "folder")
    write_tokenizer(folder / "folder")
    write_gguf(oracle, request.param, folder / "model.gguf")
    return {"oracle": oracle, "folder": folder / "folder", "gguf": folder / "model.gguf"}


def driver(source: ModelSource) -> DecoderDriver:
    decoder = build_decoder(load_model_config(source))
    return DecoderDriver(decoder, open_weights(source, decoder.parameters(), decoder.prefixes))


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_logits_at_every_position(models: dict[str, Any], kind: str) -> None:
    tokens = random_tokens(120, seed=5)
    expected = logits_of(models["oracle"], tokens)
    ours = driver(resolve_model(str(models[kind])))
    close(ours.alone(0, tokens), expected)
    # In chunks, then a token at a time, beyond the window.
    parts = [ours.alone(1, tokens[start : start + 31]) for start in range(0, 93, 31)]
    parts += [ours.alone(1, [token]) for token in tokens[93:]]
    close(torch.cat(parts), expected)
    # Behind a prefix that another sequence computed, longer than the window.
    ours.share(0, 2, 5)
    close(ours.alone(2, tokens[80:]), expected[80:])


def greedy(oracle: Any, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_of(oracle, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_greedy_tokens_through_the_engine(models: dict[str, Any], kind: str) -> None:
    prompts = [random_tokens(length, seed=length) for length in (7, 40, 90)]
    prompts.append(prompts[2][:64] + random_tokens(9, seed=1))
    expected = [greedy(models["oracle"], prompt, 12) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 64}
    settings["tokenizer"] = str(models["folder"])
    with LLM(str(models[kind]), num_blocks=200, max_num_seqs=8, **settings) as llm:
        for _ in range(2):  # the second time with prefix hits
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected


def test_the_text_part_of_a_model_with_vision(tmp_path: Path) -> None:
    oracle = make_oracle("gemma3", initializer_range=0.06)
    text = oracle.config.to_dict()
    tensors = {
        f"language_model.{name}": value.clone()
        for name, value in oracle.state_dict().items()
        if name != "lm_head.weight"
    }
    tensors["vision_tower.vision_model.embeddings.patch_embedding.weight"] = torch.zeros(2, 3)
    tensors["multi_modal_projector.mm_input_projection_weight"] = torch.zeros(2, 2)
    from safetensors.torch import save_file

    save_file(tensors, tmp_path / "model.safetensors")
    raw = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "text_config": {**text, "architectures": None},
        "vision_config": {"hidden_size": 8, "model_type": "siglip_vision_model"},
        "eos_token_id": [1, 106],
    }
    (tmp_path / "config.json").write_text(json.dumps(raw))
    source = resolve_model(str(tmp_path))
    assert load_model_config(source).eos_token_ids == (1, 106)
    tokens = random_tokens(50, seed=8)
    close(driver(source).alone(0, tokens), logits_of(oracle, tokens))


def test_values_that_configurations_leave_out(tmp_path: Path) -> None:
    keys = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"}
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    text |= {"sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
    (tmp_path / "config.json").write_text(json.dumps({**keys, "text_config": text}))
    config = load_model_config(resolve_model(str(tmp_path)))
    theirs = transformers.Gemma3TextConfig(**{name: value for name, value in text.items() if name != "model_type"})
    decoder = build_decoder(config)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert config.vocab_size == theirs.vocab_size
    types = ["sliding_attention" if block.attention.spec.window else "full_attention" for block in decoder.blocks]
    assert types == theirs.layer_types
    full, local = decoder.blocks[5].attention.rope.spec, decoder.blocks[0].attention.rope.spec
    assert (full.theta, full.kind, full.factor) == (1e6, "linear", 8.0)
    assert (local.theta, local.kind) == (1e4, "default")


def test_windows_give_blocks_back(models: dict[str, Any]) -> None:
    prompts = [random_tokens(300, seed=3), random_tokens(150, seed=4)]
    expected = [greedy(models["oracle"], prompt, 8) for prompt in prompts]
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 320, "max_num_batched_tokens": 32}
    windows = [spec.attention.spec.window for spec in build_decoder(load_model_config(source(models))).blocks]
    assert 0 < max(windows) < 32
    groups = build_decoder(load_model_config(source(models))).cache_layout.windows
    needed = max_blocks_per_sequence(320, 16, list(groups), 32)
    # Without releasing, each group would hold all 20 blocks of the sequence.
    assert needed < 20 * len(groups)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(str(models["folder"]), num_blocks=needed + 1, max_num_seqs=4, **settings) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert llm.stats()["blocks_used"] == 0


def test_preempted_sequences_are_recomputed(models: dict[str, Any]) -> None:
    prompts = [random_tokens(40, seed=seed) for seed in range(6)]
    expected = [greedy(models["oracle"], prompt, 40) for prompt in prompts]
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "max_num_batched_tokens": 64}
    groups = build_decoder(load_model_config(source(models))).cache_layout.windows
    needed = max_blocks_per_sequence(96, 16, list(groups), 64)
    params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
    with LLM(str(models["folder"]), num_blocks=2 * needed, max_num_seqs=6, **settings) as llm:
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert llm.stats()["preemptions"] > 0


def source(models: dict[str, Any]) -> ModelSource:
    return resolve_model(str(models["folder"]))
