"""Rotary tables against transformers' own functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from octavo.layers.rope import cos_sin_table, inverse_frequencies
from octavo.loading.model_config import config_from_json
from octavo.models.common import rotary
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SCALINGS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 4096},
    "yarn-bare": {"factor": 2.5},
    "yarn-mscale": {
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
        "beta_fast": 24,
        "beta_slow": 2,
        "truncate": False,
    },
    "yarn-attention": {"factor": 4.0, "original_max_position_embeddings": 4096, "attention_factor": 1.25},
    "longrope": {
        "short_factor": [1.0 + 0.05 * i for i in range(32)],
        "long_factor": [1.5 + i for i in range(32)],
        "original_max_position_embeddings": 4096,
        "factor": 4.0,
    },
}


def make_config(kind: str, **values: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=64,
        num_hidden_layers=1,
        vocab_size=32,
        max_position_embeddings=16384,
        architectures=["LlamaForCausalLM"],
        rope_parameters={"rope_type": kind, "rope_theta": 500000.0, **values},
    )


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("length", [2048, 16384, 20000])
def test_frequencies_equal_transformers(name: str, length: int) -> None:
    kind = name.split("-")[0]
    config = make_config(kind, **SCALINGS[name])
    spec = rotary(config_from_json(config.to_dict(), {}, "config.json")).spec
    expected, expected_scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)
    frequencies, scale = inverse_frequencies(spec, length)
    torch.testing.assert_close(torch.from_numpy(frequencies), expected, rtol=1e-6, atol=0)
    assert scale == pytest.approx(expected_scale, rel=1e-9)


def test_default_table_holds_cosines_then_sines() -> None:
    spec = rotary(config_from_json(make_config("default").to_dict(), {}, "config.json")).spec
    table = torch.from_numpy(cos_sin_table(spec, 300))
    assert table.shape == (300, 64)
    assert table.dtype == torch.float32
    angles = torch.arange(300).double().unsqueeze(1) / 500000.0 ** (torch.arange(32).double() / 32)
    torch.testing.assert_close(table[:, :32].double(), angles.cos(), rtol=0, atol=3e-5)
    torch.testing.assert_close(table[:, 32:].double(), angles.sin(), rtol=0, atol=3e-5)


def test_divisors_are_llama3_scaling_as_gguf_keeps_it() -> None:
    llama3 = SCALINGS["llama3"]
    scaled = rotary(config_from_json(make_config("llama3", **llama3).to_dict(), {}, "config.json")).spec
    plain = rotary(config_from_json(make_config("default").to_dict(), {}, "config.json")).spec
    divisors = inverse_frequencies(plain, 64)[0] / inverse_frequencies(scaled, 64)[0]
    assert divisors[0] == 1.0
    assert divisors[-1] == pytest.approx(32.0)
    np.testing.assert_allclose(cos_sin_table(plain, 64, divisors), cos_sin_table(scaled, 64), rtol=0, atol=1e-5)


def test_unknown_scaling_is_refused() -> None:
    from octavo.errors import UnsupportedModel

    config: Any = SimpleNamespace(
        rope=SimpleNamespace(kind="mrope", parameters={}, theta=1.0, dim=64), max_position_embeddings=64
    )
    with pytest.raises(UnsupportedModel, match=r"rope_type: 'mrope' is not supported; Octavo supports default, linear"):
        rotary(config)
