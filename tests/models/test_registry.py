from __future__ import annotations

from typing import Any

import pytest
from octavo.errors import UnsupportedModel
from octavo.loading.model_config import config_from_json
from octavo.models.registry import decoder_spec


def spec_of(architecture: str, **changes: Any) -> Any:
    raw = {
        "architectures": [architecture],
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    return decoder_spec(config_from_json(raw | changes, {}, "config.json"))


def test_unknown_architectures_are_refused_by_name() -> None:
    with pytest.raises(
        UnsupportedModel,
        match="'OPTForCausalLM' is not supported; Octavo runs LlamaForCausalLM, MistralForCausalLM",
    ):
        spec_of("OPTForCausalLM")


def test_unknown_activations_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="hidden_act: 'relu2' is not known; Octavo knows silu"):
        spec_of("LlamaForCausalLM", hidden_act="relu2")


def test_llama_biases_follow_the_flags() -> None:
    plain = spec_of("LlamaForCausalLM")
    assert (plain.qkv_bias, plain.output_bias, plain.mlp_bias) == (False, False, False)
    biased = spec_of("LlamaForCausalLM", attention_bias=True, mlp_bias=True)
    assert (biased.qkv_bias, biased.output_bias, biased.mlp_bias) == (True, True, True)


def test_windows() -> None:
    assert spec_of("LlamaForCausalLM", sliding_window=8).windows == (0, 0, 0)
    assert spec_of("MistralForCausalLM", sliding_window=8).windows == (8, 8, 8)
    assert spec_of("MistralForCausalLM", sliding_window=None).windows == (0, 0, 0)
    qwen = {"sliding_window": 8, "max_window_layers": 1}
    assert spec_of("Qwen2ForCausalLM", use_sliding_window=False, **qwen).windows == (0, 0, 0)
    assert spec_of("Qwen2ForCausalLM", use_sliding_window=True, **qwen).windows == (0, 8, 8)


def test_qwen_differs_by_bias_and_norm() -> None:
    assert spec_of("Qwen2ForCausalLM").qkv_bias
    assert not spec_of("Qwen2ForCausalLM").output_bias
    assert spec_of("Qwen3ForCausalLM").qk_norm
    assert not spec_of("Qwen3ForCausalLM").qkv_bias
