"""Every key of a family's configuration is computed with, known not to matter, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import transformers
from decoders import make_decoder
from octavo.errors import UnsupportedModel
from octavo.models.registry import FAMILIES

CONFIGS = {
    "LlamaForCausalLM": "LlamaConfig",
    "MistralForCausalLM": "MistralConfig",
    "Qwen2ForCausalLM": "Qwen2Config",
    "Qwen3ForCausalLM": "Qwen3Config",
    "Gemma2ForCausalLM": "Gemma2Config",
    "Gemma3ForCausalLM": "Gemma3TextConfig",
    "Gemma3ForConditionalGeneration": "Gemma3TextConfig",
}
# Keys without a part in the logits of a text, and why.
NEUTRAL = {
    "attention_dropout": "training",
    "initializer_range": "training",
    "use_cache": "how transformers runs",
    "pretraining_tp": "how transformers runs; 1 and more give the same sums",
    "output_hidden_states": "what transformers returns",
    "return_dict": "what transformers returns",
    "output_attentions": "what transformers returns",
    "chunk_size_feed_forward": "how transformers runs",
    "is_encoder_decoder": "no decoder of these families reads it",
    "id2label": "classification",
    "label2id": "classification",
    "problem_type": "classification",
    "pad_token_id": "padding of batches",
    "transformers_version": "who wrote the file",
    "_name_or_path": "where the file came from",
}


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_key_is_accounted_for(architecture: str) -> None:
    keys = FAMILIES[architecture].keys
    theirs = set(getattr(transformers, CONFIGS[architecture])().to_dict())
    # transformers writes its pattern under a private name as well.
    theirs.discard("_sliding_window_pattern")
    unknown = theirs - keys.read - set(keys.fixed) - set(NEUTRAL)
    assert not unknown, "new keys of transformers: compute with them, or refuse or list them here"


def signature(decoder: Any) -> Any:
    """All that a configuration decides: tensors, attention, positions, activations and scales."""
    return (
        [(parameter.name, parameter.shape, parameter.offset) for parameter in decoder.parameters()],
        [(block.attention.spec, block.attention.rope.spec, block.mlp.activation) for block in decoder.blocks],
        (decoder.embedding.scale, decoder.head.scale, decoder.head.softcap),
    )


QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
CHANGES: dict[str, list[dict[str, Any]]] = {
    "LlamaForCausalLM": [
        {"attention_bias": True},
        {"mlp_bias": True},
        {"hidden_act": "gelu"},
        {"rms_norm_eps": 1e-3},
        {"rope_theta": 5e5},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"partial_rotary_factor": 0.5},
        {"head_dim": 16},
        {"tie_word_embeddings": True},
    ],
    "MistralForCausalLM": [{"sliding_window": 8}],
    "Qwen2ForCausalLM": [QWEN_WINDOW, {**QWEN_WINDOW, "layer_types": ["sliding_attention", "full_attention"]}],
    "Qwen3ForCausalLM": [QWEN_WINDOW, {"attention_bias": True}],
    "Gemma2ForCausalLM": [
        {"query_pre_attn_scalar": 100},
        {"attn_logit_softcapping": 7.0},
        {"final_logit_softcapping": None},
        {"sliding_window": 9},
        {"layer_types": ["full_attention", "sliding_attention"]},
        {"hidden_activation": "silu"},
        {"attention_bias": True},
    ],
    "Gemma3ForCausalLM": [
        {"rope_local_base_freq": 77.0},
        {"sliding_window_pattern": 2},
        {"rope_parameters": {"full_attention": {"rope_theta": 9.0}, "sliding_attention": {"rope_theta": 8.0}}},
    ],
}
MODEL_TYPES = {"Gemma2ForCausalLM": "gemma2", "Gemma3ForCausalLM": "gemma3_text"}


@pytest.mark.parametrize(
    ("architecture", "changes"), [(name, change) for name, changes in CHANGES.items() for change in changes], ids=str
)
def test_keys_that_change_the_output_are_read(architecture: str, changes: dict[str, Any]) -> None:
    keys = {"model_type": MODEL_TYPES.get(architecture, "")}
    assert signature(make_decoder(architecture, **keys, **changes)) != signature(make_decoder(architecture, **keys))
    assert set(changes) <= FAMILIES[architecture].keys.read


@pytest.mark.parametrize("architecture", ["Gemma2ForCausalLM", "Gemma3ForCausalLM"])
def test_values_that_are_not_computed_with_are_refused(architecture: str) -> None:
    build: Callable[..., Any] = make_decoder
    with pytest.raises(UnsupportedModel, match="use_bidirectional_attention: True is not supported"):
        build(architecture, use_bidirectional_attention=True)
