"""`_core.PackedLinear` against torch in float64 and gguf's own dequantization."""

from __future__ import annotations

import ctypes
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import gguf
import numpy as np
import pytest
import torch
from octavo import _core
from octavo.errors import ConfigError, UnsupportedModel

BLOCK_KINDS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K"]
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
Part = tuple[int, int, str, int]


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    before = _core.cpu_info()
    yield
    _core.cpu_set_isa(before["isa"])
    _core.cpu_set_num_threads(before["num_threads"])


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def part(weight: torch.Tensor) -> Part:
    kind = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[weight.dtype]
    return weight.data_ptr(), weight.numel() * weight.element_size(), kind, len(weight)


def pack(weight: torch.Tensor, dtype: str, bias: torch.Tensor | None = None) -> _core.PackedLinear:
    pointer = 0 if bias is None else bias.data_ptr()
    return _core.PackedLinear([part(weight)], weight.shape[1], dtype, bias=pointer)


def forward(linear: _core.PackedLinear, x: torch.Tensor, *, out_float32: bool = False) -> torch.Tensor:
    out = torch.full((len(x), linear.n), torch.nan, dtype=torch.float32 if out_float32 else x.dtype)
    linear.forward(x.data_ptr(), out.data_ptr(), len(x), out_float32=out_float32)
    return out


def assert_close(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Within what a chain of k float32 sums, and the rounding to out's dtype, may be off."""
    x, weight = x.double(), weight.double()
    exact, size = x @ weight.T, x.abs() @ weight.abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    bound = size * (x.shape[1] + 2) * torch.finfo(torch.float32).eps + exact.abs() * torch.finfo(out.dtype).eps
    assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("isa", _core.cpu_info()["isas"])
@pytest.mark.parametrize(
    ("rows", "n", "k"), [(1, 960, 576), (7, 40, 33), (30, 100, 576), (64, 576, 1536), (3, 5, 1), (26, 31, 4500)]
)
def test_products_match_float64(rows: int, n: int, k: int, isa: str, dtype: str) -> None:
    _core.cpu_set_isa(isa)
    weight, x = noise(n, k, dtype=DTYPES[dtype]), noise(rows, k, seed=1, dtype=DTYPES[dtype])
    bias = noise(n, seed=2)
    plain, biased = pack(weight, dtype), pack(weight, dtype, bias)
    assert (plain.n, plain.k) == (n, k)
    assert plain.num_bytes >= weight.numel() * weight.element_size()
    assert_close(forward(plain, x), x, weight)
    assert_close(forward(biased, x), x, weight, bias)
    assert_close(forward(biased, x, out_float32=True), x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_bits_in_any_company(dtype: str) -> None:
    n, k, most = 576, 1536, 200
    linear, x = pack(noise(n, k, dtype=DTYPES[dtype]), dtype), noise(most, k, seed=1, dtype=DTYPES[dtype])
    _core.cpu_set_num_threads(1)
    alone = torch.cat([forward(linear, x[row : row + 1]) for row in range(most)])
    for threads in (1, 2, 3):
        _core.cpu_set_num_threads(threads)
        for rows in (1, 2, 8, 9, 17, 24, 25, 33, 64, 100, 129, 200):
            assert torch.equal(forward(linear, x[:rows]), alone[:rows])
            assert torch.equal(forward(linear, x[most - rows :]), alone[most - rows :])


def test_threads_that_compute_at_once_do_not_disturb_each_other() -> None:
    _core.cpu_set_num_threads(2)
    linear, x = pack(noise(96, 64), "float32"), noise(40, 64, seed=1)
    expected = forward(linear, x)
    with ThreadPoolExecutor(4) as executor:
        results = list(executor.map(lambda _: forward(linear, x), range(400)))
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own() -> None:
    _core.cpu_set_num_threads(2)
    linear, x = pack(noise(960, 64), "float32"), noise(40, 64, seed=1)
    expected, out = forward(linear, x), torch.zeros(40, 960)
    child = os.fork()
    if child == 0:
        # Nothing of torch here: its own threads did not come along.
        signal.alarm(30)
        linear.forward(x.data_ptr(), out.data_ptr(), 40)
        same = ctypes.string_at(out.data_ptr(), 4 * 40 * 960) == ctypes.string_at(expected.data_ptr(), 4 * 40 * 960)
        os._exit(0 if same else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(forward(linear, x), expected)


def blocks(kind: str, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Random blocks of a GGUF type and what gguf makes of them."""
    quantization = gguf.GGMLQuantizationType[kind]
    block_len, block_bytes = gguf.GGML_QUANT_SIZES[quantization]
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (n, k // block_len, block_bytes), dtype=np.uint8)
    # The scales are float16: any bits would give infinities.
    places = {"Q6_K": (208,), "Q4_0": (0,), "Q5_0": (0,), "Q8_0": (0,)}.get(kind, (0, 2))
    for place in places:
        scales = rng.uniform(-0.1, 0.1, raw.shape[:2]).astype(np.float16)
        raw[:, :, place : place + 2] = scales[..., None].view(np.uint8)
    raw = raw.reshape(n, -1)
    return raw, gguf.quants.dequantize(raw, quantization)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", BLOCK_KINDS)
def test_block_types_are_dequantized_on_the_way(kind: str, dtype: str) -> None:
    n, k = 70, 512
    raw, values = blocks(kind, n, k)
    linear = _core.PackedLinear([(raw.ctypes.data, raw.nbytes, kind, n)], k, dtype)
    # The identity reads the weight back.
    eye = torch.eye(k, dtype=DTYPES[dtype])
    assert torch.equal(forward(linear, eye).T, torch.from_numpy(values).to(DTYPES[dtype]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_several_types_are_stacked_and_embedded(dtype: str) -> None:
    raw, values = blocks("Q4_1", 45, 64)
    half, wide = noise(3, 64, dtype=torch.float16), noise(33, 64, seed=1)
    parts = [part(half), (raw.ctypes.data, raw.nbytes, "Q4_1", 45), part(wide)]
    linear = _core.PackedLinear(parts, 64, dtype)
    weight = torch.cat([half.float(), torch.from_numpy(values), wide]).to(DTYPES[dtype])
    ids = torch.tensor([80, 0, 3, 47, 48, 2, 80], dtype=torch.int32)
    out = torch.empty(len(ids), 64, dtype=DTYPES[dtype])
    linear.embed(ids.data_ptr(), out.data_ptr(), len(ids))
    assert torch.equal(out, weight[ids.long()])
    x = noise(5, 64, seed=2, dtype=DTYPES[dtype])
    assert_close(forward(linear, x), x, weight)


def test_the_memory_of_the_parts_is_not_needed_afterwards() -> None:
    weight = noise(40, 48)
    kept = weight.clone()
    linear = pack(weight, "float32")
    weight.fill_(torch.nan)
    x = noise(4, 48, seed=1)
    assert_close(forward(linear, x), x, kept)


@pytest.mark.parametrize("token_id", [-1, 40, 2**31 - 1, -(2**31)])
def test_an_id_outside_the_embedding_is_named(token_id: int) -> None:
    linear = pack(noise(40, 16), "float32")
    ids, out = torch.tensor([1, token_id], dtype=torch.int32), torch.zeros(2, 16)
    with pytest.raises(ValueError, match=f"token id {token_id} is outside the embedding's 40 rows"):
        linear.embed(ids.data_ptr(), out.data_ptr(), 2)
    assert not out.any()


WEIGHT = noise(4, 48)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda p: _core.PackedLinear([(p, 4 * 4 * 48, "F32", 4)], 48, "float16"), ValueError, 'dtype is "float16"'),
        (lambda p: _core.PackedLinear([(p, 4 * 4 * 47, "F32", 4)], 48, "float32"), ValueError, "are not 4 rows of 48"),
        (lambda p: _core.PackedLinear([(p, 20, "Q4_1", 1)], 48, "float32"), ValueError, "not whole blocks of Q4_1"),
        (lambda p: _core.PackedLinear([(p, 66, "IQ2_XXS", 1)], 256, "float32"), UnsupportedModel, "IQ2_XXS"),
        (lambda p: _core.PackedLinear([(p, 20, "Q9", 1)], 32, "float32"), UnsupportedModel, "Q9"),
        (lambda p: _core.PackedLinear([], 48, "float32"), ValueError, "no rows"),
        (lambda p: _core.PackedLinear([(p, 0, "F32", 9)], 0, "float32"), ValueError, "no columns"),
        (lambda p: _core.PackedLinear([(0, 4 * 4 * 48, "F32", 4)], 48, "float32"), ValueError, "null"),
        (lambda p: pack(WEIGHT, "float32").forward(p + 1, p, 1), ValueError, "not aligned"),
        (lambda p: pack(WEIGHT, "float32").forward(p, p, 2**62), ValueError, "overflow|address space"),
    ],
)
def test_what_does_not_fit_is_refused(make: Callable[[int], object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make(WEIGHT.data_ptr())


def test_no_rows_are_no_work() -> None:
    linear = pack(WEIGHT, "float32")
    linear.forward(0, 0, 0)
    linear.embed(0, 0, 0)


def test_settings_are_reported_and_checked() -> None:
    info = _core.cpu_info()
    assert info["isa"] == info["isas"][-1]
    assert info["isas"][0] == "portable"
    assert info["bf16_native"] == (info["isa"] == "avx512_bf16")
    assert 1 <= info["num_threads"] <= info["physical_cores"]
    _core.cpu_set_num_threads(3)
    assert _core.cpu_info()["num_threads"] == 3
    _core.cpu_set_isa("portable")
    assert _core.cpu_info()["isa"] == "portable"
    with pytest.raises(ConfigError, match="num_threads is 0"):
        _core.cpu_set_num_threads(0)
    with pytest.raises(ConfigError, match='isa is "mmx"; give one of portable'):
        _core.cpu_set_isa("mmx")
    missing = {"portable", "neon", "avx2", "avx512", "avx512_bf16"} - set(info["isas"])
    for isa in missing:
        with pytest.raises(ConfigError, match="this processor has no"):
            _core.cpu_set_isa(isa)
