"""Uploaded weights equal the stored ones, whatever the file, the dtype and the size of the staging buffers."""

from __future__ import annotations

import dataclasses
import gc
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from decoders import make_decoder
from octavo.errors import ModelError, UnsupportedModel
from octavo.layers.backends import cuda_upload
from octavo.layers.backends.cuda_upload import stacked_weight
from octavo.layers.dummy_weights import DummyWeights
from octavo.layers.parameter import to_float32
from octavo.loading.checkpoint import open_folder
from octavo.loading.gguf import GgufWeights
from safetensors.torch import save_file

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAMES = ["model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"]


@pytest.fixture(autouse=True, params=[1 << 10, 8 << 20], ids=["many-chunks", "one-chunk"])
def chunk_bytes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(cuda_upload, "_CHUNK_BYTES", request.param)
    return int(request.param)


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(shape[0]))


def numpy_stack(weights: Any, names: list[str], dtype: torch.dtype) -> torch.Tensor:
    """The same by way of float32 on the host."""
    return torch.from_numpy(np.concatenate([to_float32(weights.get(name)) for name in names])).to(dtype)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("stored", DTYPES, ids=str)
def test_safetensors(tmp_path: Path, stored: torch.dtype, dtype: torch.dtype, device: str) -> None:
    # An odd width: chunks start within rows, and the second tensor is not aligned.
    tensors = {NAMES[0]: draw(9, 131), NAMES[1]: draw(13, 131)}
    save_file({name: tensor.to(stored) for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    weights = open_folder(tmp_path)
    out = stacked_weight(weights, NAMES, dtype, torch.device(device))
    assert out.shape == (22, 131)
    assert out.is_contiguous()
    assert out.dtype == dtype
    assert torch.equal(out.cpu(), torch.cat([tensors[name].to(stored) for name in NAMES]).to(dtype))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "F16"])
def test_gguf(tmp_path: Path, kind: str, dtype: torch.dtype, device: str) -> None:
    quantization = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "qwen3")
    for name, rows in (("blk.0.ffn_gate.weight", 6), ("blk.0.ffn_up.weight", 7)):
        writer.add_tensor(name, gguf.quantize(draw(rows, 288).numpy(), quantization), raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    weights = GgufWeights(tmp_path / "model.gguf", make_decoder("Qwen3ForCausalLM").parameters())
    out = stacked_weight(weights, NAMES, dtype, torch.device(device))
    assert torch.equal(out.cpu(), numpy_stack(weights, NAMES, dtype))


@dataclasses.dataclass(eq=False)
class Held:
    """Weights held in memory."""

    tensors: dict[str, torch.Tensor]
    kinds: dict[str, str] = dataclasses.field(default_factory=dict)

    def names(self) -> list[str]:
        return list(self.tensors)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        return self.kinds.get(name, "F32"), tuple(self.tensors[name].shape)

    def get(self, name: str) -> Any:
        kind, shape = self.describe(name)
        tensor = self.tensors[name]
        return SimpleNamespace(kind=kind, shape=shape, pointer=tensor.data_ptr(), num_bytes=tensor.nbytes)


@pytest.mark.parametrize("device", DEVICES)
def test_vectors_stack(device: str) -> None:
    weights = Held({"a": draw(700), "b": draw(3)})
    out = stacked_weight(weights, ["a", "b"], torch.bfloat16, torch.device(device))
    assert torch.equal(out.cpu(), torch.cat([weights.tensors["a"], weights.tensors["b"]]).bfloat16())


def test_on_meta_nothing_is_read() -> None:
    weights = Held({"a": torch.empty(4, 8, device="meta"), "b": torch.empty(2, 8, device="meta")})
    out = stacked_weight(weights, ["a", "b"], torch.float16, torch.device("meta"))
    assert (out.shape, out.dtype, out.device.type) == ((6, 8), torch.float16, "meta")


def test_tensors_that_do_not_stack() -> None:
    weights = Held({"a": draw(2, 8), "b": draw(2, 9)})
    with pytest.raises(ModelError, match=r"cannot be stacked: a \[2, 8\], b \[2, 9\]"):
        stacked_weight(weights, ["a", "b"], torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("device", DEVICES)
def test_bytes_that_are_not_the_tensor(device: str) -> None:
    weights = Held({"a": draw(2, 8)}, {"a": "F16"})
    with pytest.raises(ModelError, match=r"a: 64 bytes are not 16 elements of F16"):
        stacked_weight(weights, ["a"], torch.float32, torch.device(device))


@pytest.mark.parametrize("device", DEVICES)
def test_after_an_error_nothing_runs_and_the_next_upload_works(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Held({"good": draw(300, 64), "bad": draw(300, 64)}, {"bad": "F8_E4M3"})
    running = threading.Semaphore(0)
    chunk: Callable[..., None] = cuda_upload._Ring._chunk

    def counted(*arguments: Any) -> None:
        running.release()
        try:
            chunk(*arguments)
        finally:
            running.acquire()

    monkeypatch.setattr(cuda_upload._Ring, "_chunk", counted)
    with pytest.raises(UnsupportedModel, match="F8_E4M3"):
        stacked_weight(weights, ["good", "bad"], torch.float32, torch.device(device))
    assert not running.acquire(blocking=False)
    for _ in range(3):
        out = stacked_weight(weights, ["good"], torch.float32, torch.device(device))
        assert torch.equal(out.cpu(), weights.tensors["good"])


@pytest.mark.parametrize("device", DEVICES)
def test_staging_memory_and_threads_go_with_the_weights(device: str) -> None:
    def threads() -> int:
        return sum(thread.name.startswith("octavo-upload") for thread in threading.enumerate())

    gc.collect()
    before, rings = threads(), len(cuda_upload._RINGS)
    weights = Held({"a": draw(64, 64)})
    stacked_weight(weights, ["a"], torch.float32, torch.device(device))
    assert threads() > before
    assert weights in cuda_upload._RINGS
    del weights
    gc.collect()
    assert threads() == before
    assert len(cuda_upload._RINGS) == rings


PARAMETERS = list(make_decoder("Qwen2ForCausalLM", hidden_size=64, num_hidden_layers=1).parameters())


@pytest.mark.parametrize("seed", [0, -3, (1 << 63) - 1])
def test_dummy_weights_on_the_host_are_numpys(seed: int) -> None:
    weights = DummyWeights(PARAMETERS, seed)
    out = stacked_weight(weights, NAMES, torch.bfloat16, torch.device("cpu"))
    assert torch.equal(out, numpy_stack(weights, NAMES, torch.bfloat16))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dummy_weights_are_drawn_where_they_lie(dtype: torch.dtype, device: str) -> None:
    def tensor(seed: int, name: str) -> torch.Tensor:
        weights = DummyWeights(PARAMETERS, seed)
        out = torch.empty(weights.describe(name)[1], dtype=dtype, device=device)
        weights.draw(name, out)
        return out.float().cpu()

    first = tensor(1, NAMES[0])
    assert torch.equal(first, tensor(1, NAMES[0]))
    assert not torch.equal(first, tensor(2, NAMES[0]))
    assert not torch.equal(first, tensor(1, NAMES[1]))
    assert first.std().item() == pytest.approx(0.02, rel=0.1)
    assert abs(first.mean().item()) < 0.002
    assert torch.equal(tensor(-5, "model.norm.weight"), torch.ones(64))
    assert torch.equal(tensor(0, "model.layers.0.self_attn.q_proj.bias"), torch.zeros(64))


@pytest.mark.gpu
def test_dummy_weights_of_a_gpu_are_drawn_there() -> None:
    weights, device = DummyWeights(PARAMETERS, 7), torch.device("cuda")
    out = stacked_weight(weights, NAMES, torch.bfloat16, device)
    expected = torch.empty_like(out)
    for name, target in zip(NAMES, expected.chunk(2), strict=True):
        weights.draw(name, target)
    assert torch.equal(out, expected)
