from __future__ import annotations

from typing import Any

import pytest
from decoders import make_decoder
from octavo.errors import UnsupportedModel
from octavo.layers.decoder import Decoder


def decoder_of(architecture: str, **changes: Any) -> Decoder:
    return make_decoder(architecture, **{"num_hidden_layers": 3, **changes})


def windows_of(architecture: str, **changes: Any) -> list[int]:
    return [block.attention.spec.window for block in decoder_of(architecture, **changes).blocks]


def names_of(architecture: str, **changes: Any) -> set[str]:
    return {parameter.name for parameter in decoder_of(architecture, **changes).parameters()}


def test_unknown_architectures_are_refused_by_name() -> None:
    with pytest.raises(
        UnsupportedModel,
        match="'OPTForCausalLM' is not supported; Octavo runs LlamaForCausalLM, MistralForCausalLM",
    ):
        decoder_of("OPTForCausalLM")


def test_unknown_activations_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="hidden_act: 'relu2' is not supported; Octavo supports silu"):
        decoder_of("LlamaForCausalLM", hidden_act="relu2")


def test_llama_biases_follow_the_flags() -> None:
    assert not any(name.endswith("bias") for name in names_of("LlamaForCausalLM"))
    biased = names_of("LlamaForCausalLM", attention_bias=True, mlp_bias=True)
    for module in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj"):
        assert f"model.layers.2.{module}.bias" in biased


def test_windows() -> None:
    assert windows_of("LlamaForCausalLM", sliding_window=8) == [0, 0, 0]
    assert windows_of("MistralForCausalLM", sliding_window=8) == [8, 8, 8]
    assert windows_of("MistralForCausalLM", sliding_window=None) == [0, 0, 0]
    qwen = {"sliding_window": 8, "max_window_layers": 1}
    assert windows_of("Qwen2ForCausalLM", use_sliding_window=False, **qwen) == [0, 0, 0]
    assert windows_of("Qwen2ForCausalLM", use_sliding_window=True, **qwen) == [0, 8, 8]
    assert windows_of("Gemma2ForCausalLM", sliding_window=8) == [8, 0, 8]
    assert windows_of("Gemma3ForCausalLM", sliding_window=8, sliding_window_pattern=2) == [8, 0, 8]


def test_layer_types_decide_where_they_are_given() -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    for architecture in ("Qwen2ForCausalLM", "Qwen3ForCausalLM"):
        changes: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
        assert windows_of(architecture, layer_types=types, **changes) == [8, 0, 8]
    for wrong in (types[:2], ["chunked_attention"] * 3, "sliding_attention"):
        with pytest.raises(UnsupportedModel, match="layer_types"):
            windows_of("Qwen3ForCausalLM", use_sliding_window=True, sliding_window=8, layer_types=wrong)


def test_qwen_differs_by_bias_and_norm() -> None:
    two, three = names_of("Qwen2ForCausalLM"), names_of("Qwen3ForCausalLM")
    assert "model.layers.0.self_attn.k_proj.bias" in two
    assert "model.layers.0.self_attn.o_proj.bias" not in two
    assert "model.layers.0.self_attn.q_norm.weight" in three
    assert "model.layers.0.self_attn.k_proj.bias" not in three
