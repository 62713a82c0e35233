"""A GPU's memory plan against what the parts of a step really allocate, counted on tensors without memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from octavo._core import Core
from octavo.config import EngineConfig
from octavo.kernels.step import PlanLayout
from octavo.layers.dummy import DummyWeights
from octavo.layers.spec import DecoderSpec, RotarySpec
from octavo.runner.cuda_build import cuda_needs, make_step
from octavo.runner.memory import plan_memory

MIB, GIB = 1 << 20, 1 << 30
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_layers": 28,
        "num_heads": 16,
        "num_kv_heads": 8,
        "windows": (0,) * 28,
        "qk_norm": True,
        "tied_embeddings": True,
    },
    "llama3-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_layers": 32,
        "num_heads": 32,
        "num_kv_heads": 8,
        "windows": (0,) * 32,
    },
    "with windows and biases": {
        "vocab_size": 32000,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_layers": 6,
        "num_heads": 16,
        "num_kv_heads": 4,
        "windows": (0, 1024) * 3,
        "qkv_bias": True,
        "output_bias": True,
        "mlp_bias": True,
    },
}


def make_spec(shape: dict[str, Any]) -> DecoderSpec:
    rotary = RotarySpec(dim=128, max_position=40960)
    common = {"architecture": "M", "head_dim": 128, "norm_eps": 1e-6, "rotary": rotary, "attention_scale": 0.09}
    return DecoderSpec(**common, **shape)


def allocated() -> int:
    """Bytes of all tensors on the meta device, memory that several share once."""
    gc.collect()
    storages = {
        x.untyped_storage()._cdata: x.untyped_storage().nbytes()
        for x in gc.get_objects()
        if type(x) is torch.Tensor and x.device.type == "meta"
    }
    return sum(storages.values())


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    "changes", [{}, {"max_num_seqs": 1024, "max_num_batched_tokens": 2048}, {"kv_cache_dtype": "fp8", "block_size": 32}]
)
def test_the_plan_holds_what_is_allocated(shape: dict[str, Any], changes: dict[str, Any]) -> None:
    spec = make_spec(shape)
    config = EngineConfig(model="m", **{"max_model_len": 9000, **changes})
    needs = cuda_needs(config, spec)
    plan = plan_memory(config, spec, name="m", dtype="bfloat16", free_bytes=60 * GIB, needs=needs)
    before = allocated()
    make, weights_bytes, kv_bytes = make_step(config, spec, plan, lambda: DummyWeights(spec, 0), torch.device("meta"))
    core = Core(
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        vocab_size=spec.vocab_size,
        eos_token_ids=[],
    )
    step = make(PlanLayout.of(core.layout(), core.arena_len()))
    on_host = step.arenas.nbytes + step.staging.nbytes
    taken, planned = allocated() - before - on_host, plan.total_bytes - plan.process_bytes
    assert kv_bytes == plan.kv_bytes
    assert weights_bytes == pytest.approx(plan.weights_bytes, rel=0.001)
    assert planned - 8 * MIB < taken < planned + 8 * MIB, plan.render()
