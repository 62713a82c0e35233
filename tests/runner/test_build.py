"""Building a runner: what it refuses, and random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from octavo import _core
from octavo.config import EngineConfig
from octavo.errors import ConfigError, ModelError, ModelNotFound, NotEnoughMemory, UnsupportedModel
from octavo.loading.resolve import resolve_model
from octavo.runner import build_runner, device, plan_model, runner_builder
from octavo.runner.device import Gpu

SHAPES = Path(__file__).parents[2] / "benches" / "shapes"
RAW = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
}


def config_folder(path: Path, **changes: Any) -> Path:
    (path / "config.json").write_text(json.dumps(RAW | changes))
    return path


def build(folder: Path, **changes: Any) -> Any:
    settings = {"device": "cpu", "load_format": "dummy", "max_num_seqs": 4, "max_num_batched_tokens": 64, **changes}
    config = EngineConfig(model=str(folder), **settings)
    return build_runner(config, resolve_model(config.model))


def answer_of(runner: Any, info: Any) -> list[int]:
    """Twelve greedy tokens."""
    core = _core.Core(
        block_size=info.block_size,
        num_blocks=info.num_blocks,
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        eos_token_ids=[],
    )
    runner.attach(core)
    core.submit(0, np.arange(9, dtype=np.int32).tobytes(), arrival_us=0, max_tokens=12, temperature=0.0)
    tokens: list[int] = []
    while core.has_work():
        plan = core.plan()
        assert plan is not None
        runner.launch(plan).result()
        tokens += np.frombuffer(core.commit(plan.step).token_ids, dtype=np.int32).tolist()
    return tokens


def test_random_weights_are_the_same_for_one_seed(tmp_path: Path) -> None:
    folder = config_folder(tmp_path)

    def answer(seed: int) -> list[int]:
        return answer_of(*build(folder, seed=seed, dtype="float32"))

    assert answer(0) == answer(0)
    assert answer(0) != answer(1)


def test_progress_runs_to_its_end(tmp_path: Path) -> None:
    config = EngineConfig(model=str(config_folder(tmp_path)), device="cpu", load_format="dummy")
    calls: list[tuple[str, int, int]] = []
    build_runner(config, resolve_model(config.model), lambda *call: calls.append(call))
    assert calls[0] == ("weights", 0, 3)
    assert calls[-1] == ("weights", 3, 3)
    assert calls == sorted(calls)


def test_info_tells_what_was_loaded(tmp_path: Path) -> None:
    runner, info = build(config_folder(tmp_path), dtype="float32", num_blocks=20)
    assert runner.info is info
    assert info.eos_token_ids == (2,)
    assert info.num_blocks == 20
    assert info.kv_bytes == 20 * 16 * 2 * 2 * 64 * 4
    parameters = 2 * 64 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 96 + 2 * 64) + 64
    assert info.weights_bytes >= 4 * parameters


def test_an_8_bit_cache_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype: `fp8` is not supported on a CPU; use `auto`"):
        build(config_folder(tmp_path), device="cpu", kv_cache_dtype="fp8")


def test_an_8_bit_cache_is_refused_with_the_reason_why_there_is_no_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_ROOT", tmp_path)
    with pytest.raises(ConfigError, match=r"use `auto` \(no GPU is used: there is no NVIDIA driver here"):
        build(config_folder(tmp_path), device="auto", kv_cache_dtype="fp8")


def test_unknown_architectures_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="'BloomForCausalLM' is not supported"):
        build(config_folder(tmp_path, architectures=["BloomForCausalLM"]))


@pytest.mark.parametrize("head_dim", [24, 272])
def test_heads_the_kernels_lack_are_refused(head_dim: int, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=f"head_dim: heads of {head_dim} channels are not supported"):
        build(config_folder(tmp_path, head_dim=head_dim))


@pytest.mark.parametrize("head_dim", [16, 48, 256])
def test_heads_the_kernels_have_run(head_dim: int, tmp_path: Path) -> None:
    runner, info = build(config_folder(tmp_path, head_dim=head_dim, hidden_size=70), dtype="float32")
    assert len(answer_of(runner, info)) == 12


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="no weights"):
        build(config_folder(tmp_path), load_format="auto")


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    save_file({"model.embed_tokens.weight": torch.zeros(64, 64)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"lack model\.layers\.0\.input_layernorm\.weight"):
        build(config_folder(tmp_path), load_format="auto")


def test_a_huge_model_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    folder = config_folder(
        tmp_path,
        hidden_size=65536,
        intermediate_size=262144,
        num_hidden_layers=256,
        num_attention_heads=512,
        vocab_size=256000,
    )
    with pytest.raises(NotEnoughMemory, match=r"not even one block of KV cache fits.*use a smaller model"):
        build(folder)
    with pytest.raises(NotEnoughMemory):
        plan_model(EngineConfig(model=str(folder), device="cpu"), resolve_model(str(folder)))


def test_closing_gives_the_memory_back(tmp_path: Path) -> None:
    import gc
    import weakref

    runner, _ = build(config_folder(tmp_path))
    cache = weakref.ref(runner._cache)
    runner.close()
    runner.close()
    gc.collect()
    assert cache() is None


def test_recommended_sampling_reaches_the_model_info(tmp_path: Path) -> None:
    folder = config_folder(tmp_path)
    assert build(folder)[1].sampling_defaults == {}
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.9}))
    assert build(folder)[1].sampling_defaults == {"temperature": 0.6, "top_p": 0.9}


@pytest.mark.parametrize(
    ("shape", "free_gib", "settings", "sequences"),
    [
        ("qwen3-0.6b", 139, {}, 1024),
        ("llama3-8b", 139, {}, 1024),
        ("llama3-8b", 139, {"max_num_batched_tokens": 300}, 300),
        ("llama3-8b", 139, {"max_num_seqs": 7}, 7),
        ("llama3-8b", 79, {}, 512),
        ("llama3-8b", 24, {}, 256),
        ("qwen3-0.6b", 8, {}, 256),
    ],
)
def test_a_gpu_runs_as_many_sequences_as_cost_little_of_its_cache(
    monkeypatch: pytest.MonkeyPatch, shape: str, free_gib: int, settings: dict[str, Any], sequences: int
) -> None:
    monkeypatch.setattr(runner_builder, "resolve_device", lambda _config: "cuda")
    monkeypatch.setattr(runner_builder, "resolve_dtype", lambda _config, _device: "bfloat16")
    gpu = Gpu(0, "NVIDIA Test", (9, 0), free_gib << 30, free_gib << 30)
    monkeypatch.setattr(runner_builder, "find_gpu", lambda: gpu)
    source = resolve_model(str(SHAPES / shape))
    config = EngineConfig(model="m", load_format="dummy", **settings)
    plan = runner_builder.plan_model(config, source)
    assert plan.max_num_seqs == sequences
    if not settings:
        least = runner_builder.plan_model(msgspec.structs.replace(config, max_num_seqs=256), source)
        assert plan.max_model_len == least.max_model_len
        assert plan.num_blocks >= 0.9 * least.num_blocks


def test_a_cpu_runs_256_sequences(tmp_path: Path) -> None:
    _, info = build(config_folder(tmp_path), max_num_seqs=None, max_num_batched_tokens=None, kv_cache_memory=1 << 20)
    assert info.max_num_seqs == 256
    _, info = build(config_folder(tmp_path), max_num_seqs=None, max_num_batched_tokens=64)
    assert info.max_num_seqs == 64
