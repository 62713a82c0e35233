"""A GPU's memory plan against what the parts of a step really allocate, counted on tensors without memory."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from decoders import make_decoder
from octavo._core import Core
from octavo.config import EngineConfig
from octavo.errors import ConfigError, NotEnoughMemory
from octavo.kernels.step import PlanLayout
from octavo.layers.decoder import Decoder
from octavo.layers.dummy_weights import DummyWeights
from octavo.runner import cuda_build
from octavo.runner.cuda_build import RESERVE_BYTES, cuda_needs, make_step
from octavo.runner.device import Gpu
from octavo.runner.memory import plan_memory

MIB, GIB = 1 << 20, 1 << 30
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-0.6b": (
        "Qwen3ForCausalLM",
        {
            "vocab_size": 151936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 28,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "tie_word_embeddings": True,
        },
    ),
    "llama3-8b": (
        "LlamaForCausalLM",
        {
            "vocab_size": 128256,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
        },
    ),
    "biases": (
        "LlamaForCausalLM",
        {
            "vocab_size": 32000,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 6,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "gemma": (
        "Gemma2ForCausalLM",
        {
            "vocab_size": 32000,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 6,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "sliding_window": 1024,
            "tie_word_embeddings": True,
        },
    ),
}


def decoder_of(shape: str, **changes: Any) -> Decoder:
    architecture, keys = SHAPES[shape]
    return make_decoder(architecture, **{**keys, "head_dim": 128, "max_position_embeddings": 40960, **changes})


def allocated() -> int:
    """Bytes of all tensors on the meta device, memory that several share once."""
    gc.collect()
    storages = {
        x.untyped_storage()._cdata: x.untyped_storage().nbytes()
        for x in gc.get_objects()
        if type(x) is torch.Tensor and x.device.type == "meta"
    }
    return sum(storages.values())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "changes", [{}, {"max_num_seqs": 1024, "max_num_batched_tokens": 2048}, {"kv_cache_dtype": "fp8", "block_size": 32}]
)
def test_the_plan_holds_what_is_allocated(shape: str, changes: dict[str, Any]) -> None:
    decoder = decoder_of(shape)
    config = EngineConfig(model="m", **{"max_model_len": 9000, **changes})
    needs = cuda_needs(config, decoder, config.sequence_counts("cuda")[-1])
    plan = plan_memory(config, decoder, name="m", dtype="bfloat16", free_bytes=60 * GIB, needs=needs)
    before = allocated()
    make, weights_bytes, kv_bytes = make_step(
        config, decoder, plan, lambda: DummyWeights(decoder.parameters(), 0), torch.device("meta")
    )
    core = Core(
        block_size=plan.block_size,
        num_blocks=plan.num_blocks,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        vocab_size=decoder.vocab_size,
        eos_token_ids=[],
        windows=list(decoder.cache_layout.windows),
    )
    step = make(PlanLayout.of(core.layout(), core.arena_len()))
    on_host = step.arenas.nbytes + step.masks.nbytes + step.staging.nbytes
    taken, planned = allocated() - before - on_host, plan.total_bytes - plan.process_bytes
    assert kv_bytes == plan.kv_bytes
    assert weights_bytes == pytest.approx(plan.weights_bytes, rel=0.001)
    assert planned - 8 * MIB < taken < planned + 8 * MIB, plan.render()


def reserve(num_layers: int, **changes: Any) -> int:
    decoder = decoder_of("llama3-8b", num_hidden_layers=num_layers)
    config = EngineConfig(model="m", **changes)
    return cuda_needs(config, decoder, config.sequence_counts("cuda")[-1]).process_bytes


def test_graphs_of_many_sizes_and_layers_have_room() -> None:
    assert [reserve(layers) for layers in (1, 28, 36, 64)] == [RESERVE_BYTES] * 4
    by_layers = [reserve(layers, max_num_seqs=1024) for layers in (1, 32, 80, 126)]
    assert by_layers == sorted(by_layers)
    by_sizes = [reserve(126, max_num_seqs=rows, max_num_batched_tokens=32 * rows) for rows in (8, 64, 256, 1024)]
    assert by_sizes == sorted(by_sizes)
    assert by_layers[-1] > by_layers[0] == RESERVE_BYTES
    assert by_sizes[-1] > by_sizes[0] == RESERVE_BYTES


class Tensors:
    """Stands in for a model's weights."""


@pytest.mark.parametrize("where", ["loading", "compiling"])
@pytest.mark.parametrize("fault", [torch.OutOfMemoryError("CUDA out of memory"), ConfigError("no compiler")])
def test_a_build_that_fails_gives_its_memory_back(
    where: str, fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though the error, whose traceback leads through what was loaded, is still at hand."""
    made: list[weakref.ref[Tensors]] = []
    given_back: list[bool] = []
    restored: list[bool] = []

    class Compiler:
        def __init__(self, _calls: Any, _device: int) -> None:
            pass

        def wait(self) -> None:
            raise fault

    def load(*_args: Any) -> Any:
        tensors = Tensors()
        made.append(weakref.ref(tensors))
        if where == "loading":
            raise fault
        return lambda _layout: tensors, 1, 1

    monkeypatch.setattr(cuda_build, "configure_cublas", lambda: lambda: restored.append(True))
    monkeypatch.setattr(cuda_build, "find_gpu", lambda: Gpu(0, "NVIDIA Test", (9, 0), GIB, GIB))
    monkeypatch.setattr(cuda_build, "MemoryMeter", lambda _device: None)
    monkeypatch.setattr(cuda_build, "KernelCompiler", Compiler)
    monkeypatch.setattr(cuda_build, "make_step", load)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(made[0]() is None))
    decoder = decoder_of("llama3-8b")
    config = EngineConfig(model="m", max_model_len=9000)
    plan = plan_memory(
        config,
        decoder,
        name="m",
        dtype="bfloat16",
        free_bytes=60 * GIB,
        needs=cuda_needs(config, decoder, config.sequence_counts("cuda")[-1]),
    )
    expected = NotEnoughMemory if isinstance(fault, torch.OutOfMemoryError) else ConfigError
    nothing: Any = None
    with pytest.raises(expected):
        cuda_build.build_cuda_runner(config, decoder, plan, nothing, nothing, None)
    assert given_back[-1]
    assert restored == [True]
