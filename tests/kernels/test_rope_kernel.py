"""Head norms, rotation and the writing of the KV cache against the reference; e4m3 codes against torch's."""

from __future__ import annotations

import pytest
import reference_kernels as reference
import torch
import triton
import triton.language as tl
from octavo.kernels.fp8 import encode_e4m3
from octavo.kernels.launch import launch
from octavo.kernels.rope_and_cache import rope_and_cache

TOKENS, BLOCKS, BLOCK_SIZE, POSITIONS = 5, 6, 16, 40


def table(rotary_dim: int, device: torch.device) -> torch.Tensor:
    frequency = 10_000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
    angle = torch.arange(POSITIONS)[:, None] * frequency
    return torch.cat((angle.cos(), angle.sin()), dim=-1).to(device)


def check(
    device: torch.device,
    dtype: torch.dtype,
    *,
    heads: int = 6,
    kv_heads: int = 2,
    head_dim: int = 64,
    rotary_dim: int = 64,
    norms: bool = False,
    fp8: bool = False,
) -> None:
    generator = torch.Generator().manual_seed(head_dim + rotary_dim)
    qkv = torch.randn(TOKENS, (heads + 2 * kv_heads) * head_dim, generator=generator).to(dtype).to(device)
    cache = torch.zeros(BLOCKS, 2, kv_heads, BLOCK_SIZE, head_dim, device=device, dtype=dtype)
    if fp8:
        cache = cache.to(torch.float8_e4m3fn)
    positions = torch.tensor([3, 39, 0, 17, 16], dtype=torch.int32, device=device)
    slots = torch.tensor([95, 3, -1, 16, 40], dtype=torch.int32, device=device)
    weights = (torch.rand(2, head_dim, generator=generator) + 0.5).to(device)
    options = {
        "q_norm": weights[0] if norms else None,
        "k_norm": weights[1] if norms else None,
        "eps": 1e-6,
    }
    expected_qkv, expected_cache = qkv.clone(), cache.clone()
    reference.rope_and_cache(
        expected_qkv, expected_cache, positions, slots, table(rotary_dim, device), heads, **options
    )
    rope_and_cache(qkv, cache, positions, slots, table(rotary_dim, device), heads, TOKENS, **options)
    if norms:
        # Sums of squares in another order tip a rounding now and then, and that one a digit of e4m3.
        digits = {torch.bfloat16: 2**-7, torch.float16: 2**-10, torch.float32: 2e-6}[dtype]
        torch.testing.assert_close(qkv, expected_qkv, rtol=digits, atol=digits * 2)
        near = 2**-3 if fp8 else digits
        torch.testing.assert_close(cache.float(), expected_cache.float(), rtol=near, atol=near * 2)
        assert dtype == torch.float32 or (cache.float() == expected_cache.float()).float().mean() > 0.99
    else:
        assert qkv.equal(expected_qkv)
        assert cache.view(torch.uint8).equal(expected_cache.view(torch.uint8))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(64, 64), (96, 96), (80, 32), (80, 48), (128, 96)])
def test_equal_to_the_reference(
    head_dim: int, rotary_dim: int, norms: bool, fp8: bool, device: torch.device, dtype: torch.dtype
) -> None:
    check(device, dtype, head_dim=head_dim, rotary_dim=rotary_dim, norms=norms, fp8=fp8)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (20, 10), (9, 9)])
def test_heads_that_fill_no_program(heads: int, kv_heads: int, device: torch.device) -> None:
    check(device, torch.float16, heads=heads, kv_heads=kv_heads)


def test_a_token_does_not_depend_on_the_others(device: torch.device, dtype: torch.dtype) -> None:
    def run(qkv: torch.Tensor, positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        cache = torch.zeros(1, 2, 2, BLOCK_SIZE, 64, device=device, dtype=dtype)
        place = torch.tensor(positions, dtype=torch.int32, device=device)
        weight = torch.full((64,), 1.25, device=device)
        options = {"q_norm": weight, "k_norm": weight, "eps": 1e-6}
        rope_and_cache(qkv, cache, place, place % BLOCK_SIZE, table(64, device), 6, len(positions), **options)
        return qkv, cache

    qkv = torch.randn(4, 10 * 64, generator=torch.Generator().manual_seed(2)).to(dtype).to(device)
    qkv[1] = torch.nan
    together, cache = run(qkv.clone(), [3, 4, 22, 39])
    for token, position in ((0, 3), (2, 22), (3, 39)):
        alone, alone_cache = run(qkv[token : token + 1].clone(), [position])
        assert alone[0].equal(together[token])
        assert alone_cache[:, :, :, position % BLOCK_SIZE].equal(cache[:, :, :, position % BLOCK_SIZE])


@triton.jit
def encode_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(out_ptr + offsets, encode_e4m3(tl.load(x_ptr + offsets)))


def test_e4m3_codes_are_those_of_torch(device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    exact = codes[~codes.isnan()]
    between = (exact.sort().values[1:] + exact.sort().values[:-1]) / 2
    near = torch.cat((between.nextafter(torch.tensor(1e9)), between.nextafter(torch.tensor(-1e9))))
    random = torch.randn(1000) * torch.logspace(-5, 3, 1000)
    edges = torch.tensor([1e-30, -1e-40, 448.0, 464.0, 1e30, -1e30, torch.inf, -torch.inf])
    x = torch.cat((exact, between, near, random, edges))
    x = torch.nn.functional.pad(x, (0, 2048 - x.numel())).to(device)
    out = torch.empty(2048, dtype=torch.uint8, device=device)
    launch(encode_kernel, (1,), x, out, BLOCK=2048, enable_fp_fusion=False)
    assert out.equal(x.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    x[:2] = torch.tensor([torch.nan, -torch.nan])
    launch(encode_kernel, (1,), x, out, BLOCK=2048, enable_fp_fusion=False)
    assert (out[:2] & 0x7F == 0x7F).all()
