"""Models small enough to load in a moment, of real widths: random weights in files as models have them.

`OCTAVO_TEST_DEVICE=cpu` runs the tests that use them on the CPU engine, with smaller models and shorter prompts: what
that proves is that the tests themselves work.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo.loading.model_files import load_model_config
from octavo.loading.resolve import resolve_model
from octavo.models.registry import build_decoder

DEVICE = os.environ.get("OCTAVO_TEST_DEVICE", "cuda")
ON_CPU = DEVICE == "cpu"
# One process runs them all: an engine takes the memory of the card.
NEEDS_DEVICE: list[Any] = [pytest.mark.xdist_group("gpu"), *([] if ON_CPU else [pytest.mark.gpu])]
SETTINGS: dict[str, Any] = {
    "device": DEVICE,
    "dtype": "bfloat16",
    "load_format": "dummy",
    "max_num_seqs": 16,
    "max_model_len": 2048,
    "num_blocks": 512,
}
"""Of an engine with random weights that is ready in a moment."""

_WIDTHS: dict[str, Any] = {
    "vocab_size": 1024 if ON_CPU else 32000,
    "hidden_size": 256 if ON_CPU else 1024,
    "intermediate_size": 384 if ON_CPU else 3072,
    "num_hidden_layers": 2 if ON_CPU else 4,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_attention_heads": 4 if ON_CPU else 16,
        "num_key_value_heads": 2 if ON_CPU else 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_attention_heads": 4 if ON_CPU else 32,
        "num_key_value_heads": 1 if ON_CPU else 8,
        "head_dim": 64,
    },
    "mistral-window": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "num_attention_heads": 4 if ON_CPU else 16,
        "num_key_value_heads": 1 if ON_CPU else 4,
        "head_dim": 128,
        "sliding_window": 40 if ON_CPU else 700,
    },
}
# Large enough that attention picks and choices are clear, small enough that bfloat16 matters.
_DEVIATION = 0.05


def write_config(name: str, folder: Path) -> Path:
    """Write the description of a model of `CONFIGS` into a folder."""
    (folder / "config.json").write_text(json.dumps(_WIDTHS | CONFIGS[name]))
    return folder


def write_model(name: str, folder: Path) -> Path:
    """Write a model of `CONFIGS` into a folder; equal names give equal weights on one kind of device."""
    write_config(name, folder)
    decoder = build_decoder(load_model_config(resolve_model(str(folder))))
    generator = torch.Generator(DEVICE)
    header: dict[str, Any] = {}
    parts, end = [], 0
    for parameter in decoder.parameters():
        tensor, shape = parameter.name, parameter.shape
        generator.manual_seed(zlib.crc32(tensor.encode()))
        values = torch.empty(shape, dtype=torch.float32, device=DEVICE)
        if tensor.endswith("norm.weight"):
            values.uniform_(0.5, 1.5, generator=generator)
        else:
            values.normal_(0.0, _DEVIATION, generator=generator)
        parts.append(values.to(torch.bfloat16).view(torch.uint8).cpu().numpy().tobytes())
        begin, end = end, end + len(parts[-1])
        header[tensor] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.writelines(parts)
    return folder
